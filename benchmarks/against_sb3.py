"""qfleet beside Stable-Baselines3: same machine, same process, same task, network, batch and replay
ratio. Prints ratios, because absolute rates vary with the machine and the hour.

    python benchmarks/against_sb3.py                  everything (half an hour on 2 slow cores)
    python benchmarks/against_sb3.py --rows zoo cleanrl pong
    python benchmarks/against_sb3.py --rows solve --seeds 5
    python benchmarks/against_sb3.py --rows solve-pqn

Each rate is the median of several rounds in which the two take turns, so that a slow minute of the
machine hits both. Environment resets, logging and checkpoints are part of both sides; evaluation
is off except in `solve`, where both sides evaluate alike and the clock includes it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import stable_baselines3 as sb3
import torch
from ale_py.vector_env import AtariVectorEnv
from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, VecTransposeImage

import qfleet
from qfleet.config import presets
from qfleet.config.config import Config

UNTIMED = {"eval_freq": 0, "n_eval_episodes": 1, "checkpoint_freq": 10**9, "tensorboard": False}


class SB3AtariPool(VecEnv):
    """ale-py's pool as an SB3 VecEnv, so that both sides step the very same emulators."""

    def __init__(self, game: str, num_envs: int) -> None:
        self.pool = AtariVectorEnv(game, num_envs, autoreset_mode="SameStep")
        super().__init__(
            num_envs, self.pool.single_observation_space, self.pool.single_action_space
        )

    def reset(self) -> np.ndarray:
        return self.pool.reset(seed=0)[0]

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        obs, reward, terminated, truncated, info = self.pool.step(self.actions)
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for env in done.nonzero()[0]:
            infos[env]["terminal_observation"] = info["final_obs"][env]
            infos[env]["TimeLimit.truncated"] = bool(truncated[env])
        return obs, reward.astype(np.float32), done, infos

    def close(self) -> None:
        self.pool.close()

    def get_attr(self, name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, name: str, value: Any, indices: Any = None) -> None: ...

    def env_method(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def sb3_model(config: Config, seed: int, envs: int = 1) -> sb3.DQN:
    """SB3's DQN with the same hyper-parameters."""
    common = {
        "learning_rate": config.learning_rate,
        "batch_size": config.batch_size,
        "buffer_size": config.buffer_size,
        "learning_starts": config.learning_starts,
        "gamma": config.gamma,
        "target_update_interval": config.target_update_interval,
        "exploration_fraction": config.exploration_fraction,
        "exploration_final_eps": config.exploration_final_eps,
        "max_grad_norm": config.max_grad_norm or 1e9,
        "seed": seed,
        "device": "cpu",
    }
    if config.env == "CartPole-v1":
        return sb3.DQN(
            "MlpPolicy",
            config.env,
            train_freq=config.train_freq,
            gradient_steps=config.gradient_steps,
            policy_kwargs={"net_arch": list(config.net_arch)},
            **common,
        )
    # SB3 counts train_freq in calls of the whole pool, so `envs` steps come with each of them.
    pool = VecMonitor(SB3AtariPool("pong", envs))
    assert not isinstance(pool, VecTransposeImage)
    updates = envs * config.gradient_steps // config.train_freq
    return sb3.DQN("CnnPolicy", pool, train_freq=1, gradient_steps=updates, **common)


def sb3_rate(config: Config, seed: int) -> float:
    torch.backends.mkldnn.set_flags(True)  # as SB3 finds it; qfleet turns it off for itself
    model = sb3_model(config, seed, config.envs)
    start = time.perf_counter()
    model.learn(config.steps)
    rate = model.num_timesteps / (time.perf_counter() - start)
    model.get_env().close()
    return rate


def qfleet_rate(config: Config, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        trained = qfleet.train(config=config.replace(seed=seed), run_dir=Path(folder) / "run")
    return trained.result.env_steps_per_s


def compare(name: str, config: Config, rounds: int) -> dict[str, Any]:
    ours, theirs = [], []
    for seed in range(rounds):
        theirs.append(sb3_rate(config, seed))
        ours.append(qfleet_rate(config, seed))
    row = {
        "row": name,
        "qfleet_steps_per_s": statistics.median(ours),
        "sb3_steps_per_s": statistics.median(theirs),
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "ratio_range": [min(ours) / max(theirs), max(ours) / min(theirs)],
    }
    print(
        f"{name:<28} qfleet {row['qfleet_steps_per_s']:>8,.0f} steps/s   "
        f"SB3 {row['sb3_steps_per_s']:>8,.0f} steps/s   ratio {row['ratio']:.2f} "
        f"({row['ratio_range'][0]:.2f}–{row['ratio_range'][1]:.2f})",
        flush=True,
    )
    return row


def zoo(rounds: int) -> dict[str, Any]:
    config = presets.preset_config("cartpole-sb3-zoo").replace(steps=15_000, **UNTIMED)
    return compare("CartPole, SB3-zoo settings", config, rounds)


def cleanrl(rounds: int) -> dict[str, Any]:
    # Learning starts at once here: the 10,000 free steps of the recipe would flatter both.
    config = presets.preset_config("cartpole-cleanrl").replace(
        steps=20_000, learning_starts=500, **UNTIMED
    )
    return compare("CartPole, CleanRL settings", config, rounds)


def pong(rounds: int) -> dict[str, Any]:
    config = presets.preset_config("atari-dqn").replace(
        steps=2000, learning_starts=200, buffer_size=10_000, device="cpu", log_interval=500,
        **UNTIMED,
    )  # fmt: skip
    return compare("Pong, 1 update of 32 / 4", config, rounds)


def solve(seeds: int, preset: str) -> dict[str, Any]:
    """Wall time until 10 evaluation episodes reach a mean of 475, at most SB3's 50k steps.

    Against SB3's DQN, whatever the preset's algorithm.
    """
    zoo_config = presets.preset_config("cartpole-sb3-zoo")
    ours, theirs = [], []
    for seed in range(seeds):
        theirs.append(_timed(lambda seed=seed: _sb3_solves(zoo_config, seed)))
        ours.append(_timed(lambda seed=seed: _qfleet_solves(preset, seed)))
        for name, (solved, seconds) in (("SB3", theirs[-1]), ("qfleet", ours[-1])):
            said = "reached 475 after" if solved else "did not reach 475 to the end:"
            print(f"  seed {seed}  {name:<6} {said} {seconds:.1f} s", flush=True)
    row = {
        "row": f"CartPole to 475, {preset}",
        "qfleet_s": [s for _, s in ours],
        "qfleet_solved": sum(ok for ok, _ in ours),
        "sb3_s": [s for _, s in theirs],
        "sb3_solved": sum(ok for ok, _ in theirs),
        "ratio": statistics.median(s for _, s in theirs) / statistics.median(s for _, s in ours),
    }
    print(
        f"{row['row']:<28} qfleet {row['qfleet_solved']}/{seeds} solved, median "
        f"{statistics.median(row['qfleet_s']):.1f} s   SB3 {row['sb3_solved']}/{seeds} solved, "
        f"median {statistics.median(row['sb3_s']):.1f} s   ratio {row['ratio']:.2f}"
        + ("" if row["sb3_solved"] == seeds else " or more (SB3 gave up at 50k steps)")
    )
    return row


def _timed(run: Callable[[], bool]) -> tuple[bool, float]:
    start = time.perf_counter()
    return run(), time.perf_counter() - start


EVAL_EVERY = 1000


def _sb3_solves(config: Config, seed: int) -> bool:
    torch.backends.mkldnn.set_flags(True)
    model = sb3_model(config, seed)
    stop = StopTrainingOnRewardThreshold(475.0)
    check = EvalCallback(
        sb3.common.env_util.make_vec_env("CartPole-v1", n_envs=10, seed=1000 + seed),
        callback_on_new_best=stop,
        n_eval_episodes=10,
        eval_freq=EVAL_EVERY,
        verbose=0,
    )
    model.learn(50_000, callback=check)
    return bool(check.best_mean_reward >= 475.0)


def _qfleet_solves(preset: str, seed: int) -> bool:
    config = presets.preset_config(preset).replace(
        seed=seed, eval_freq=EVAL_EVERY, n_eval_episodes=10, target_return=475.0, tensorboard=False
    )
    with tempfile.TemporaryDirectory() as folder:
        trained = qfleet.train(config=config, run_dir=Path(folder) / "run")
    return trained.result.stopped_by == "target_return"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=["zoo", "cleanrl", "pong", "solve"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows = []
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, SB3 {sb3.__version__}")
    solved_by = {"solve": "cartpole", "solve-pqn": "cartpole-pqn"}
    for name in options.rows:
        if name in solved_by:
            rows.append(solve(options.seeds, solved_by[name]))
        else:
            rows.append(globals()[name](options.rounds))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
