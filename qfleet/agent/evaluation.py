"""Evaluation: unclipped returns of a policy in separate environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from qfleet.agent.inference import make_greedy
from qfleet.config.config import Config
from qfleet.core.types import VectorEnv
from qfleet.envs.factory import make_envs
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.faults import FaultLog

LONGEST_EPISODE = 27_000
"""Steps after which an episode is cut: without a time limit, a policy that never fails would play
for ever. It is Atari's limit of 108,000 frames at the usual frame skip."""

MOST_ENVS = 16
"""Most environments on the host that play an evaluation together."""


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
    """Play ``episodes`` episodes from the envs' own seeds, greedily except with ``epsilon``.

    Return None if ``give_up``, called at every step, returned True before the end.

    Each env plays a fixed share, so that short episodes are not counted more often than long ones.
    """
    random = np.random.default_rng(seed)
    n, num_actions = envs.num_envs, envs.spec.num_actions
    share = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    returns, lengths = np.zeros(n), np.zeros(n, dtype=np.int64)
    finished = np.zeros(n, dtype=np.int64)
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


class HostEvaluator:
    """Plays the evaluations of a run on the host. The first one makes its environments."""

    def __init__(
        self, config: Config, network: QNetwork, device: torch.device, seed: int, faults: FaultLog
    ) -> None:
        self._config, self._network, self._device = config, network, device
        self._seed, self._faults = seed, faults
        self._envs: VectorEnv | None = None

    def play(self, give_up: Callable[[], bool]) -> Evaluation | None:
        """Return the episodes; None if ``give_up`` returned True before their end."""
        config, episodes = self._config, self._config.n_eval_episodes
        if self._envs is None:
            count = min(episodes, MOST_ENVS)
            self._envs = make_envs(config, count, self._seed, training=False, on_fault=self._faults)
        network, epsilon = self._network, config.eval_eps
        return evaluate_policy(
            network, self._envs, episodes, epsilon, self._device, self._seed, give_up
        )

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
