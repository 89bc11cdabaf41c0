"""``qfleet lab mapreduce``: parallel gradient descent on a cluster, and its costs."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from qfleet.cli.parsing import parse
from qfleet.config.validation import check_address
from qfleet.core.errors import ClusterError, require
from qfleet.engines.cluster.ray_cluster import STORE_BYTES, TIMEOUT_S, open_cluster
from qfleet.lab.mapreduce import (
    Problem,
    Slowness,
    broadcast_bytes,
    check_descent,
    check_shares,
    check_size,
    gradient_bytes,
    make_problem,
)
from qfleet.lab.mapreduce_plot import draw_descent, draw_scaling
from qfleet.lab.mapreduce_ray import Descent, descend_on
from qfleet.lab.speedup import CURVE, modelled, parse_workers
from qfleet.telemetry.formatting import finite
from qfleet.telemetry.timers import COMPUTING, KINDS

DESCRIPTION = """Fit least squares by gradient descent on several workers, and report the costs.

Every round broadcasts the weights, maps them to a gradient on each worker's share of the data,
reduces these to one, and updates. Starts a Ray cluster on this machine, or joins one (--address).

Examples:
  qfleet lab mapreduce
  qfleet lab mapreduce --workers 2 --samples 20000 --no-local-reduction
  qfleet lab mapreduce --straggler 20ms --mode async
  qfleet lab mapreduce --compare
  qfleet lab mapreduce --workers 1,2,4,8,16,32
"""


@dataclass(frozen=True)
class MapReduceOptions:
    """Options of the problem, the workers and the output."""

    workers: str = "4"
    """Number of worker processes, m, each of which holds a share of the data; or several numbers,
    1,2,4,8,16,32, to compare their times."""
    samples: int = 100_000
    """Total number of samples, n."""
    features: int = 50
    """Features per sample, d."""
    noise: float = 0.1
    """Standard deviation of the noise on the targets."""
    steps: int = 100
    """Number of rounds; with --mode async, gradients per worker on average."""
    learning_rate: float = 0.1
    """Step size of the update."""
    mode: Literal["sync", "async"] = "sync"
    """Wait for all gradients of a round (sync), or apply each on arrival (async)."""
    local_reduction: bool = True
    """Sum gradients on each worker, so that m·d numbers are sent instead of n·d."""
    straggler: str | None = None
    """Slow the last worker down: 4x makes each gradient take 4 times as long, 50ms 50 ms longer."""
    compare: bool = False
    """Also run with a single worker, and report the speed-up over it."""
    tolerance: float = 1e-3
    """Largest distance of the final weights from the closed form, relative to its norm."""
    seed: int = 0
    """Random seed of the data."""
    address: str | None = None
    """Join the Ray cluster at host:port (or auto) instead of starting one."""
    timeout_s: float = TIMEOUT_S
    """Timeout of a worker's reply, in seconds."""
    out: Path = Path("runs/lab/mapreduce")
    """Folder for mapreduce.png, result.json and, with several numbers of workers, speedup.png."""
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print machine-readable output only."""


def run(argv: list[str]) -> None:
    options = parse(MapReduceOptions, argv, "lab mapreduce", DESCRIPTION)
    from qfleet.memory.sizing import available_bytes  # imports torch; --help need not wait for it

    straggler = None if options.straggler is None else Slowness.parse(options.straggler)
    for name in ("tolerance", "timeout_s"):
        require(getattr(options, name) > 0, name, getattr(options, name), "> 0")
    if options.address is not None:
        check_address(options.address)
    check_descent(options.steps, options.learning_rate)
    check_size(options.samples, options.features, available_bytes())
    counts = parse_workers(options.workers, has_baseline="," in options.workers)
    check_shares(options.samples, counts[0])
    check_shares(options.samples, counts[-1])
    is_sweep = len(counts) > 1
    problem = make_problem(options.samples, options.features, options.noise, options.seed)
    data_bytes = problem.features.nbytes + problem.targets.nbytes
    # The data and, without local reduction, two rounds of gradients of the same size.
    store_bytes = max(STORE_BYTES, 4 * data_bytes)
    alone, descents, left_out = None, list[Descent](), ""
    with open_cluster(
        counts[-1], options.address, store_bytes=store_bytes, timeout_s=options.timeout_s
    ) as cluster:
        descend = functools.partial(
            descend_on,
            cluster,
            problem,
            steps=options.steps,
            rate=options.learning_rate,
            local_reduction=options.local_reduction,
        )
        if options.compare or is_sweep:
            alone = descend(1, mode="sync")
        for count in counts[1:] if is_sweep else counts:
            try:
                descents.append(descend(count, mode=options.mode, straggler=straggler))
            except ClusterError as error:
                if not descents:
                    raise
                left_out = f"from {count} workers on: {error}"
                break
    descent = descents[-1]
    report = make_report(options, problem, descent, alone)
    report["curve"] = _curve(alone, descents, options.out) if is_sweep and alone else None
    report["left_out"] = left_out or None
    shown = {f"{options.mode}, {descent.workers} workers": descent}
    if alone is not None:
        shown["one worker"] = alone
    report["picture"] = str(draw_descent(problem, shown, options.out / "mapreduce.png"))
    text = json.dumps(report, allow_nan=False)
    (options.out / "result.json").write_text(text + "\n", encoding="utf-8")
    print(text if options.json_ else "\n".join(_lines(report)))


def _curve(alone: Descent, descents: list[Descent], out: Path) -> list[dict[str, Any]]:
    """Draw and return measured and modelled speed-ups; None where nothing was measured."""
    computing_s = alone.spent_s(0, COMPUTING)
    times_s = (computing_s, alone.wall_s - computing_s)
    walls_s = {1: alone.wall_s, **{descent.workers: descent.wall_s for descent in descents}}
    measured = {count: alone.wall_s / wall_s for count, wall_s in walls_s.items()}
    draw_scaling(measured, times_s, out / "speedup.png")
    return [
        {
            "workers": count,
            "wall_s": walls_s.get(count),
            "speed_up": measured.get(count),
            "model": modelled(count, *times_s, rounds=True),
        }
        for count in sorted({*CURVE, *walls_s})
    ]


def make_report(
    options: MapReduceOptions, problem: Problem, descent: Descent, alone: Descent | None
) -> dict[str, Any]:
    """Return all measurements beside the formulas' values; None if a figure does not apply."""
    size = {"workers": descent.workers, "dimensions": problem.dimensions}
    gradients = gradient_bytes(
        **size, samples=problem.samples, local_reduction=descent.local_reduction
    )
    distance = problem.distance(descent.weights[-1])
    speed_up = None if alone is None else alone.wall_s / descent.wall_s
    return {
        "mode": descent.mode,
        "workers": descent.workers,
        "samples": problem.samples,
        "features": problem.dimensions,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "local_reduction": descent.local_reduction,
        "straggler": options.straggler,
        "seed": options.seed,
        "losses": [
            finite(problem.least_loss + problem.excess_loss(weights)) for weights in descent.weights
        ],
        "least_loss": problem.least_loss,
        "distance": finite(distance),
        "tolerance": options.tolerance,
        "reached": distance <= options.tolerance,
        "traffic": asdict(descent.traffic),
        "formula": {
            "bytes_sent": options.steps * broadcast_bytes(**size),
            "bytes_received": options.steps * gradients,
        },
        "wall_s": descent.wall_s,
        "processor_s": descent.processor_s,
        "time_share": [descent.time_share(k) for k in range(descent.workers)],
        "straggler_ratio": descent.straggler_ratio,
        "staleness": {str(age): count for age, count in sorted(descent.staleness.items())},
        "wall_s_of_one": None if alone is None else alone.wall_s,
        "speed_up": speed_up,
        "efficiency": None if speed_up is None else speed_up / descent.workers,
    }


