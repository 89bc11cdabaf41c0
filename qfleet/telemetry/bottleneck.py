"""Bottleneck analysis: compare the rate of each stage alone with the rate of the whole run.

All rates are in env steps per second, so that stages can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qfleet.core.errors import ConfigError
from qfleet.telemetry.formatting import format_rate, format_steps

OVERHEAD_BELOW = 0.7
"""Below this share of its slowest stage's rate, a run is limited by the waits between stages, not
by a stage."""
LARGER = 8
"""Factor by which the advice for a slow learner enlarges the batches."""
ADVICE = {
    "env": "The environments are the bottleneck: {reached}; more than {cpu_cores} would help, "
    "{gpu} would not.",
    # An environment is stepped by one core at a time: fewer envs than cores leave some unused.
    "unused cores": "The environments are the bottleneck: {reached}; --envs {cores} or more, to "
    "use all {cpu_cores}, would help, {gpu} would not.",
    "inference": "Inference is the bottleneck: {reached}; more than {envs} envs would make larger "
    "groups, which cost less per env, and {other_device} may be faster.",
    "learner": "The learner is the bottleneck: {reached}; what would help: fewer, larger updates "
    "at the same {samples} samples per step ({larger}), {faster}.",
    "overhead": "The stages wait for each other: {reached}, the rate of {stage} alone; more than "
    "{envs} envs or a wider --replay-slack would let them overlap more.",
    # On a CPU a stage that is measured alone may use all cores. Together the stages share the
    # cores, and overlap cannot make that faster than taking turns.
    "shared cores": "The stages wait for each other: {reached}, the rate of {stage} alone; they "
    "share {cpu_cores}, where taking turns would give {turns}: a GPU or more cores would help.",
    "device env": "Stepping the environments takes most of the device's time {in_turns}; more than "
    "{envs} envs would cost less each.",
    "device learner": "Learning takes most of the device's time {in_turns}; fewer, larger updates "
    "({larger}) would help.",
}
"""A sentence per case; ``diagnose`` fills in the figures."""


@dataclass(frozen=True)
class StageRates:
    """The rate of each stage measured alone, and that of the whole run, in env steps per second."""

    env_only: float | None
    inference_only: float | None
    learner_only: float | None
    """Updates per second divided by updates per env step."""
    end_to_end: float


@dataclass(frozen=True)
class Diagnosis:
    """The bottleneck of a run, and a sentence that says what would make the run faster."""

    bottleneck: str
    """env, inference, learner, or overhead: the waits between them."""
    share_of_slowest: float
    """The run's rate as a share of its slowest stage's rate."""
    sentence: str


def diagnose(
    rates: StageRates,
    *,
    cores: int,
    envs: int,
    device_type: str,
    updates_per_env_step: float,
    batch_size: int,
    share_a_device: bool = False,
) -> Diagnosis:
    """Return the bottleneck. ``device_type`` is that of the learner: cpu, cuda …

    ``share_a_device``: all stages take turns on one device, so neither more CPU cores nor more
    overlap would help.
    """
    stages = (rates.env_only, rates.inference_only, rates.learner_only)
    named = zip(("env", "inference", "learner"), stages, strict=True)
    alone = {stage: rate for stage, rate in named if rate is not None}
    if not alone:
        raise ConfigError("no stage was measured alone; measure at least one of them")
    for name, rate in {**alone, "end-to-end": rates.end_to_end}.items():
        # A run may end before its first step; a stage that is measured makes steps.
        if not (0 < rate < math.inf or (rate == 0 and name == "end-to-end")):
            raise ConfigError(f"rate {rate} of {name} must be positive and finite; measure longer")

    slowest = min(alone, key=lambda stage: alone[stage])
    share = rates.end_to_end / alone[slowest]
    turns = 1.0 / sum(1.0 / rate for rate in alone.values())
    on_cpu = device_type == "cpu"
    bottleneck = case = slowest
    if share_a_device:
        case = "device learner" if slowest == "learner" else "device env"
    elif share < OVERHEAD_BELOW:
        bottleneck = case = "overhead"
        if on_cpu and rates.end_to_end >= OVERHEAD_BELOW * turns:
            case = "shared cores"
    elif slowest == "env" and envs < cores:
        case = "unused cores"
    reached = _short(rates.end_to_end)
    sentence = ADVICE[case].format(
        stage=slowest,
        reached=f"{reached} of {_short(alone[slowest])} steps/s are reached ({_percent(share)})",
        in_turns=f"({_percent(turns / alone[slowest])}): {reached} of the {_short(turns)} steps/s "
        "that taking turns allows are reached",
        turns=_short(turns),
        cores=cores,
        cpu_cores=f"{cores} CPU core{'s' * (cores > 1)}",
        envs=envs,
        gpu="a GPU" if on_cpu else "a faster GPU",
        other_device="a GPU" if on_cpu else "the other device, CPU or GPU,",
        faster="a GPU" if on_cpu else "bf16, a faster GPU",
        samples=_short(updates_per_env_step * batch_size),
        larger=f"--batch-size {LARGER * batch_size} with {LARGER} times the --train-freq",
    )
    return Diagnosis(bottleneck, share, sentence)


def rates_table(rates: StageRates, diagnosis: Diagnosis) -> str:
    """Return a table of the four rates, followed by the diagnosis in a sentence."""
    lines = []
    for name, rate in vars(rates).items():
        figure = "–" if rate is None else f"{format_rate(rate)} steps/s"
        lines.append(f"{name.replace('_', '-'):<15} {figure:>20}")
    lines[-1] += f"   {_percent(diagnosis.share_of_slowest)} of the slowest stage"
    return "\n".join([*lines, diagnosis.sentence])


def _short(rate: float) -> str:
    return format_steps(float(f"{rate:.3g}"))


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
