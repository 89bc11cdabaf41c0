"""Evaluation: a policy, environments of its own, and the unclipped returns it earns there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from qfleet.agent.inference import make_greedy
from qfleet.core.types import VectorEnv
from qfleet.networks.qnetwork import QNetwork

# An env without a time limit and a policy that never fails would otherwise play for ever.
# Atari's own limit at the usual frame skip: 108,000 frames.
LONGEST_EPISODE = 27_000


@dataclass
class Evaluation:
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        return float(np.std(self.returns))

    @property
    def mean_length(self) -> float:
        return float(np.mean(self.lengths))


def evaluate_policy(
    network: QNetwork,
    envs: VectorEnv,
    episodes: int,
    epsilon: float,
    device: torch.device,
    seed: int,
    give_up: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Play ``episodes`` episodes from the envs' own seeds, greedily but for ``epsilon``.

    None if ``give_up``, asked at every step, said yes before the end.

    Each env plays a fixed share, so that short episodes are not counted more often than long ones.
    """
    random = np.random.default_rng(seed)
    n, num_actions = envs.num_envs, envs.spec.num_actions
    share = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    finished = np.zeros(n, dtype=np.int64)
    returns, lengths = np.zeros(n), np.zeros(n, dtype=np.int64)
    results: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    was_training = network.training
    network.eval()
    obs = envs.reset()
    greedy = make_greedy(network, device, obs.shape)
    try:
        while (finished < share).any():
            if give_up():
                return None
            actions = greedy(obs)
            if epsilon > 0:
                explore = random.random(n) < epsilon
                actions = np.where(explore, random.integers(num_actions, size=n), actions)
            step = envs.step(actions)
            obs = step.obs
            returns += step.reward
            lengths += 1
            endless = lengths >= LONGEST_EPISODE
            done = step.terminated | step.truncated | endless
            for env in done.nonzero()[0]:
                if finished[env] < share[env]:
                    results[env].append((float(returns[env]), int(lengths[env])))
                    finished[env] += 1
            over = step.fresh | endless
            returns[over] = 0.0
            lengths[over] = 0
    finally:
        network.train(was_training)
    flat = [result for env_results in results for result in env_results]
    return Evaluation([r for r, _ in flat], [length for _, length in flat])
