"""Plots of learning curves: one metric of groups of runs, drawn into an image file.

A single run is drawn as its training return (thin) and its evaluation return (bold). A group of
seeds is drawn as its interquartile mean with a 95 % bootstrap band.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.telemetry.aggregate import aggregate_curves
from qfleet.telemetry.formatting import format_steps
from qfleet.telemetry.runs import EVAL_RETURN, ROLLOUT_RETURN, RunData

# Okabe and Ito's palette, without its yellow (too pale on white) and black (kept for text).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LINE_STYLES = ("-", "--", ":")
FORMATS = (".png", ".svg", ".pdf")
CROWD = 5
"""With more groups than this, curves are drawn without bands, because bands would overlap."""
TEXT_COLOUR = "#333333"
MUTED_COLOUR = "#888888"
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
    """Draw ``metric`` over env steps, one line per group; return ``out``."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot file '{out}' must end in {', '.join(FORMATS)}")
    runs = [run for members in groups.values() for run in members]
    wanted = (ROLLOUT_RETURN, EVAL_RETURN) if _is_portrait(runs, metric) else (metric,)
    if not any(run.series(name)[0] for run in runs for name in wanted):
        known = {name for run in runs for name in run.metric_names()}
        if not known:
            names = ", ".join(str(run.path) for run in runs)
            raise ConfigError(f"no metric has been logged yet in {names}; plot after the first log")
        raise UnknownNameError("metric", metric, known)

    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with mpl.rc_context({"font.size": 10.5, "text.color": TEXT_COLOUR, "svg.hashsalt": "qfleet"}):
        is_crowded = len(groups) > CROWD
        figure = Figure(figsize=(9.2 if is_crowded else 7.2, 4.2), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if _is_portrait(runs, metric):
            _draw_portrait(axes, runs[0])
        else:
            _draw_groups(axes, groups, metric)
        _clean(axes)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda steps, _: format_steps(steps)))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
        axes.set_xlabel("env steps", color=TEXT_COLOUR)
        name = "return" if _is_portrait(runs, metric) else AXIS_NAMES.get(metric, metric)
        axes.set_ylabel(name, color=TEXT_COLOUR)
        axes.set_title(_title(groups, metric), loc="left", fontsize=12, fontweight="bold", pad=10)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            if is_crowded:
                axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
            else:
                axes.legend(frameon=False, loc="best")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out)
        except OSError as error:
            raise ConfigError(f"cannot write plot '{out}': {error.strerror}") from None
    return out


def _is_portrait(runs: list[RunData], metric: str) -> bool:
    return len(runs) == 1 and metric in (ROLLOUT_RETURN, EVAL_RETURN)


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


def _draw_groups(axes: Any, groups: dict[str, list[RunData]], metric: str) -> None:
    envs = {run.env for members in groups.values() for run in members}
    for number, (label, members) in enumerate(groups.items()):
        if len(envs) == 1:  # the title already names the environment
            label = label.removeprefix(f"{members[0].env} · ")
        colour = PALETTE[number % len(PALETTE)]
        style = LINE_STYLES[number // len(PALETTE) % len(LINE_STYLES)]
        curves = [run.series(metric) for run in members]
        curves = [(steps, values) for steps, values in curves if steps]
        if len(curves) > 1:
            label = f"{label} ({len(curves)} runs)"
            grid, middle, low, high = aggregate_curves(curves)
            if grid.size:
                if len(groups) <= CROWD:
                    axes.fill_between(grid, low, high, color=colour, alpha=0.18, lw=0)
                curves = [(grid.tolist(), middle.tolist())]
        # Runs that share no range of steps have no mean: they are drawn one by one.
        for steps, values in curves:
            marker = "o" if len(steps) == 1 else ""
            axes.plot(steps, values, color=colour, ls=style, lw=2.0, marker=marker, label=label)
            label = "_"  # one legend entry per group


def _clean(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED_COLOUR)
    axes.tick_params(colors=MUTED_COLOUR, labelcolor=TEXT_COLOUR, length=3)
    axes.grid(axis="y", color="#E6E6E6", lw=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02, y=0.06)


def _title(groups: dict[str, list[RunData]], metric: str) -> str:
    runs = [run for members in groups.values() for run in members]
    envs, algos = {run.env for run in runs}, {run.algo for run in runs}
    parts = [names.pop() for names in (envs, algos) if len(names) == 1]
    with_data = sum(bool(run.series(metric)[0]) for run in runs)
    if len(groups) == 1 and with_data > 1:
        parts.append(f"IQM of {with_data} runs")
    return " · ".join(parts)
