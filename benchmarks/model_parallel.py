"""Is the advice of `qfleet doctor --parallel` right? Four networks, two ranks.

    python benchmarks/model_parallel.py                      two ranks on this machine's CPU
    python benchmarks/model_parallel.py --device cuda        two ranks, on one GPU if there is one
    python benchmarks/model_parallel.py --networks nature "dense, 100M" --seconds 5 --json out.json

For each network the doctor advises a layout. Then every layout is measured again, and the benchmark
prints both rates, the prediction, and the rate of the advised layout as a share of the fastest one:
the advice is right if that is at least 0.9. The same share is printed for the layout that has the
highest predicted rate. Ratios need a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from qfleet.training.parallel_advice import Row, choose, measure_layouts, measured_settings

LEAST = 0.9
"""Least share of the fastest layout's rate that the advised one has."""
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny MLP": ("CartPole-v1", {"net_arch": (64, 64)}),
    "nature": ("ALE/Pong-v5", {"network": "nature"}),
    "impala, width 4": ("ALE/Pong-v5", {"network": "impala", "width": 4}),
    "dense, 100M": ("CartPole-v1", {"net_arch": (7000, 7000, 7000), "batch_size": 32}),
}


def share_of_fastest(chosen: Row, again: list[Row]) -> float:
    """Return the rate of a layout over that of the fastest, both of the second measurement."""
    rates = {row.sizes._replace(threads=0): row.measured or 0.0 for row in again}
    return rates[chosen.sizes._replace(threads=0)] / max(rates.values())


def compare(name: str, device: str, ranks: int, seconds: float) -> dict[str, Any]:
    env, fields = NETWORKS[name]
    settings = measured_settings(env, {**fields, "device": device})
    rows, again = (measure_layouts(settings.config, ranks, seconds) for _ in range(2))
    advised = choose(rows)
    predicted = max(rows, key=lambda row: row.predicted or 0.0)
    shares = [share_of_fastest(row, again) for row in (advised, predicted)]
    batch = settings.config.batch_size
    print(f"\n{name}: {settings.weights:,} weights, batches of {batch}, {settings.device}")
    print(f"  {'layout':<24} {'predicted':>10} {'measured':>10} {'again':>10} {'MB per rank':>12}")
    for row, other in zip(rows, again, strict=True):
        if row.measured is None or other.measured is None or row.bytes_per_rank is None:
            print(f"  {row.sizes!s:<24} {row.refused or other.refused}")
            continue
        rates = f"{row.predicted:>10.4g} {row.measured:>10.4g} {other.measured:>10.4g}"
        print(f"  {row.sizes!s:<24} {rates} {row.bytes_per_rank / 1e6:>12,.1f}")
    verdict = "right" if shares[0] >= LEAST else "WRONG"
    print(f"  advice: {advised.sizes}, {shares[0]:.2f} of the fastest: {verdict}")
    print(f"  highest prediction: {predicted.sizes}, {shares[1]:.2f} of the fastest", flush=True)
    return {
        "device": settings.device,
        "weights": settings.weights,
        "batch_size": batch,
        "advice": str(advised.sizes),
        "share_of_fastest": shares[0],
        "share_of_fastest_by_prediction": shares[1],
        "rows": [[str(row.sizes), row.predicted, row.measured, row.refused] for row in rows],
        "again": [[str(row.sizes), row.measured] for row in again],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    report = {
        name: compare(name, options.device, options.workers, options.seconds)
        for name in options.networks
    }
    right = sum(found["share_of_fastest"] >= LEAST for found in report.values())
    print(
        f"\nthe advice is within 10 % of the fastest layout for {right} of {len(report)} networks"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
