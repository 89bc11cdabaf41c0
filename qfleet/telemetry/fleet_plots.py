"""Plots of a ``FleetAccount``: a histogram of staleness, and each worker's time shares."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError
from qfleet.telemetry.fleet import FleetAccount
from qfleet.telemetry.plots import PALETTE, TEXT_COLOUR, _clean
from qfleet.telemetry.timeline import BAR_HEIGHT, KIND_COLOURS, LANE_INCHES
from qfleet.telemetry.timers import KINDS

TAIL = 40
"""Bars of the histogram; all greater ages are counted in the last bar."""


def draw_fleet(account: FleetAccount, plots_dir: Path) -> list[Path]:
    """Draw ``staleness.png`` and ``shares.png``, each only if it has data; return their paths."""
    made = []
    if account.workers:
        inches = 1.4 + LANE_INCHES * len(account.rows)
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
    """Draw a bar of length 100 % per worker; time that no span covers is left white."""
    rows = range(len(account.rows))
    shares = [shares for _, _, shares in account.rows]
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
    axes.set_yticks(rows, [name for name, _, _ in account.rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("% of wall time", color=TEXT_COLOUR)
    title = f"{account.name}: where the time went"
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _staleness(axes: Any, account: FleetAccount) -> None:
    from matplotlib.ticker import MaxNLocator

    ages, median = account.staleness, account.staleness.percentile(50)
    assert ages.mean is not None
    assert median is not None
    # Bars are wide enough that half of all ages lie in the first half of the plot: a learner in its
    # own process makes many updates between two blocks of an actor.
    width = max(1, -(-2 * median // TAIL))
    last = TAIL * width
    counts: Counter[int] = Counter()
    for age, count in ages.counts.items():
        counts[min(age, last) // width] += count
    middles = [bar * width + (width - 1) / 2 for bar in counts]
    heights = [100 * count / ages.total for count in counts.values()]
    axes.bar(middles, heights, 0.8 * width, color=PALETTE[0], lw=0)
    axes.axvline(min(ages.mean, last), color=PALETTE[1], lw=2.0, label=f"mean {ages.mean:.2f}")
    _clean(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    more = "" if max(ages.counts) <= last else f" ({last}: so old or older)"
    axes.set_xlabel(f"age of a {account.aged}'s weights, in updates{more}", color=TEXT_COLOUR)
    axes.set_ylabel(f"% of {account.aged}s", color=TEXT_COLOUR)
    title = f"{account.name}: staleness, 95 % up to {ages.p95}"
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
    axes.legend(frameon=False, loc="best")
