"""Plots of learning curves: one metric of groups of runs, drawn into an image file.

A single run is drawn as its training return (thin) and its evaluation return (bold). A group of
seeds is drawn as its interquartile mean with a 95 % bootstrap band.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.telemetry.aggregate import aggregate_curves
from qfleet.telemetry.figures import MUTED_COLOUR, PALETTE, saved_figure
from qfleet.telemetry.formatting import format_steps
from qfleet.telemetry.runs import EVAL_RETURN, ROLLOUT_RETURN, RunData

CROWD = 5
"""More groups than this are drawn in a panel each, because overlaid curves hide each other."""
COLUMNS = 5
"""Panels side by side."""
AXIS_NAMES = {
    EVAL_RETURN: "evaluation return",
    ROLLOUT_RETURN: "return",
    "rollout/ep_len_mean": "episode length",
    "rollout/exploration_rate": "ε",
    "time/fps": "env steps per second",
    "train/loss": "loss",
    "train/learning_rate": "learning rate",
}


def learning_curve(groups: dict[str, list[RunData]], metric: str, out: Path) -> Path:
    """Draw ``metric`` over env steps, one line per group, into a file; return ``out``."""
    draw_curves(groups, metric, out)
    return out


def draw_curves(groups: dict[str, list[RunData]], metric: str, out: Path | None = None) -> Any:
    """Draw ``metric`` over env steps, one line per group; return the matplotlib Figure.

    More than ``CROWD`` groups have a panel each, which repeats the first group as a grey line.
    """
    runs = [run for members in groups.values() for run in members]
    is_portrait = len(runs) == 1 and metric in (ROLLOUT_RETURN, EVAL_RETURN)
    wanted = (ROLLOUT_RETURN, EVAL_RETURN) if is_portrait else (metric,)
    if not any(run.series(name)[0] for run in runs for name in wanted):
        known = {name for run in runs for name in run.metric_names()}
        if not known:
            names = ", ".join(str(run.path) for run in runs)
            raise ConfigError(f"no metric has been logged yet in {names}; plot after the first log")
        raise UnknownNameError("metric", metric, known)
    name = "return" if is_portrait else AXIS_NAMES.get(metric, metric)
    title = _title(groups, metric)
    if len({run.env for run in runs}) == 1:  # the title names the environment
        env = f"{runs[0].env} · "
        groups = {label.removeprefix(env): members for label, members in groups.items()}

    if len(groups) > CROWD:
        rows = -(-len(groups) // COLUMNS)
        with saved_figure(out, 11.0, 1.0 + 1.9 * rows) as figure:
            panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True).ravel()
            _draw_panels(panels, groups, metric)
            _format_steps(panels[0], ticks=4)
            figure.supxlabel("env steps", size="medium")
            figure.supylabel(name, size="medium")
            title = f"{title} · grey: {next(iter(groups))}"
            figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold")
        return figure
    with saved_figure(out, 7.2, 4.2) as figure:
        axes = figure.add_subplot()
        if is_portrait:
            _draw_portrait(axes, runs[0])
        else:
            for colour, (label, members) in zip(PALETTE, groups.items(), strict=False):
                _draw_group(axes, members, metric, label, colour)
        _format_steps(axes, ticks=7)
        axes.set_xlabel("env steps")
        axes.set_ylabel(name)
        axes.set_title(title)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(loc="best")
    return figure


def _format_steps(axes: Any, ticks: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_formatter(FuncFormatter(lambda steps, _: format_steps(steps)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 2.5, 5, 10]))


def _draw_portrait(axes: Any, run: RunData) -> None:
    steps, values = run.series(ROLLOUT_RETURN)
    if steps:
        axes.plot(steps, values, color=PALETTE[0], lw=1.0, alpha=0.55, label="while training")
    steps, values = run.series(EVAL_RETURN)
    if steps:
        marker = "o" if len(steps) <= 25 else ""
        axes.plot(
            steps, values, color=PALETTE[1], lw=2.4, marker=marker, ms=4.5, label="evaluation"
        )


def _draw_panels(panels: Any, groups: dict[str, list[RunData]], metric: str) -> None:
    reference = next(iter(groups.values()))
    for axes, (label, members) in zip(panels, groups.items(), strict=False):
        _draw_group(axes, reference, metric, "_", MUTED_COLOUR, has_band=False)
        _draw_group(axes, members, metric, label, PALETTE[0])
        axes.set_title(label, size=10, pad=4)
    for axes in panels[len(groups) :]:
        axes.remove()


def _draw_group(
    axes: Any, members: list[RunData], metric: str, label: str, colour: str, has_band: bool = True
) -> None:
    curves = [run.series(metric) for run in members]
    curves = [(steps, values) for steps, values in curves if steps]
    if len(curves) > 1:
        label = f"{label} ({len(curves)} runs)"
        grid, middle, low, high = aggregate_curves(curves)
        if grid.size:
            if has_band:
                axes.fill_between(grid, low, high, color=colour, alpha=0.18, lw=0)
            curves = [(grid.tolist(), middle.tolist())]
    # Runs that share no range of steps have no mean: they are drawn one by one.
    for steps, values in curves:
        marker = "o" if len(steps) == 1 else ""
        lw = 2.0 if has_band else 1.2
        axes.plot(steps, values, color=colour, lw=lw, marker=marker, label=label)
        label = "_"  # one legend entry per group


def _title(groups: dict[str, list[RunData]], metric: str) -> str:
    runs = [run for members in groups.values() for run in members]
    envs, algos = {run.env for run in runs}, {run.algo for run in runs}
    parts = [names.pop() for names in (envs, algos) if len(names) == 1]
    with_data = sum(bool(run.series(metric)[0]) for run in runs)
    if len(groups) == 1 and with_data > 1:
        parts.append(f"IQM of {with_data} runs")
    return " · ".join(parts)
