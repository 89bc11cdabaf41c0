"""Print hashes of what every engine computes, to prove that a refactoring changed no number.

    python tools/fingerprint.py --out before.txt      on the old commit
    python tools/fingerprint.py --out after.txt       on the new one
    diff before.txt after.txt                         no line differs

One line per checkpoint tensor, per list of episodes and per manifest (without wall times, SHA-256
sums and the version of qfleet). Engines are run in their reproducible form: ``serial``, ``pipeline
--lockstep``, ``device`` on a CPU, a ``sync`` parameter server with one worker. The other update
rules and the actors engine depend on timing, so their parts (server shard, ring, replay shard and
its messages) are driven in this process instead. Hashes are comparable on one machine only: another
CPU may round differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import qfleet
from qfleet.config.config import Config
from qfleet.core.types import BATCH_FIELDS, FIRST, SKIP, TERMINATED, Block, EnvSpec
from qfleet.engines.actors.block_messages import encode
from qfleet.engines.actors.messages import PriorityUpdate
from qfleet.engines.actors.shard import ReplayShard
from qfleet.engines.parameter_server.server import Server
from qfleet.engines.parameter_server.wire import Exchange, Join, Push
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import PrioritizedSampler, UniformSampler

MASKED = ("wall_s", "timers", "sha256", "qfleet_version", "files")
"""Manifest keys that hold times, or hashes and sizes of what is hashed here anyway."""
BASE: dict[str, Any] = {
    "steps": 400, "learning_rate": 1e-3, "batch_size": 16, "buffer_size": 300,
    "learning_starts": 50, "train_freq": 5, "gradient_steps": 2, "target_update_interval": 35,
    "exploration_fraction": 0.5, "net_arch": (16,), "eval_freq": 200, "n_eval_episodes": 2,
    "max_episode_steps": 40, "log_interval": 90, "checkpoint_freq": 150, "tensorboard": False,
    "n_atoms": 11, "n_quantiles": 8, "iqn_samples": 4, "iqn_act_samples": 4, "iqn_embedding": 8,
    "seed": 5, "threads": 1,
}  # fmt: skip
ROLLOUTS: dict[str, Any] = {
    "envs": 4, "train_freq": 80, "gradient_steps": 20, "learning_starts": 0,
}  # fmt: skip
REPLAY_ROWS = (
    "dqn", "double-dqn", "dueling-dqn", "prioritized-dqn", "n-step-dqn", "noisy-dqn", "c51",
    "qr-dqn", "iqn", "munchausen-dqn", "munchausen-iqn", "rainbow",
)  # fmt: skip
ROLLOUT_ROWS = ("pqn", "n-step-q", "a3c")
PONG: dict[str, Any] = {
    "steps": 60, "envs": 4, "batch_size": 4, "buffer_size": 48, "learning_starts": 36,
    "train_freq": 4, "gradient_steps": 1, "target_update_interval": 24, "max_episode_steps": 9,
    "noop_max": 3, "eval_freq": 0, "n_eval_episodes": 1,
}  # fmt: skip
UPDATES = ("sync", "async", "ssp", "hybrid", "easgd", "local-sgd", "admm")
GAME = "MinAtar/Breakout-v1"


def cases() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Name, environment, algorithm row and changed fields of every run."""
    for row in (*REPLAY_ROWS, *ROLLOUT_ROWS):
        own = ROLLOUTS if row in ROLLOUT_ROWS else {}
        yield f"serial {row}", "CartPole-v1", row, {"engine": "serial", **own}
    for row in ("dqn", "rainbow", "iqn", "munchausen-dqn", "pqn", "a3c"):
        own = ROLLOUTS if row in ROLLOUT_ROWS else {"envs": 3}
        fields = {"engine": "pipeline", "lockstep": True, **own}
        yield f"pipeline {row}", "CartPole-v1", row, fields
    for engine, lockstep in (("serial", False), ("pipeline", True)):
        for row in ("dqn", "rainbow"):
            fields = {**PONG, "engine": engine, "lockstep": lockstep}
            yield f"{engine} pong {row}", "ALE/Pong-v5", row, fields
    device = {"engine": "device", "envs": 4, "network": "mlp"}
    for row in (*REPLAY_ROWS, "pqn", "n-step-q"):
        own = ROLLOUTS if row in ROLLOUT_ROWS else {}
        yield f"device {row}", GAME, row, {**device, **own}
    population = {**device, **ROLLOUTS, "population": 3, "vary": '{"gamma": [0.9, 0.95, 0.99]}'}
    yield "device population", GAME, "pqn", {**population, "pbt_interval": 160}
    yield "device halving", GAME, "pqn", {**population, "halving_interval": 160}
    # When workers report depends on timing, so only the last checkpoint is comparable.
    server = {"engine": "parameter-server", "update": "sync", "workers": 1}
    server |= {"checkpoint_freq": 10**9, "eval_freq": 0}
    for row in ("dqn", "rainbow", "c51", "pqn", "a3c"):
        own = ROLLOUTS if row in ROLLOUT_ROWS else {}
        yield f"parameter-server {row}", "CartPole-v1", row, {**server, **own}


