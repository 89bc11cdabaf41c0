"""The pipeline engine beside its ceilings, in one run: environments alone, updates alone, serial.

    python benchmarks/pipeline.py                     Pong on the accelerator: all rows
    python benchmarks/pipeline.py --rows dqn32 dqn256 --seconds 20
    python benchmarks/pipeline.py --rows cpu          two CPU rows: pipeline against serial
    python benchmarks/pipeline.py --rows engines      what --engine auto takes, beside each by hand

Each rate is the median over log intervals of the second half of a run, so that start-up, compiling
and filling the memory do not count; they are printed apart. Absolute rates vary with the machine;
the ratios are what to look at.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.engines import stage_rates
from qfleet.engines.auto import settle
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions

UNTIMED = {"eval_freq": 0, "n_eval_episodes": 1, "checkpoint_freq": 10**9, "tensorboard": False}


def configure(algo: str | None = None, env: str = "ALE/Pong-v5", **fields: Any) -> Config:
    long = {"steps": 10**8, "learning_starts": 5000, "exploration_initial_eps": 0.05}
    config, _ = resolve(env, algo, fields={**long, **UNTIMED, **fields})
    return settle(validate(config))[0]


def end_to_end(config: Config, seconds: float) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder) / "run", RunOptions(max_wall_s=seconds, stage_rates=True))
        ready_s = time.perf_counter() - start
        notes = list(run.parts.notes)
        result = run.go()
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    rates = [entry["time/fps"] for entry in logged if entry.get("time/fps")]
    return {
        "steps_per_s": statistics.median(rates[len(rates) // 2 :]),
        "updates": result.updates,
        "ready_s": ready_s,
        "env_only": result.rates and result.rates["env_only"],
        "learner_only": result.rates and result.rates["learner_only"],
        "inference_only": result.rates and result.rates["inference_only"],
        "notes": notes,
        "faults": result.faults,
        "time_share": result.time_share,
    }


def report(name: str, row: dict[str, Any]) -> dict[str, Any]:
    line = f"{name:<34} {row['steps_per_s']:>9,.0f} steps/s"
    ceiling = row["env_only"]  # the same envs, in the same turns, right after the run
    if ceiling is not None:
        row["of_env_only"] = row["steps_per_s"] / ceiling
        line += f"   {row['of_env_only']:.2f} of the envs alone ({ceiling:,.0f})"
    if row["learner_only"]:
        row["of_learner_only"] = row["steps_per_s"] / row["learner_only"]
        line += f"   {row['of_learner_only']:.2f} of the learner alone ({row['learner_only']:,.0f})"
    print(f"{line}   ready in {row['ready_s']:.0f} s", flush=True)
    for note in row["notes"]:
        print(f"    {note}")
    print(
        f"    time in { ({k: round(v, 2) for k, v in row['time_share'].items() if v}) }", flush=True
    )
    if row["faults"]:
        print(f"    faults {row['faults']}", flush=True)
    return row


def accelerated(rows: list[str], seconds: float, fields: dict[str, Any]) -> dict[str, Any]:
    configs = {
        "dqn32": configure(**fields),
        "dqn256": configure(batch_size=256, train_freq=32, **fields),
        "rainbow": configure("rainbow", **{"buffer_size": 100_000, **fields}),
    }
    names = {
        "dqn32": "DQN, 1 update of 32 per 4 steps",
        "dqn256": "DQN, 1 update of 256 per 32 steps",
        "rainbow": "Rainbow, 1 update of 32 per 4",
    }
    found: dict[str, Any] = {}
    for row in rows:
        found[row] = report(names[row], end_to_end(configs[row], seconds))
    if {"dqn32", "rainbow"} <= set(found):
        ratio = found["rainbow"]["steps_per_s"] / found["dqn32"]["steps_per_s"]
        found["rainbow_over_dqn"] = ratio
        print(f"Rainbow over DQN: {ratio:.2f}", flush=True)
    return found


def on_cpu(seconds: float) -> dict[str, Any]:
    """Pipeline against serial on the CPU: where learning is all, and where envs are much."""
    found = {}
    rows = {
        "Pong, 1 update of 32 per 4 steps": {},
        "Pong, 1 update of 32 per 256 steps": {"train_freq": 256},
    }
    for name, fields in rows.items():
        rates: dict[str, list[float]] = {"serial": [], "pipeline": []}
        for _ in range(3):
            for engine in rates:
                config = configure(
                    engine=engine, device="cpu", envs=16, buffer_size=8000,
                    **{"learning_starts": 320, "log_interval": 64, **fields},
                )  # fmt: skip
                rates[engine].append(end_to_end(config, seconds)["steps_per_s"])
        ratio = statistics.median(rates["pipeline"]) / statistics.median(rates["serial"])
        found[name] = {**rates, "ratio": ratio}
        print(
            f"{name:<36} serial {statistics.median(rates['serial']):>7,.1f}   "
            f"pipeline {statistics.median(rates['pipeline']):>7,.1f} steps/s   ratio {ratio:.2f}",
            flush=True,
        )
    return found


def by_engine(seconds: float) -> dict[str, Any]:
    """What ``auto`` takes, and each engine by hand, on the device that suits the task."""
    found: dict[str, Any] = {}
    tasks: dict[str, dict[str, Any]] = {
        "ALE/Pong-v5": {"buffer_size": 20_000},
        "CartPole-v1": {"log_interval": 1000},
    }
    if torch.accelerator.current_accelerator(check_available=True) is None:
        tasks["ALE/Pong-v5"] |= {"buffer_size": 8000, "learning_starts": 320, "log_interval": 64}
    for env, fields in tasks.items():
        configs = {
            engine: configure(env=env, engine=engine, **fields)
            for engine in ("serial", "pipeline", "auto")
        }
        rates = {
            engine: end_to_end(configs[engine], seconds)["steps_per_s"]
            for engine in ("serial", "pipeline")
        }
        # The very configuration of one by hand need not be measured against itself.
        taken = configs["auto"]
        same = [engine for engine in rates if configs[engine] == taken]
        rates["auto"] = rates[same[0]] if same else end_to_end(taken, seconds)["steps_per_s"]
        ratio = rates["auto"] / max(rates["serial"], rates["pipeline"])
        found[env] = {**rates, "taken": taken.engine, "ratio": ratio}
        print(
            f"{env:<14} serial {rates['serial']:>9,.1f}   pipeline {rates['pipeline']:>9,.1f}   "
            f"auto ({taken.engine}) {rates['auto']:>9,.1f} steps/s   {ratio:.2f} of the best",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=["dqn32", "dqn256", "rainbow"])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--fields", default="{}", help="configuration fields, as JSON")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    fields = json.loads(options.fields)
    found: dict[str, Any] = {}
    if "cpu" in options.rows:
        found["cpu"] = on_cpu(options.seconds)
    if "engines" in options.rows:
        found["engines"] = by_engine(options.seconds)
    rows = [row for row in options.rows if row not in ("cpu", "engines")]
    if rows:
        if torch.accelerator.current_accelerator(check_available=True) is None:
            raise SystemExit("no accelerator here; --rows cpu compares engines on the CPU")
        # For as long as the run itself, so that both meet as many ends of episodes.
        stage_rates.MEASURE_S = options.seconds
        found |= accelerated(rows, options.seconds, fields)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
