"""Offline training on CartPole-v1: what CQL learns, how policies are ranked, work by speed.

    python benchmarks/offline.py cql [--algo cql] [--seeds 5] [--epochs 20] [--image PATH]
    python benchmarks/offline.py fqe
    python benchmarks/offline.py speed

``cql`` records 50,000 steps of a half-trained policy that takes a random action with probability
0.3, and trains from them. ``fqe`` records a run of 10,000 steps, estimates the returns of its
ten checkpoints from the recording, and correlates these with the returns that they get when they
play. ``speed`` trains with two workers of a parameter server, one of which needs twice as long for
a row, and compares the time of an epoch with that of one and a half workers. Every result is one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import qfleet
from qfleet.data.manifest import Dataset
from qfleet.data.operations import read_episodes
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.storage.spec_json import spec_from_json
from qfleet.training.off_policy import compare
from qfleet.training.record_data import record

STEPS, EPSILON, HALF_TRAINED = 50_000, 0.3, 150.0
LATENCY_S = 1e-3
"""Time that the faster worker needs for a row: more than computing takes, so that it decides."""
ONLINE = {"tensorboard": False, "checkpoint_freq": 10**9, "n_eval_episodes": 20}
OFFLINE = {
    "batch_size": 128, "learning_rate": 5e-4, "lr_schedule": "linear", "n_steps": 5,
    "target_update_interval": 10_000, "net_arch": (256, 256), "n_eval_episodes": 20,
    "tensorboard": False, "checkpoint_freq": 10**9,
}  # fmt: skip


def half_trained(folder: Path) -> qfleet.Policy:
    """Train until an evaluation reaches ``HALF_TRAINED``; return that policy."""
    trained = qfleet.train(
        "CartPole-v1", run_dir=folder, target_return=HALF_TRAINED, eval_freq=1000, **ONLINE
    )
    return qfleet.load(trained.folder)


def recorded(folder: Path) -> Dataset:
    policy = half_trained(folder / "behaviour")
    return record(policy, str(folder / "data"), steps=STEPS, epsilon=EPSILON)


def mean_return(dataset: Dataset) -> float:
    return float(np.mean([episode.reward for episode in read_episodes(dataset).values()]))


def measure_cql(
    folder: Path, algo: str, seeds: int, epochs: int, image: str, fields: dict[str, Any]
) -> None:
    dataset = recorded(folder)
    behaviour = mean_return(dataset)
    print(json.dumps({"behaviour_return": behaviour, "episodes": dataset.manifest.episodes}))
    found = list[float]()
    for seed in range(seeds):
        trained = qfleet.train(
            data=dataset.url, algo=algo, seed=seed, epochs=epochs, eval_freq=2 * STEPS,
            run_dir=folder / f"{algo}-{seed}", **{**OFFLINE, **fields},
        )  # fmt: skip
        assert isinstance(trained, qfleet.Trained)
        played = trained.result
        found.append(float(played.eval_return_mean or 0.0))
        print(json.dumps({
            "algo": algo, "seed": seed, "final": played.eval_return_mean,
            "best": played.best_eval_return, "wall_s": played.wall_s,
        }), flush=True)  # fmt: skip
    reached = sum(one >= 475 or one >= behaviour + 100 for one in found)
    print(json.dumps({"algo": algo, "reached": reached, "seeds": seeds, "returns": found}))
    if image:
        from qfleet.telemetry.plots import learning_curve
        from qfleet.telemetry.runs import read_run

        runs = [read_run(folder / f"{algo}-{seed}") for seed in range(seeds)]
        learning_curve({algo: runs}, "eval/mean_reward", Path(image))


def measure_fqe(folder: Path, updates: int) -> None:
    trained = qfleet.train(
        "CartPole-v1", run_dir=folder / "run", steps=10_000, seed=7, checkpoint_freq=1000,
        keep_checkpoints=10, eval_freq=0, tensorboard=False, record=str(folder / "data"),
    )  # fmt: skip
    dataset = Dataset(str(folder / "data"))
    assert isinstance(trained, qfleet.Trained)
    policies = dict[str, qfleet.Policy]()
    for steps in range(1000, 10_001, 1000):
        stored = load_checkpoint(trained.folder / "checkpoints", steps)
        spec = spec_from_json(stored.meta["spec"])
        policies[str(steps)] = qfleet.Policy(trained.config, spec, stored.parts["learner"])
    true = {name: policy.evaluate(50, seed=5).mean for name, policy in policies.items()}
    began_s = time.monotonic()
    estimates = compare(policies, dataset, updates=updates)
    for one in estimates:
        print(json.dumps({"true_return": true[one.policy], **asdict(one)}))
    played = [true[one.policy] for one in estimates]
    for method in ("fqe", "wdr"):
        estimated = [getattr(one, method) for one in estimates]
        print(json.dumps({"method": method, "spearman": spearman(played, estimated)}))
    print(json.dumps({"wall_s": time.monotonic() - began_s}))


def measure_speed(folder: Path) -> None:
    """Compare one worker with two of them, of which worker 0 needs twice as long for a row."""
    policy = half_trained(folder / "behaviour")
    dataset = record(policy, str(folder / "data"), steps=10_000, epsilon=EPSILON)
    rates = dict[int, float]()
    for workers in (1, 2):
        trained = qfleet.train(
            data=dataset.url, algo="cql", epochs=2, engine="parameter-server", workers=workers,
            batch_size=64, step_latency_s=LATENCY_S, straggler=float(workers), eval_freq=0,
            tensorboard=False, run_dir=folder / f"workers-{workers}",
        )  # fmt: skip
        assert isinstance(trained, qfleet.Trained)
        assert trained.result.fleet is not None
        rates[workers] = trained.result.fleet["env_steps_per_s"]
        rows = [worker["env_steps"] for worker in trained.result.fleet["workers"]]
        print(json.dumps({"workers": workers, "rows_per_s": rates[workers], "rows": rows}))
    print(json.dumps({"epoch_over_ideal": 1.5 * rates[1] / rates[2]}))


def spearman(one: list[float], other: list[float]) -> float:
    """Return the correlation of ranks; equal values have the mean of their ranks."""
    ranks = [[np.mean(np.flatnonzero(np.sort(v) == x)) for x in v] for v in (one, other)]
    return float(np.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["cql", "fqe", "speed"])
    parser.add_argument("--algo", default="cql")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--image", default="", help="draw the learning curve to this file")
    parser.add_argument(
        "--fields", default='{"cql_alpha": 0.5}', help="configuration fields as JSON"
    )
    parser.add_argument("--updates", type=int, default=5000, help="gradient steps of FQE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "cql":
            fields = json.loads(options.fields)
            measure_cql(
                Path(folder), options.algo, options.seeds, options.epochs, options.image, fields
            )
        elif options.what == "fqe":
            measure_fqe(Path(folder), options.updates)
        else:
            measure_speed(Path(folder))


if __name__ == "__main__":
    main()
