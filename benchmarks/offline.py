"""Offline training: what CQL learns, how policies are ranked, work by speed.

    python benchmarks/offline.py cql [--algo cql] [--seeds 5] [--epochs 20] [--image PATH]
    python benchmarks/offline.py fqe --seeds 3 --first-seed 3
    python benchmarks/offline.py speed
    python benchmarks/offline.py pong --seeds 3              a GPU

``cql`` records 50,000 steps of a half-trained policy that takes a random action with probability
0.3, and trains from them. ``fqe`` records a run of the preset with each seed, chooses ten of its
checkpoints whose returns are far apart, estimates their returns from the recording, and correlates
the estimates with the returns that they get when they play. ``speed`` trains with two workers of a
parameter server, one of which needs twice as long for a row, and compares the time of an epoch with
that of one and a half workers. ``pong`` trains a policy to 18, records a million steps of it with
ε = 0.2, and trains with CQL from them, all seeds at the same time: 50,000 updates, on observations
without their mean. Every result is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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
from qfleet.telemetry.aggregate import bootstrap_ci
from qfleet.training.off_policy import compare
from qfleet.training.record_data import record

STEPS, EPSILON, HALF_TRAINED = 50_000, 0.3, 150.0
CHECKPOINT_FREQ = 1000
LATENCY_S = 1e-3
"""Time that the faster worker needs for a row: more than computing takes, so that it decides."""
ONLINE = {"tensorboard": False, "checkpoint_freq": 10**9, "n_eval_episodes": 20}
OFFLINE = {
    "batch_size": 128, "learning_rate": 5e-4, "lr_schedule": "linear", "n_steps": 5,
    "target_update_interval": 10_000, "net_arch": (256, 256), "n_eval_episodes": 20,
    "tensorboard": False, "checkpoint_freq": 10**9,
}  # fmt: skip
PONG: dict[str, Any] = {
    "batch_size": 256, "learning_rate": 5e-4, "lr_schedule": "linear", "n_steps": 3,
    "target_update_interval": 64_000, "cql_alpha": 0.1,
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
    folder: Path, algo: str, seeds: range, epochs: int, image: str, fields: dict[str, Any]
) -> None:
    dataset = recorded(folder)
    behaviour = mean_return(dataset)
    print(json.dumps({"behaviour_return": behaviour, "episodes": dataset.manifest.episodes}))
    found = list[float]()
    for seed in seeds:
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
    print(json.dumps({"algo": algo, "reached": reached, "seeds": len(seeds), "returns": found}))
    if image:
        from qfleet.telemetry.plots import learning_curve
        from qfleet.telemetry.runs import read_run

        runs = [read_run(folder / f"{algo}-{seed}") for seed in seeds]
        learning_curve({algo: runs}, "eval/mean_reward", Path(image))


def measure_fqe(folder: Path, seeds: range, gamma: float, updates: int) -> None:
    found: dict[str, list[float]] = {"fqe": [], "wdr": []}
    for seed in seeds:
        policies = spread_out(checkpoints(folder / f"{seed}", seed))
        played = {
            name: np.array(policy.evaluate(100, seed=5).returns)
            for name, policy in policies.items()
        }
        began_s, dataset = time.monotonic(), Dataset(str(folder / f"{seed}" / "data"))
        estimates = compare(policies, dataset, gamma=gamma, updates=updates)
        for one in sorted(estimates, key=lambda one: played[one.policy].mean()):
            returns = played[one.policy]
            error = returns.std(ddof=1) / len(returns) ** 0.5
            true = {"seed": seed, "true_return": returns.mean(), "standard_error": error}
            print(json.dumps(true | asdict(one)))
        true_returns = [float(played[one.policy].mean()) for one in estimates]
        for method, correlations in found.items():
            correlations.append(spearman(true_returns, [getattr(e, method) for e in estimates]))
        newest = {f"spearman_{method}": values[-1] for method, values in found.items()}
        print(
            json.dumps({"seed": seed, **newest, "wall_s": time.monotonic() - began_s}), flush=True
        )
    for method, values in found.items():
        interval = {"mean": np.mean(values), "interval": bootstrap_ci(values)}
        print(json.dumps({"method": method, "spearman": values, **interval}))


def checkpoints(folder: Path, seed: int) -> dict[str, qfleet.Policy]:
    """Return the policies of all checkpoints of a run that is recorded to ``folder/data``."""
    trained = qfleet.train(
        "CartPole-v1", run_dir=folder / "run", seed=seed, checkpoint_freq=CHECKPOINT_FREQ,
        keep_checkpoints=10**6, eval_freq=0, tensorboard=False, record=str(folder / "data"),
    )  # fmt: skip
    assert isinstance(trained, qfleet.Trained)
    policies = dict[str, qfleet.Policy]()
    for steps in range(CHECKPOINT_FREQ, trained.config.steps + 1, CHECKPOINT_FREQ):
        stored = load_checkpoint(trained.folder / "checkpoints", steps)
        spec = spec_from_json(stored.meta["spec"])
        policies[str(steps)] = qfleet.Policy(trained.config, spec, stored.parts["learner"])
    return policies


def spread_out(policies: dict[str, qfleet.Policy], count: int = 10) -> dict[str, qfleet.Policy]:
    """Return the policies nearest to evenly spaced returns between the worst and the best.

    Most checkpoints of a run have almost the same return, and ranking those is ranking noise. The
    choice is made by episodes of its own, before anything is estimated.
    """
    returns = {name: policy.evaluate(20, seed=1000).mean for name, policy in policies.items()}
    chosen = dict[str, qfleet.Policy]()
    for level in np.linspace(min(returns.values()), max(returns.values()), count):
        name = min(returns, key=lambda name: abs(returns[name] - level))
        chosen[name] = policies[name]
        del returns[name]
    return chosen


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


def measure_pong(
    folder: Path, seeds: range, target: float, steps: int, updates: int, fields: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data, began_s = folder / "data", time.monotonic()

    def qfleet_does(command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "qfleet.cli.main", *command.split()])

    def check(*programs: subprocess.Popen[bytes]) -> None:
        if any([program.wait() for program in programs]):  # noqa: C419 (wait for all)
            raise SystemExit("a command failed")
        print(json.dumps({"seconds": round(time.monotonic() - began_s)}), flush=True)

    if not (folder / "behaviour").exists():
        check(qfleet_does(
            f"train ALE/Pong-v5 --preset pong --target-return {target} --no-tensorboard "
            f"--steps {max(3 * steps, 1000)} --run-dir {folder / 'behaviour'}"
        ))  # fmt: skip
    if not data.exists():
        recording = f"--steps {steps} --epsilon 0.2 --envs 64"
        check(qfleet_does(f"data record {folder / 'behaviour'} {data} {recording}"))
        check(qfleet_does(f"data stats {data}"))
    print(json.dumps({"behaviour_return": mean_return(Dataset(str(data)))}), flush=True)
    fields = PONG | fields
    rows = updates * fields["batch_size"]
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in fields.items())
    check(*(
        qfleet_does(
            f"train --data {data} --algo cql --normalize-observations {flags} --steps {rows} "
            f"--seed {seed} --eval-freq {max(rows // 4, 1)} --n-eval-episodes 10 --no-tensorboard "
            f"--checkpoint-freq 1000000000 --run-dir {folder / f'cql-{seed}'}"
        )
        for seed in seeds
    ))  # fmt: skip
    results = [json.loads((folder / f"cql-{seed}" / "result.json").read_text()) for seed in seeds]
    for result in results:
        shown = ("seed", "updates", "eval_return_mean", "best_eval_return", "wall_s")
        print(json.dumps({name: result[name] for name in shown}))


def spearman(one: list[float], other: list[float]) -> float:
    """Return the correlation of ranks; equal values have the mean of their ranks."""
    ranks = [[np.mean(np.flatnonzero(np.sort(v) == x)) for x in v] for v in (one, other)]
    return float(np.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["cql", "fqe", "speed", "pong"])
    parser.add_argument("--algo", default="cql")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--image", default="", help="draw the learning curve to this file")
    parser.add_argument("--fields", help='configuration fields as JSON; of cql: {"cql_alpha": 0.5}')
    parser.add_argument("--gamma", type=float, default=0.998, help="discount of FQE")
    parser.add_argument("--updates", type=int, help="of FQE (3,000) or pong (50,000)")
    parser.add_argument("--target", type=float, default=18.0, help="return of pong's behaviour")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps that pong records")
    parser.add_argument("--keep", default="", help="folder of pong's runs; what exists is used")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    fields = json.loads(options.fields or "{}")
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "cql":
            fields = fields or {"cql_alpha": 0.5}
            measure_cql(Path(folder), options.algo, seeds, options.epochs, options.image, fields)
        elif options.what == "fqe":
            measure_fqe(Path(folder), seeds, options.gamma, options.updates or 3000)
        elif options.what == "pong":
            kept, updates = Path(options.keep or folder), options.updates or 50_000
            measure_pong(kept, seeds, options.target, options.steps, updates, fields)
        else:
            measure_speed(Path(folder))


if __name__ == "__main__":
    main()
