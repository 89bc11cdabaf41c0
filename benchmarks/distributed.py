"""What distributing gains on real tasks: workers and actors beside serial and pipeline.

    python benchmarks/distributed.py                          env steps per second, all tasks
    python benchmarks/distributed.py --tasks pong --workers 1,2,4 --seconds 20
    python benchmarks/distributed.py --rows solve             seconds to 475 on CartPole
    python benchmarks/distributed.py --rows pong18            seconds to 18 on Pong (a GPU)
    python benchmarks/distributed.py --rows apex              two Atari games, beside pipeline
    python benchmarks/distributed.py --rows draw --out FOLDER the figures, of FOLDER

rates: Pong with one update of 32 per 256 env steps, and highway-env's `highway-fast-v0` (42 ms per
env step) with the settings of its preset. Every worker, actor and serial run has one thread, and
nothing is delayed artificially. The exploration rate is constant, because what an agent has learnt
changes what a step costs. ``independent`` are as many serial programs as there are workers,
started together: the steps that these cores can make at most. They run before and after the runs of
the same size, which are compared with their mean, because machines are noisy. ``overlap``: workers
that send a gradient while they compute the next one; ``one-call``: that also take the newest
weights from its reply instead of asking for them again. A rate is that of the second half of a run,
or that of ``fleet`` in its result: from when all workers have begun. With ``--together`` small
numbers of workers run at the same time, where the cores suffice.
apex: Ape-X (priorities, double, dueling, a ladder of exploration rates) on ``actors`` beside the
preset `pong` on ``pipeline``; all four runs at the same time, each on a quarter of the cores.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

QUIET = "--no-tensorboard --eval-freq 0 --n-eval-episodes 1 --checkpoint-freq 1000000000"
TASKS = {
    "pong": (
        "train ALE/Pong-v5 --algo dqn --preset none --steps 100000000 --envs 8 "
        "--clip-rewards --buffer-size 40000 --learning-starts 2000 --train-freq 256 "
        "--batch-size 32 --exploration-initial-eps 0.05 --log-interval 1000"
    ),
    "highway": (
        "train highway-fast-v0 --import highway_env --algo dqn --preset highway --steps 100000000 "
        "--envs 1 --vectorize sync --buffer-size 15000 --learning-starts 50 "
        "--exploration-initial-eps 1 --exploration-final-eps 1 --log-interval 20"
    ),
}
ENGINES = {
    "workers": "--engine parameter-server --update async --device cpu",
    "overlap": "--engine parameter-server --update async --device cpu --overlap",
    "one-call": "--engine parameter-server --update async --device cpu --overlap --pull with-push",
    "actors": "--engine actors",
    "independent": "--engine serial --threads 1 --device cpu",
}
OPTIONS = ("overlap", "one-call")
"""Engines that are only measured with the largest number of workers."""
SOLVE = "train CartPole-v1 --target-return 475 --eval-freq 2500 --no-tensorboard --max-wall 120s"
SOLVERS = {
    "serial": "--preset cartpole --engine serial",
    "pipeline": "--preset cartpole --engine pipeline",
    "workers": "--preset cartpole-parameter-server",
    "actors": "--preset cartpole-apex",
}
PONG = "train ALE/Pong-v5 --preset pong --target-return 18 --no-tensorboard"
PONG_PLAYERS = {
    "pipeline": "--engine pipeline",
    "actors": "--engine actors --workers 16 --envs 8 --servers 0 --block-rows 32",
    "shards": "--engine actors --workers 16 --envs 8 --servers 2",
    "workers": "--engine parameter-server --workers 16 --envs 8 --update async --device cpu",
}
RESULT_KEYS = ("wall_s", "env_steps", "stopped_by", "best_eval_return", "joules", "device_s")
GAMES = ["Pong", "Breakout"]
GAME = "train ALE/{game}-v5 --preset pong --target-return 1000 --eval-freq 100000 --no-tensorboard"
APEX = {
    "pipeline": "--engine pipeline --envs 32 --threads 4",
    "actors": (
        "--engine actors --workers 3 --envs 16 --servers 0 --double --dueling --prioritized-replay "
        "--exploration-ladder --exploration-final-eps 0.4"
    ),
}


def run(
    command: str, folder: Path, limit_s: float, cores: set[int] | None = None
) -> dict[str, Any]:
    """Run a command, on these cores if given; return what its result says and its rate."""
    words = [*command.split(), "--run-dir", str(folder)]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "qfleet.cli.main", *words],
            stdout=out, stderr=out, env=environ, check=False, timeout=limit_s,
            preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"qfleet {' '.join(words)} failed:\n{log.read_text()[-2000:]}")
    result = json.loads((folder / "result.json").read_text())
    fleet = result["fleet"] or {}
    return {
        "steps_per_s": fleet.get("env_steps_per_s") or second_half_rate(folder / "metrics.jsonl"),
        **{key: result[key] for key in RESULT_KEYS},
        "staleness": (fleet.get("staleness") or {}).get("mean"),
    }


def second_half_rate(metrics: Path) -> float:
    """Return the env steps per second in the second half of a run, or 0 if it is too short."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    points = [
        (row["time/time_elapsed"], row["env_steps"]) for row in rows if row.get("time/time_elapsed")
    ]
    late = [point for point in points if point[0] >= points[-1][0] / 2]
    (began_s, first), (ended_s, last) = (late[0], late[-1]) if late else ((0.0, 0), (0.0, 0))
    return (last - first) / (ended_s - began_s) if ended_s > began_s else 0.0


