"""Pictures of a fleet. In: its account; out: how old gradients were, and what workers did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qfleet.errors import ConfigError
from qfleet.telemetry.fleet import FleetAccount
from qfleet.telemetry.plots import PALETTE, TEXT_COLOUR, _clean
from qfleet.telemetry.timeline import BAR_HEIGHT, KIND_COLOURS, LANE_INCHES
from qfleet.telemetry.timers import KINDS

TAIL = 40
"""Bars of a histogram; what is older goes into the last one."""


def draw_fleet(account: FleetAccount, plots_dir: Path) -> list[Path]:
    """Draw ``staleness.png`` and ``shares.png``; what there is nothing to draw of is left out."""
    made = []
    if account.workers:
        inches = 1.4 + LANE_INCHES * len(account.workers)
        made.append(_draw(_shares, account, plots_dir / "shares.png", inches))
    if account.staleness.total:
        made.append(_draw(_staleness, account, plots_dir / "staleness.png", 4.2))
    return made


def _draw(draw: Any, account: FleetAccount, path: Path, inches: float) -> Path:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10.5, "text.color": TEXT_COLOUR, "svg.hashsalt": "qfleet"}):
        figure = Figure(figsize=(7.2, inches), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot(), account)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        except OSError as error:
            raise ConfigError(f"cannot write plot '{path}': {error.strerror}") from None
    return path


def _shares(axes: Any, account: FleetAccount) -> None:
    """A bar per worker, of a length of 100 %; what no span covers is left white."""
    rows = range(len(account.workers))
    shares = [worker.shares for worker in account.workers]
    begins = [0.0] * len(shares)
    for kind in KINDS:
        widths = [100 * share[kind] for share in shares]
        colour = KIND_COLOURS[kind]
        axes.barh(rows, widths, BAR_HEIGHT, left=begins, color=colour, label=kind, lw=0)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    _clean(axes)
    axes.grid(False, axis="y")
    axes.grid(axis="x", color="#E6E6E6", lw=0.8)
    axes.set_xlim(0.0, max(100.0, *begins))
    axes.set_ylim(len(shares) - 0.5, -0.5)  # the first worker on top
    axes.set_yticks(rows, [f"worker {worker.number}" for worker in account.workers])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("% of wall time", color=TEXT_COLOUR)
    title = f"{account.update}: what workers did"
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _staleness(axes: Any, account: FleetAccount) -> None:
    from matplotlib.ticker import MaxNLocator

    ages = account.staleness
    assert ages.mean is not None
    counts: dict[int, int] = {}
    for age, count in ages.counts.items():
        counts[min(age, TAIL)] = counts.get(min(age, TAIL), 0) + count
    axes.bar(list(counts), [100 * n / ages.total for n in counts.values()], color=PALETTE[0], lw=0)
    axes.axvline(min(ages.mean, TAIL), color=PALETTE[1], lw=2.0, label=f"mean {ages.mean:.2f}")
    _clean(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    more = "" if max(ages.counts) <= TAIL else f" ({TAIL}: so old or older)"
    axes.set_xlabel(f"age of a gradient's weights, in updates{more}", color=TEXT_COLOUR)
    axes.set_ylabel("% of gradients", color=TEXT_COLOUR)
    title = f"{account.update}: staleness, 95 % up to {ages.p95}"
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
    axes.legend(frameon=False, loc="best")
