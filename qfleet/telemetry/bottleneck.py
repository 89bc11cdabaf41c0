"""Bottleneck analysis: compare the rate of each stage alone with the rate of the whole run.

All rates are in env steps per second, so that stages can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from qfleet.core.errors import ConfigError
from qfleet.telemetry.formatting import format_rate, format_steps

Stage: TypeAlias = Literal["env", "inference", "learner"]

OVERHEAD_BELOW = 0.7
"""Below this share of its slowest stage's rate, a run is limited by the waits between stages, not
by a stage."""
LARGER = 8
"""Factor by which the advice for a slow learner enlarges the batches."""


@dataclass(frozen=True)
class StageRates:
    """The rate of each stage measured alone, and that of the whole run, in env steps per second."""

    env_only: float | None
    inference_only: float | None
    learner_only: float | None
    """Updates per second divided by updates per env step."""
    end_to_end: float

    def measured(self) -> dict[Stage, float]:
        """Return the rates of the stages that were measured."""
        rates: dict[Stage, float | None] = {
            "env": self.env_only,
            "inference": self.inference_only,
            "learner": self.learner_only,
        }
        return {stage: rate for stage, rate in rates.items() if rate is not None}


@dataclass(frozen=True)
class Diagnosis:
    """The bottleneck of a run, and a sentence that says what would make the run faster."""

    bottleneck: Literal["env", "inference", "learner", "overhead"]
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
    alone = rates.measured()
    if not alone:
        raise ConfigError("no stage was measured alone; measure at least one of them")
    for stage, rate in alone.items():
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"rate {rate} of stage {stage} must be positive; measure it longer")
    if not (math.isfinite(rates.end_to_end) and rates.end_to_end >= 0):
        raise ConfigError(f"end-to-end rate {rates.end_to_end} must not be negative or infinite")

    slowest = min(alone, key=lambda stage: alone[stage])
    share = rates.end_to_end / alone[slowest]
    if share_a_device:
        return Diagnosis(slowest, share, _turns(rates, slowest, envs, batch_size))
    if share < OVERHEAD_BELOW:
        sentence = _overhead(rates, slowest, cores, envs, device_type)
        return Diagnosis("overhead", share, sentence)
    reached = (
        f"{_short(rates.end_to_end)} of {{}} {_short(alone[slowest])} steps/s are reached "
        f"({_percent(share)})"
    )
    match slowest:
        case "env":
            sentence = _env(reached, cores, envs, device_type)
        case "inference":
            sentence = _inference(reached, envs, device_type)
        case "learner":
            sentence = _learner(reached, device_type, updates_per_env_step, batch_size)
    return Diagnosis(slowest, share, sentence)


def rates_table(rates: StageRates, diagnosis: Diagnosis) -> str:
    """Return a table of the four rates, followed by the diagnosis in a sentence."""
    lines = []
    for name, rate in (
        ("env-only", rates.env_only),
        ("inference-only", rates.inference_only),
        ("learner-only", rates.learner_only),
        ("end-to-end", rates.end_to_end),
    ):
        figure = "–" if rate is None else f"{format_rate(rate)} steps/s"
        lines.append(f"{name:<15} {figure:>20}")
    lines[-1] += f"   {_percent(diagnosis.share_of_slowest)} of the slowest stage"
    return "\n".join([*lines, diagnosis.sentence])


def _env(reached: str, cores: int, envs: int, device_type: str) -> str:
    # An environment is stepped by one core at a time: fewer envs than cores leave some unused.
    mend = (
        f"--envs {cores} or more, to use all {cores} CPU cores, would help"
        if envs < cores
        else f"more than {cores} CPU cores would help"
    )
    return (
        f"The environments are the bottleneck: {reached.format('their')}; "
        f"{mend}, {_gpu(device_type)} would not."
    )


def _inference(reached: str, envs: int, device_type: str) -> str:
    elsewhere = "a GPU" if device_type == "cpu" else "the other device, CPU or GPU,"
    return (
        f"Inference is the bottleneck: {reached.format('its')}; more envs than {envs} would make "
        f"larger groups, which cost less per env, and {elsewhere} may be faster."
    )


def _learner(reached: str, device_type: str, updates_per_env_step: float, batch_size: int) -> str:
    samples = format_steps(float(f"{updates_per_env_step * batch_size:.3g}"))
    faster = "a GPU" if device_type == "cpu" else "bf16, a faster GPU"
    return (
        f"The learner is the bottleneck: {reached.format('its')}; what would help: fewer, larger "
        f"updates at the same {samples} samples per step (--batch-size {LARGER * batch_size} with "
        f"{LARGER} times the --train-freq), {faster}."
    )


def _overhead(rates: StageRates, slowest: Stage, cores: int, envs: int, device_type: str) -> str:
    alone = rates.measured()
    share = _percent(rates.end_to_end / alone[slowest])
    waits = (
        f"The stages wait for each other: {_short(rates.end_to_end)} steps/s are {share} of the "
        f"{_short(alone[slowest])} of the slowest stage ({slowest})"
    )
    # On a CPU a stage that is measured alone may use all cores. Together the stages share the
    # cores, and overlap cannot make that faster than taking turns.
    turns = 1.0 / sum(1.0 / rate for rate in alone.values())
    if device_type == "cpu" and rates.end_to_end >= OVERHEAD_BELOW * turns:
        return (
            f"{waits}; they share {cores} CPU core{'s' * (cores > 1)}, where taking turns would "
            f"give {_short(turns)}: a GPU or more cores would help."
        )
    return f"{waits}; more envs than {envs} or a wider --replay-slack would let them overlap more."


def _turns(rates: StageRates, slowest: Stage, envs: int, batch_size: int) -> str:
    alone = rates.measured()
    turns = 1.0 / sum(1.0 / rate for rate in alone.values())
    mend = (
        f"fewer, larger updates (--batch-size {LARGER * batch_size} with {LARGER} times the "
        "--train-freq) would help"
        if slowest == "learner"
        else f"more envs than {envs} would cost less each"
    )
    what = "Learning" if slowest == "learner" else "Stepping the environments"
    return (
        f"{what} takes most of the device's time ({_percent(turns / alone[slowest])}): "
        f"{_short(rates.end_to_end)} of the {_short(turns)} steps/s that taking turns allows are "
        f"reached; {mend}."
    )


def _gpu(device_type: str) -> str:
    return "a GPU" if device_type == "cpu" else "a faster GPU"


def _short(rate: float) -> str:
    return format_steps(float(f"{rate:.3g}"))


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