def rate(task: str, engine: str, workers: int, seconds: float, out: Path) -> dict[str, Any]:
    command = f"{TASKS[task]} {QUIET} --max-wall {seconds:g}s"
    name, limit_s = f"{task}-{engine}-{workers}", seconds + 120
    if engine != "independent":
        alone = ENGINES["independent"] if engine == "serial" else f"--engine {engine}"
        with_workers = f"{command} {ENGINES.get(engine, alone)}"
        if engine in ENGINES:
            with_workers += f" --workers {workers}"
        return run(with_workers, out / name, limit_s)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        each = list(
            pool.map(
                lambda seed: run(
                    f"{command} {ENGINES[engine]} --seed {seed}", out / f"{name}-{seed}", limit_s
                ),
                range(workers),
            )
        )
    return {"steps_per_s": sum(one["steps_per_s"] for one in each)}


def batches(workers: list[int], together: bool) -> list[list[int]]:
    """Return the numbers of workers to measure at the same time: few enough for these cores."""
    if not together:
        return [[count] for count in sorted(workers, reverse=True)]
    packed: list[list[int]] = []
    for count in sorted(workers, reverse=True):
        for batch in packed[1:]:  # the largest is alone, as its independent programs are
            if sum(batch) + count <= (os.cpu_count() or 1) // 2:
                batch.append(count)
                break
        else:
            packed.append([count])
    return packed


def rates(
    tasks: list[str], engines: list[str], workers: list[int], seconds: float, out: Path,
    together: bool,
) -> dict[str, Any]:  # fmt: skip
    found: dict[str, Any] = {}
    most = max(workers)
    for task in tasks:
        own = found[task] = {engine: {} for engine in ("workers", *OPTIONS, "actors")}
        alone = [name for name in ("serial", "pipeline") if name in engines]
        own["alone"] = {name: rate(task, name, 1, seconds, out) for name in alone}
        ceilings = [rate(task, "independent", most, seconds, out)["steps_per_s"]]
        for engine in [name for name in OPTIONS if name in engines]:
            own[engine] = {most: rate(task, engine, most, seconds, out)}
        for batch in batches(workers, together):
            for engine in [name for name in ("workers", "actors") if name in engines]:
                with concurrent.futures.ThreadPoolExecutor(len(batch)) as pool:
                    measured = pool.map(lambda m: rate(task, engine, m, seconds, out), batch)  # noqa: B023
                    own[engine].update(zip(batch, measured, strict=True))
            if most in batch and {"workers", "actors", *OPTIONS} & set(engines):
                again = rate(task, "independent", most, seconds, out / "again")
                ceilings.append(again["steps_per_s"])
        mean = sum(ceilings) / len(ceilings)
        own["independent"] = {most: {"steps_per_s": mean, "before_and_after": ceilings}}
        (out / "rates.json").write_text(json.dumps(found, indent=2))
        show_rates(task, own)
    return found


def show_rates(task: str, own: dict[str, Any]) -> None:
    most, best = next(iter(own["independent"].items()))
    ceiling = best["steps_per_s"]
    both = " and ".join(f"{one:,.1f}" for one in best["before_and_after"])
    print(f"{task}: {most} independent serial programs {both} steps/s", flush=True)
    for name, one in own["alone"].items():
        print(f"  {name:<10}    {one['steps_per_s']:>10,.1f} steps/s", flush=True)
    for engine in ("workers", *OPTIONS, "actors"):
        for count, one in sorted(own[engine].items(), key=lambda item: int(item[0])):
            first = own[engine].get(1, own[engine].get("1"))
            line = f"  {engine:<10} {count:>2} {one['steps_per_s']:>10,.1f} steps/s"
            if first is not None and first["steps_per_s"]:
                line += f"   {one['steps_per_s'] / first['steps_per_s']:>5.2f} × one"
            if int(count) == int(most):
                line += f"   {one['steps_per_s'] / ceiling:.2f} of independent"
            if one["staleness"] is not None:
                line += f"   staleness {one['staleness']:.1f}"
            print(line, flush=True)


def solve(workers: list[int], seeds: int, out: Path) -> list[dict[str, Any]]:
    """Seconds to 475 on CartPole, from Enter's first env step to the evaluation that shows it."""
    found = []
    for name, options in SOLVERS.items():
        for count in workers if name in ENGINES else [1]:
            more = f" --workers {count}" if name in ENGINES else ""
            runs = [
                run(
                    f"{SOLVE} {options}{more} --seed {seed}",
                    out / f"solve-{name}-{count}-{seed}", 240,
                )
                for seed in range(seeds)
            ]  # fmt: skip
            solved = [one for one in runs if one["stopped_by"] == "target_return"]
            seconds = [round(one["wall_s"], 1) for one in solved]
            steps = [one["env_steps"] for one in solved]
            found.append({"engine": name, "workers": count, "seconds": seconds, "steps": steps})
            print(f"{name:<10} {count:>2}  {seconds} s  {steps} steps  of {seeds}", flush=True)
    return found


