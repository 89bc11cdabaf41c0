"""Plot of parallel gradient descent: a timeline of the workers, and the loss over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError
from qfleet.lab.mapreduce import Problem
from qfleet.lab.mapreduce_ray import Descent
from qfleet.telemetry.plots import FORMATS, PALETTE, TEXT_COLOUR, _clean
from qfleet.telemetry.timeline import BAR_HEIGHT, KIND_COLOURS, LANE_INCHES
from qfleet.telemetry.timers import KINDS, WAITING

SHOWN_ROUNDS = 6
"""Rounds on the timeline: few enough that single spans are visible."""


def draw_descent(problem: Problem, descents: dict[str, Descent], path: Path) -> Path:
    """Draw the timeline of the first of ``descents``, from its middle, above the loss of all."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"picture '{path}' must end in {', '.join(FORMATS)}")

    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = next(iter(descents.values()))
    with mpl.rc_context({"font.size": 10.5, "text.color": TEXT_COLOUR, "svg.hashsalt": "qfleet"}):
        lanes_inches = 1.2 + LANE_INCHES * shown.workers
        figure = Figure(figsize=(11.0, lanes_inches + 3.8), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, height_ratios=[lanes_inches, 3.8])
        _draw_timeline(above, shown)
        _draw_losses(below, problem, descents)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        except OSError as error:
            raise ConfigError(f"cannot write picture '{path}': {error.strerror}") from None
    return path


def _draw_timeline(axes: Any, descent: Descent) -> None:
    from matplotlib.patches import Patch

    # Not the first rounds, which warm up, nor the last, when some workers have nothing left to do.
    first = max(0, (len(descent.times_s) - 1 - SHOWN_ROUNDS) // 2)
    last = min(first + SHOWN_ROUNDS, len(descent.times_s) - 1)
    begin_s, end_s = descent.times_s[first], descent.times_s[last]
    labels = []
    for k, spans in enumerate(descent.spans):
        inside = [span for span in spans if span.end_s > begin_s and span.start_s < end_s]
        starts_s = [max(span.start_s, begin_s) for span in inside]
        ends_s = [min(span.end_s, end_s) for span in inside]
        axes.broken_barh(
            [
                ((start_s - begin_s) * 1e3, (stop_s - start_s) * 1e3)
                for start_s, stop_s in zip(starts_s, ends_s, strict=True)
            ],
            (k - BAR_HEIGHT / 2, BAR_HEIGHT),
            facecolors=[KIND_COLOURS[span.kind] for span in inside],
            linewidths=0,
        )
        labels.append(f"worker {k}  {descent.time_share(k)[WAITING]:.0%} waiting")
    if descent.mode == "sync":
        for time_s in descent.times_s[first : last + 1]:
            axes.axvline((time_s - begin_s) * 1e3, color=TEXT_COLOUR, lw=1.0)
    _clean(axes)
    axes.grid(False, axis="y")
    axes.set_xlim(0.0, (end_s - begin_s) * 1e3)
    axes.set_ylim(descent.workers - 0.5, -0.5)  # the first worker on top
    axes.set_yticks(range(descent.workers), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms", color=TEXT_COLOUR)
    barrier = "a line is the barrier" if descent.mode == "sync" else "no barrier"
    title = f"{descent.mode}: {last - first} rounds from the middle; {barrier}"
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
    axes.legend(
        handles=[Patch(color=KIND_COLOURS[kind], label=kind) for kind in KINDS],
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )


def _draw_losses(axes: Any, problem: Problem, descents: dict[str, Descent]) -> None:
    for number, (label, descent) in enumerate(descents.items()):
        excess = [problem.excess_loss(weights) for weights in descent.weights]
        axes.plot(descent.times_s, excess, color=PALETTE[number], lw=2.0, label=label)
    _clean(axes)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xlabel("s", color=TEXT_COLOUR)
    axes.set_ylabel("loss above the least", color=TEXT_COLOUR)
    axes.set_title("Loss", loc="left", fontsize=12, fontweight="bold", pad=10)
    axes.legend(frameon=False, loc="best")
