"""Tuning: the precision of updates, and whether they are compiled.

In: a learner and its memory on an accelerator. Out: a ``Choice`` that is applied, recorded bursts
included, and the time of one update for every choice that was measured. A run takes what has always
been the fastest, if it works; `qfleet doctor --tune` measures all choices. The choice is kept in a
file by hardware, network and versions (``measured_cache.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from qfleet.accelerator.compiling import Compilable, switch
from qfleet.config.config import Config
from qfleet.engines.measured_cache import recall, remember
from qfleet.networks.qnetwork import QNetwork

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TIMED_CALLS = 10
COMPILING_S = 8.0
"""Seconds that compiling takes at the start of a run, if torch has kept the code of an earlier one
(H200 machine: 6 s of them are imports)."""
SAVED_PER_UPDATE_S, SAVED_PER_STEP_S = 100e-6, 150e-6
"""Seconds that compiling saves per update and per step of all tensor envs (H200: an update of Pong
389 to 229 µs, a step of MinAtar's Breakout, 167 kernels, about 200 to 25 µs)."""


@dataclass(frozen=True)
class Choice:
    precision: Precision
    compiled: bool

    def __str__(self) -> str:
        return f"{self.precision}{', compiled' if self.compiled else ''}"


@dataclass(frozen=True)
class Tuning:
    choice: Choice
    update_s: dict[str, float]
    """Seconds per update of every choice tried, by its name."""
    failed: dict[str, str]
    """Choices that did not work here, and why."""
    from_cache: bool


def candidates(config: Config, device: torch.device) -> list[Choice]:
    """Return the possible precisions, uncompiled: the first one must work, the last is preferred.

    bf16 is the fastest, but is used only if the configuration sets it: in the one comparable Pong
    run, learning started later than with tf32 (docs/performance.md).
    """
    precisions: list[Precision] = ["fp32", "tf32"]
    if config.precision != "auto":
        precisions = [config.precision]
    elif device.type != "cuda":
        precisions = ["fp32"]  # TF32 is NVIDIA's
    return [Choice(precision, compiled=False) for precision in precisions]


def may_compile(
    config: Config, device: torch.device, saved_s: float, thorough: bool = False
) -> bool:
    """Return whether to compile functions that then save ``saved_s`` in the whole run.

    ``thorough``: also if it does not repay the time that it takes.
    """
    repays = device.type == "cuda" and (thorough or saved_s > COMPILING_S)
    return config.compile == "on" or (config.compile == "auto" and repays)


def apply_choice(choice: Choice, networks: list[QNetwork], compilables: list[Compilable]) -> None:
    """Apply a choice to these networks, and to the settings that torch has per process."""
    is_exact = choice.precision in ("fp64", "fp32")
    torch.set_float32_matmul_precision("highest" if is_exact else "high")
    torch.backends.cudnn.allow_tf32 = not is_exact
    torch.backends.cudnn.benchmark = True
    if choice.precision == "bf16" and all(p.is_cpu for n in networks for p in n.parameters()):
        # Only oneDNN uses a CPU's units for it.
        torch.backends.mkldnn.set_flags(True)  # type: ignore[no-untyped-call]
    for network in networks:
        network.autocast_dtype = AUTOCAST.get(choice.precision)
    switch(compilables, choice.compiled)


def apply_precision(config: Config, networks: list[QNetwork]) -> Choice:
    """Apply the configured precision without measuring; ``auto`` changes nothing."""
    if config.precision == "auto":
        return Choice("fp32", compiled=False)
    choice = Choice(config.precision, compiled=False)
    apply_choice(choice, networks, [])
    return choice


def tune(
    options: list[Choice],
    compiles: bool,
    time_update: Callable[[Choice], float],
    key: Mapping[str, Any],
    thorough: bool = False,
) -> Tuning:
    """Return the last option, compiled if it ``compiles``, or what works of the others.

    ``thorough``: measure them all by ``time_update``, and return the fastest. Compiling takes tens
    of seconds, so it is measured for the best precision only. An option that fails (for example
    without a compiler) is skipped, except the first one. What the cache has is not tried again.
    """
    known = recall("tuning", {**key, "compiles": compiles})
    with contextlib.suppress(KeyError, TypeError):  # no entry, or one of another version
        choice = Choice(**known["choice"])
        if choice.precision in {o.precision for o in options} and known["thorough"] >= thorough:
            return Tuning(choice, known["update_s"], known["failed"], from_cache=True)
    times: dict[Choice, float] = {}
    failed: dict[str, str] = {}

    def attempt(option: Choice) -> None:
        try:
            times[option] = time_update(option)
        except Exception as error:  # a compiler may fail in any way; the plain options remain
            if option == options[0]:
                raise
            failed[str(option)] = f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"

    if thorough:
        for option in options:
            attempt(option)
        if compiles:
            attempt(dataclasses.replace(min(times, key=lambda o: times[o]), compiled=True))
    else:
        for option in reversed(options):
            for compiled in (True, False) if compiles else (False,):
                if not times:
                    attempt(dataclasses.replace(option, compiled=compiled))
    best = min(times, key=lambda option: times[option])
    seconds = {str(option): s for option, s in times.items()}
    found = {"update_s": seconds, "failed": failed, "thorough": thorough}
    value = {"choice": dataclasses.asdict(best), **found}
    remember("tuning", {**key, "compiles": compiles}, value)
    if thorough and compiles:  # runs that are too short to compile take the best of the others
        plain = min((o for o in times if not o.compiled), key=lambda option: times[option])
        value = {"choice": dataclasses.asdict(plain), **found}
        remember("tuning", {**key, "compiles": False}, value)
    return Tuning(best, seconds, failed, from_cache=False)


def tuning_key(
    config: Config, device: torch.device, layout: list[list[object]], updates_at_once: int
) -> dict[str, Any]:
    """Return what, besides the machine, may change which choice is the fastest."""
    switches = (
        *("double", "noisy", "munchausen", "head", "n_steps"),
        *("batch_size", "prioritized_replay", "replay", "target_network", "optimizer"),
        *("activation", "weight_decay"),
    )
    return {
        "device": str(device),
        "layout": layout,
        "updates_at_once": updates_at_once,
        "asked": [config.precision, config.compile, config.graphs],
        **{name: getattr(config, name) for name in switches},
    }