def pong18(players: list[str], limit_s: float, out: Path) -> dict[str, Any]:
    found = {}
    for name in players:
        command = f"{PONG} {PONG_PLAYERS[name]} --max-wall {limit_s:g}s"
        found[name] = one = run(command, out / f"pong18-{name}", limit_s + 120)
        reached = one["stopped_by"] == "target_return"
        print(
            f"Pong to 18, {name}: {'reached' if reached else 'not reached'} after "
            f"{one['wall_s']:.0f} s and {one['env_steps']:,} steps; "
            f"best {one['best_eval_return']}, {one['steps_per_s']:,.0f} steps/s",
            flush=True,
        )
    return found


def apex(limit_s: float, out: Path) -> None:
    """Train both games with both engines at the same time."""
    share = (os.cpu_count() or 4) // 4

    def one(at: int) -> None:
        game, name = GAMES[at // 2], list(APEX)[at % 2]
        command = f"{GAME.format(game=game)} {APEX[name]} --max-wall {limit_s:g}s"
        cores = set(range(at * share, (at + 1) * share))
        result = run(command, out / f"apex-{game}-{name}", limit_s + 150, cores)
        print(
            f"{game} for {result['wall_s']:.0f} s, {name}: {result['env_steps']:,} steps, best "
            f"evaluation {result['best_eval_return']}, {result['steps_per_s']:,.0f} steps/s",
            flush=True,
        )

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))


def draw_games(out: Path) -> Path:
    """Draw the evaluations of the runs of ``apex`` over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    for panel, game in zip(figure.subplots(1, 2), GAMES, strict=True):
        for name in APEX:
            lines = (out / f"apex-{game}-{name}" / "metrics.jsonl").read_text().splitlines()
            seconds, points = 0.0, list[tuple[float, float]]()
            for row in map(json.loads, lines):
                seconds = row.get("time/time_elapsed", seconds)
                if "eval/mean_reward" in row:
                    points.append((seconds, row["eval/mean_reward"]))
            panel.plot(*zip(*points, strict=True), marker="o", label=name)
        panel.set(title=game, xlabel="seconds", ylabel="evaluation return")
        panel.legend(fontsize=8)
    path = out / "apex.png"
    figure.savefig(path, dpi=120)
    return path


def draw(out: Path) -> Path:
    """Draw speed against the number of workers, of ``rates.json`` in the folder."""
    from matplotlib.figure import Figure

    found = json.loads((out / "rates.json").read_text())
    figure = Figure(figsize=(4.2 * len(found), 3.4), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for panel, (task, own) in zip(panels, found.items(), strict=True):
        for engine in ("workers", "actors"):
            points = sorted((int(m), one["steps_per_s"]) for m, one in own[engine].items())
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", label=engine)
        most, best = next(iter(own["independent"].items()))
        panel.plot([1, int(most)], [best["steps_per_s"] / int(most), best["steps_per_s"]],
                   color="grey", linestyle=":", label="independent programs")  # fmt: skip
        for name, one in own["alone"].items():
            style = "-" if name == "serial" else "--"
            panel.axhline(one["steps_per_s"], color="black", linestyle=style, lw=1, label=name)
        panel.set(title=task, xlabel="workers or actors", ylabel="env steps per second")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        counts = sorted({int(m) for engine in ("workers", "actors") for m in own[engine]})
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.legend(fontsize=8, loc="lower right")
    path = out / "distributed.png"
    figure.savefig(path, dpi=120)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", nargs="+", choices=["rates", "solve", "pong18", "apex", "draw"], default=["rates"]
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    engines = ["serial", "pipeline", "workers", *OPTIONS, "actors"]
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines)
    parser.add_argument("--workers", default="1,2,4,8,16")
    parser.add_argument("--players", nargs="+", choices=PONG_PLAYERS, default=list(PONG_PLAYERS))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of pong18, apex")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/distributed"))
    options = parser.parse_args()
    workers = [int(count) for count in options.workers.split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    if "rates" in options.rows:
        rates(
            options.tasks, options.engines, workers, options.seconds, options.out, options.together
        )
    if "solve" in options.rows:
        found = solve(workers, options.seeds, options.out)
        (options.out / "solve.json").write_text(json.dumps(found, indent=2))
    if "pong18" in options.rows:
        reached = pong18(options.players, options.limit, options.out)
        (options.out / "pong18.json").write_text(json.dumps(reached, indent=2))
    if "apex" in options.rows:
        apex(options.limit, options.out)
    if "draw" in options.rows:
        if (options.out / "rates.json").exists():
            print(draw(options.out))
        if (options.out / "apex-Pong-actors").exists():
            print(draw_games(options.out))


if __name__ == "__main__":
    main()
