"""Plots of parallel gradient descent: timeline of the workers, loss over time, speed-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qfleet.lab.mapreduce import Problem
from qfleet.lab.mapreduce_ray import Descent
from qfleet.lab.speedup_plot import draw_axes
from qfleet.telemetry.figures import PALETTE, TEXT_COLOUR, saved_figure
from qfleet.telemetry.timeline import KIND_COLOURS, LANE_INCHES, cut, draw_bars
from qfleet.telemetry.timers import WAITING

SHOWN_ROUNDS = 6
"""Rounds on the timeline: few enough that single spans are visible."""


def draw_descent(problem: Problem, descents: dict[str, Descent], path: Path) -> Path:
    """Draw the timeline of the first of ``descents``, from its middle, above the loss of all."""
    shown = next(iter(descents.values()))
    lanes_inches = 1.2 + LANE_INCHES * shown.workers
    with saved_figure(path, 11.0, lanes_inches + 3.8) as figure:
        above, below = figure.subplots(2, 1, height_ratios=[lanes_inches, 3.8])
        _draw_timeline(above, shown)
        _draw_losses(below, problem, descents)
    return path


def draw_scaling(measured: dict[int, float], alone: tuple[float, float], path: Path) -> Path:
    """Draw measured speed-ups by number of workers beside the ideal and the model of ``alone``."""
    with saved_figure(path, 6.5, 4.4) as figure:
        axes = figure.subplots()
        draw_axes(axes, list(measured), {"model": alone}, rounds=True)
        curve = {"color": PALETTE[0], "lw": 2.0, "marker": "o", "ms": 4.5, "label": "measured"}
        axes.plot(list(measured), list(measured.values()), **curve)
        axes.legend(loc="best")
    return path


def _draw_timeline(axes: Any, descent: Descent) -> None:
    # Not the first rounds, which warm up, nor the last, when some workers have nothing left to do.
    first = max(0, (len(descent.times_s) - 1 - SHOWN_ROUNDS) // 2)
    last = min(first + SHOWN_ROUNDS, len(descent.times_s) - 1)
    begin_s, end_s = descent.times_s[first], descent.times_s[last]
    rows = {
        f"worker {k}  {descent.time_share(k)[WAITING]:.0%} waiting": cut(spans, begin_s, end_s)
        for k, spans in enumerate(descent.spans)
    }
    draw_bars(axes, rows, KIND_COLOURS, end_s - begin_s)
    if descent.mode == "sync":
        for time_s in descent.times_s[first : last + 1]:
            axes.axvline((time_s - begin_s) * 1e3, color=TEXT_COLOUR, lw=1.0)
    barrier = "a line is the barrier" if descent.mode == "sync" else "no barrier"
    axes.set_title(f"{descent.mode}: {last - first} rounds from the middle; {barrier}")


def _draw_losses(axes: Any, problem: Problem, descents: dict[str, Descent]) -> None:
    for number, (label, descent) in enumerate(descents.items()):
        excess = [problem.excess_loss(weights) for weights in descent.weights]
        axes.plot(descent.times_s, excess, color=PALETTE[number], lw=2.0, label=label)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xlabel("s")
    axes.set_ylabel("loss above the least")
    axes.set_title("Loss")
    axes.legend(loc="best")