def run_lines(env: str, row: str, fields: dict[str, Any]) -> Iterator[str]:
    """Train briefly; one line per tensor, list of episodes and manifest of every checkpoint."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        qfleet.train(env, algo=row, preset="none", run_dir=folder, **{**BASE, **fields})
        for path in sorted((folder / "checkpoints").iterdir(), key=lambda path: int(path.name)):
            for file in sorted(path.glob("*.safetensors")):
                for name, tensor in sorted(load_file(file).items()):
                    yield f"{path.name}/{file.stem}:{name} {digest(tensor)}"
            manifest = masked(json.loads((path / "manifest.json").read_text()))
            episodes = manifest["parts"].get("actor", {}).get("episodes", [])
            yield f"{path.name}/episodes {digest(episodes)}"
            yield f"{path.name}/manifest {digest(manifest)}"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        timed = ("time/", "pipeline/")
        kept = [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]
        # Progress of workers is seen at different moments, so those logs have other rows.
        if fields["engine"] != "parameter-server":
            yield f"metrics {digest(kept)}"


def masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: masked(entry) for key, entry in value.items() if key not in MASKED}
    if isinstance(value, list):
        return [masked(entry) for entry in value]
    return value


def digest(value: Any) -> str:
    """Of tensors and arrays: type, shape and bytes; of everything else: its JSON."""
    found = hashlib.sha256()
    _feed(found.update, value)
    return found.hexdigest()[:16]


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode())
        update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            update(str(key).encode())
            _feed(update, value[key])
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _feed(update, entry)
    else:
        update(json.dumps(value, default=str).encode())


# --- parts that are driven in this process -----------------------------------------------------


def server_lines(update: str) -> Iterator[str]:
    """A server of three workers, called in turn with gradients that depend on its weights."""
    size, workers = 37, 3
    config = Config(
        engine="parameter-server",
        update=update,
        workers=workers,
        optimizer="radam",
        hybrid_window_s=1e9,
        outlier_sigmas=8.0 if update in ("async", "ssp") else 0.0,
    )
    start = noise(size, 0)
    server = Server(config, start.numpy(), clock=lambda: 0.0)
    for worker in range(workers):
        server.join(Join(worker))
    shard = server._shard
    answers: list[Any] = []
    sequence = dict.fromkeys(range(workers), 0)
    for step in range(40):
        worker = (step * step + step // 3) % workers
        if shard.waits(worker):
            continue
        pulled = shard.pull()
        assert pulled.weights is not None
        vector = torch.from_numpy(pulled.weights) * 0.1 + noise(size, worker, step)
        if step % 11 == 10:
            vector[step % size] = torch.nan
        number = sequence[worker]
        if update == "easgd":
            reply = shard.exchange(Exchange(worker, number, pulled.epoch, vector, 0.3))
            moved = None if reply.weights is None else torch.from_numpy(reply.weights)
            answers.append((reply[:5], moved))
        else:
            push = Push(worker, number, *pulled.stamp, vector, 0.05, float(step), 1 + worker)
            answers.append(shard.push(push, now_s=float(step))[:5])
        answers.append(vector.numpy())
        sequence[worker] += 1
    state = shard.snapshot()
    for name in ("weights", "optimiser", "records", "admission", "counters"):
        yield f"{name} {digest(state[name])}"
    yield f"answers {digest([_plain(answer) for answer in answers])}"


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def noise(size: int, *key: int) -> torch.Tensor:
    seed = 0
    for part in key:
        seed = seed * 1009 + part
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def random_block(rows: int, envs: int, seed: int, spec: EnvSpec, first: bool = False) -> Block:
    """Rows with terminations and skipped rows; the row after a skipped one opens an episode."""
    random = np.random.default_rng(seed)
    shape = (rows, envs)
    skips = random.random(shape) < 0.2
    flags = skips * np.uint8(SKIP) + (~skips & (random.random(shape) < 0.1)) * np.uint8(TERMINATED)
    flags[1:] |= skips[:-1] * np.uint8(FIRST)
    if first:
        flags[0] |= FIRST
    frames = random.integers(0, 255, (*shape, *spec.frame_shape)).astype(spec.obs_dtype)
    return Block(
        obs=torch.from_numpy(frames),
        action=torch.from_numpy(random.integers(0, spec.num_actions, shape)),
        reward=torch.from_numpy(random.normal(size=shape).astype(np.float32)),
        flags=torch.from_numpy(flags),
        version=seed,
    )


SPECS = {
    "vector": EnvSpec("Test-v0", (2,), "float32", 3),
    "frames": EnvSpec("Frames-v0", (2, 3, 5), "uint8", 3, frame_stack=2),
}


def ring_lines(kind: str, prioritized: bool) -> Iterator[str]:
    """A ring that wraps around: what it samples, and its state."""
    spec, envs, rows, cpu = SPECS[kind], 3, 24, torch.device("cpu")
    generator = torch.Generator().manual_seed(1)
    if prioritized:
        sampler = PrioritizedSampler(rows, envs, 0.6, 1e-6, cpu, generator)
    else:
        sampler = UniformSampler(generator)
    ring = Ring(spec, envs, rows * envs, 3, 0.9, sampler, cpu)
    drawn = []
    for seed in range(12):
        ring.extend(random_block(5, envs, seed, spec, first=seed == 0))
        if ring.can_sample():
            batch = ring.sample(16, 0.5)
            drawn.append([getattr(batch, name) for name in BATCH_FIELDS])
            if prioritized:
                ring.update_priorities(batch.index, batch.reward.abs())
    yield f"batches {digest(drawn)}"
    state = ring.state_dict()
    yield f"frames {digest(list(state.pop('frames').tensors))}"
    yield f"state {digest(state)}"


def replay_shard_lines(kind: str, compression: str) -> Iterator[str]:
    """A replay shard of two actors: its messages, their answers, what it draws."""
    spec = SPECS[kind]
    config = Config(
        engine="actors", workers=2, envs=2, buffer_size=200, batch_size=8, n_steps=2, gamma=0.9,
        prioritized_replay=True, replay_compression=compression, seed=3,
    )  # fmt: skip
    shard = ReplayShard(config, spec, [0, 1])
    letters, answers, drawn = [], [], []
    for turn in range(14):
        actor = turn % 2
        block = random_block(5, 2, turn, spec, first=turn < 2)
        priority = np.abs(np.random.default_rng(turn).normal(size=(3, 2))).astype(np.float32)
        letter = encode(block, actor, 0, 5 * (turn // 2), spec.num_actions, priority, compression)
        letters.append([letter.frames if isinstance(letter.frames, np.ndarray) else "packed",
                        letter.action, letter.reward, letter.flags, letter.nbytes])  # fmt: skip
        answers.append([list(entry) for entry in shard.insert(letter).holdings.values()])
        if turn > 3:
            got = shard.exchange([], {0: 4, 1: 6})
            drawn.append([*got.columns, got.index, got.actor, got.probability])
            news = [PriorityUpdate(a, got.index[got.actor == a], np.float32(1 + a) * np.ones(
                int((got.actor == a).sum()), np.float32)) for a in (0, 1)]  # fmt: skip
            shard.exchange(news, {})
    yield f"messages {digest(letters)}"
    yield f"answers {digest(answers)}"
    yield f"samples {digest(drawn)}"
    for actor in (0, 1):
        state, versions = shard.describe(actor)
        yield f"state of actor {actor} {digest([state, versions, shard.frames(actor, 0)])}"


def all_lines(only: str) -> Iterator[str]:
    drivers: list[tuple[str, Callable[[], Iterator[str]]]] = []
    for name, env, row, fields in cases():
        drivers.append((name, lambda e=env, r=row, f=fields: run_lines(e, r, f)))  # type: ignore[misc]
    for update in UPDATES:
        drivers.append((f"server {update}", lambda u=update: server_lines(u)))  # type: ignore[misc]
    for kind in SPECS:
        for flag in (False, True):
            name = f"ring {kind} {'prioritized' if flag else 'uniform'}"
            drivers.append((name, lambda k=kind, f=flag: ring_lines(k, f)))  # type: ignore[misc]
    drivers.append(("replay shard vector", lambda: replay_shard_lines("vector", "none")))
    drivers.append(("replay shard frames", lambda: replay_shard_lines("frames", "lz4")))
    for name, lines in drivers:
        if only in name:
            for line in lines():
                yield f"{name}: {line}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the lines to this file as well")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    options = parser.parse_args()
    out = options.out.open("w") if options.out else None
    for line in all_lines(options.only):
        print(line, flush=True)
        if out is not None:
            print(line, file=out, flush=True)
    if out is not None:
        out.close()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