def _lines(report: dict[str, Any]) -> list[str]:
    losses = report["losses"]
    marks = sorted({0, *(len(losses) * k // 5 for k in range(1, 5)), len(losses) - 1})
    lines = ["round         " + "".join(f"{mark:>12}" for mark in marks)]
    lines.append("loss          " + "".join(f"{losses[mark]:>12.6g}" for mark in marks))
    lines.append("")
    outcome = "reached" if report["reached"] else "NOT reached"
    distance = f"{report['distance']:.2e} of its length away, tolerance {report['tolerance']:g}"
    lines.append(f"closed form   {outcome}: {distance}")
    traffic, formula = report["traffic"], report["formula"]
    floats = "m·d·8" if report["local_reduction"] else "n·d·8"
    for way, rule in (("sent", "m·d·8"), ("received", floats)):
        lines.append(
            f"{way:<14}{traffic[f'bytes_{way}']:,} bytes in {traffic[f'messages_{way}']:,} "
            f"messages ({rule} a round make {formula[f'bytes_{way}']:,})"
        )
    lines.append(f"wall time     {report['wall_s']:.3f} s")
    lines.append(f"processors    {report['processor_s']:.3f} s")
    lines.append("              " + "".join(f"{kind:>15}" for kind in KINDS))
    for k, share in enumerate(report["time_share"]):
        lines.append(f"worker {k:<7}" + "".join(f"{share[kind]:>15.0%}" for kind in KINDS))
    lines.append(f"straggler     {report['straggler_ratio']:.2f} times the median's computing time")
    ages = ", ".join(f"{age} ×{count}" for age, count in report["staleness"].items())
    lines.append(f"staleness     {ages}")
    if report["speed_up"] is not None:
        lines.append(
            f"speed-up      {report['speed_up']:.2f} over one worker "
            f"({report['wall_s_of_one']:.3f} s), {report['efficiency']:.0%} of ideal"
        )
    for point in report["curve"] or ():
        known = "not measured" if point["wall_s"] is None else f"{point['speed_up']:.2f}"
        lines.append(f"{point['workers']:>3} workers   {known:<14}model {point['model']:.2f}")
    if report["left_out"]:
        lines.append(f"left out      {report['left_out']}")
    if report["curve"]:
        lines.append(f"curve         {Path(report['picture']).with_name('speedup.png')}")
    lines.append(f"picture       {report['picture']}")
    return lines
