"""The device engine: PQN on MinAtar and CartPole beside what its two stages could do alone.

    python benchmarks/device.py                          MinAtar Breakout, one agent and ten
    python benchmarks/device.py --rows asterix cartpole
    python benchmarks/device.py --rows games             all five games, ten agents each, sticky
    python benchmarks/device.py --rows freeway3-sticky   one of them, three agents
    python benchmarks/device.py --steps 200000           a short look

Training time is that of the run's own clock: from the first step to the last, without evaluation,
compiling and recording, which are printed apart. Games are PureJaxQL's (gymnax's): no sticky
actions, episodes of 1000 steps at most; with ``-sticky`` they have MinAtar's own sticky actions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.telemetry.aggregate import bootstrap_ci
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions

GAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")
NOT_STICKY = json.dumps({"sticky_action_prob": 0.0})
PEER_S = {("Breakout", 1): 29.4, ("Breakout", 10): 92.0, ("Asterix", 1): 49.2}
"""Seconds of PureJaxQL for 10M steps of every agent on an H200 (docs/performance.md)."""
PEER_STEPS = 10_000_000


def train(config: Config) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder) / "run", RunOptions(stage_rates=True))
        ready_s = time.perf_counter() - start
        notes = list(run.parts.notes)
        run.go()
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    trained = [entry for entry in logged if entry.get("time/time_elapsed")]
    assert run.evaluation is not None
    returns = np.array(run.evaluation.returns).reshape(config.population, -1).mean(1)
    return {
        "ready_s": ready_s,
        "train_s": trained[-1]["time/time_elapsed"],
        "steps": trained[-1]["time/env_steps"],
        "returns": returns.tolist(),
        "curve": [(entry["time/env_steps"], entry.get("rollout/ep_rew_mean")) for entry in trained],
        "rates": None if run.stages is None else run.stages.as_dict(),
        "notes": notes,
    }


def report(name: str, game: str, agents: int, row: dict[str, Any]) -> None:
    returns = np.array(row["returns"])
    line = f"{name:<24} {row['steps']:>11,} steps in {row['train_s']:6.2f} s"
    line += (
        f" ({agents * row['steps'] / row['train_s']:>11,.0f}/s)   ready in {row['ready_s']:.0f} s"
    )
    line += f"   greedy return {returns.mean():.1f}"
    if agents > 1:
        low, high = bootstrap_ci(returns, np.mean)
        line += f" [{low:.1f}, {high:.1f}] of {agents}"
    peer_s = PEER_S.get((game, agents))
    if peer_s is not None and row["steps"] >= 0.99 * PEER_STEPS:
        row["times_peer"] = peer_s / row["train_s"]
        line += f"   {row['times_peer']:.1f}× PureJaxQL's pace ({peer_s:.1f} s)"
    print(line, flush=True)
    rates = row["rates"]
    if rates and rates.get("learner_only") and rates.get("env_only"):
        steps = agents * row["steps"]
        alone_s = steps / rates["learner_only"] + steps / rates["env_only"]
        print(f"    both stages alone, one after the other: {alone_s:.2f} s", flush=True)
    for note in row["notes"]:
        print(f"    {note}")
    print(f"    of each agent: {[round(value, 1) for value in row['returns']]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=["breakout", "breakout10"])
    parser.add_argument("--steps", type=int, default=0, help="instead of the preset's")
    parser.add_argument("--seeds", type=int, default=5, help="of the CartPole row")
    parser.add_argument("--fields", default="{}", help="configuration fields, as JSON")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    fields = {"eval_freq": 0, "n_eval_episodes": 128, "tensorboard": False, "engine": "device"}
    fields |= json.loads(options.fields)
    if options.steps:
        fields["steps"] = options.steps
    found: dict[str, Any] = {}

    def run_row(name: str, env: str, agents: int, **more: Any) -> None:
        config, _ = resolve(env, "pqn", fields={"population": agents, **more, **fields})
        found[name] = train(validate(config))
        report(name, env.removeprefix("MinAtar/").removesuffix("-v1"), agents, found[name])
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))

    rows = [f"{game.lower()}10-sticky" for game in GAMES] if options.rows == ["games"] else None
    for row in rows or options.rows:
        if row == "cartpole":
            run_cartpole(found, fields, options.seeds)
            continue
        game = row.removesuffix("-sticky").rstrip("0123456789")
        agents = int(row.removeprefix(game).removesuffix("-sticky") or 1)
        names = {name.lower(): name for name in GAMES}
        more = {} if row.endswith("-sticky") else {"env_kwargs": NOT_STICKY}
        run_row(row, f"MinAtar/{names[game]}-v1", agents, **more)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def run_cartpole(found: dict[str, Any], fields: dict[str, Any], seeds: int) -> None:
    """Seconds of training until an evaluation reaches 475, of several seeds in turn."""
    seconds = []
    for seed in range(seeds):
        told = {**fields, "seed": seed, "target_return": 475.0, "eval_freq": 8192}
        config, _ = resolve("CartPole-v1", "pqn", fields={**told, "n_eval_episodes": 20})
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            run = Run(validate(config), Path(folder) / "run", RunOptions())
            ready_s = time.perf_counter() - start
            result = run.go()
        reached = result.stopped_by == "target_return"
        seconds.append(run.wall_s() if reached else float("inf"))
        print(
            f"CartPole seed {seed}: {result.env_steps:,} steps, {run.wall_s():.2f} s, "
            f"{'475 reached' if reached else 'not reached'}, ready in {ready_s:.0f} s",
            flush=True,
        )
    found["cartpole"] = {"seconds": seconds, "median": statistics.median(seconds)}
    print(
        f"CartPole to 475: median {statistics.median(seconds):.2f} s of {seeds} seeds", flush=True
    )


if __name__ == "__main__":
    main()
