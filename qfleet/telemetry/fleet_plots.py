"""Plots of a ``FleetAccount``: a histogram of staleness, and each worker's time shares."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from qfleet.telemetry.figures import BESIDE, PALETTE, label_rows, saved_figure
from qfleet.telemetry.fleet import FleetAccount
from qfleet.telemetry.timeline import BAR_HEIGHT, KIND_COLOURS, LANE_INCHES
from qfleet.telemetry.timers import KINDS

TAIL = 40
"""Bars of the histogram; all greater ages are counted in the last bar."""


def draw_fleet(account: FleetAccount, plots_dir: Path) -> list[Path]:
    """Draw ``shares.png`` and ``staleness.png``, each only if it has data; return their paths."""
    made = []
    if account.workers:
        made.append(_draw_shares(account, plots_dir / "shares.png"))
    if account.staleness.total:
        made.append(_draw_staleness(account, plots_dir / "staleness.png"))
    return made


def _draw_shares(account: FleetAccount, path: Path) -> Path:
    """Draw a bar of length 100 % per worker; time that no span covers is left white."""
    names, _, shares = zip(*account.rows, strict=True)
    with saved_figure(path, 7.2, 1.4 + LANE_INCHES * len(names)) as figure:
        axes = figure.add_subplot()
        begins = [0.0] * len(names)
        for kind in KINDS:
            widths = [100 * share[kind] for share in shares]
            bars = {"color": KIND_COLOURS[kind], "label": kind, "lw": 0}
            axes.barh(range(len(names)), widths, BAR_HEIGHT, left=begins, **bars)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
        label_rows(axes, names)
        axes.set_xlim(0.0, max(100.0, *begins))
        axes.set_xlabel("% of wall time")
        axes.set_title(f"{account.update or 'actors'}: where the time went")
        axes.legend(**BESIDE)
    return path


def _draw_staleness(account: FleetAccount, path: Path) -> Path:
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
    with saved_figure(path, 7.2, 4.2) as figure:
        axes = figure.add_subplot()
        axes.bar(middles, heights, 0.8 * width, color=PALETTE[0], lw=0)
        axes.axvline(min(ages.mean, last), color=PALETTE[1], lw=2.0, label=f"mean {ages.mean:.2f}")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
        more = "" if max(ages.counts) <= last else f" ({last}: {last} or older)"
        aged = "gradient" if account.update else "block"
        axes.set_xlabel(f"age of a {aged}'s weights, in updates{more}")
        axes.set_ylabel(f"% of {aged}s")
        name = account.update or "actors"
        axes.set_title(f"{name}: staleness, 95 % up to {ages.percentile(95)}")
        axes.legend(loc="best")
    return path
