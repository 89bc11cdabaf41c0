"""Evaluation: unclipped returns of a policy in separate environments."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from qfleet.agent.actor import draw_actions, legal_actions
from qfleet.agent.inference import make_greedy
from qfleet.config.config import Config, parse_json_object
from qfleet.core.errors import ConfigError, EnvironmentFault
from qfleet.core.types import EnvSpec, VectorEnv
from qfleet.envs.factory import make_envs
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.faults import FaultLog

LONGEST_EPISODE = 27_000
"""Steps after which an episode is cut: without a time limit, a policy that never fails would play
for ever. It is Atari's limit of 108,000 frames at the usual frame skip."""

MOST_ENVS = 16
"""Most environments on the host that play an evaluation together."""

GiveUp: TypeAlias = Callable[[int], bool | None]
"""Called with the number of finished episodes; True ends the evaluation without a result."""


def longest_share(max_steps: int, envs: int) -> int:
    """Return the steps that each env may make: all envs step together, at least once."""
    return max(1, max_steps // envs)


@dataclass
class Evaluation:
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    unfinished: int = 0
    """Episodes that the limit of steps ended; they count with their return and length so far."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        return float(np.std(self.returns))

    @property
    def mean_length(self) -> float:
        return float(np.mean(self.lengths))

    def why_ended(self, episodes: int, max_steps: int) -> str | None:
        """Return a line if the limit of steps ended the evaluation, which had ``episodes``."""
        not_begun = episodes - len(self.returns)
        if not self.unfinished and not not_begun:
            return None
        also = f" and {not_begun} not begun" if not_begun else ""
        return (
            f"evaluation stopped after {max_steps} steps with {self.unfinished} of {episodes} "
            f"episodes unfinished{also}; their returns so far count (--eval-max-steps)"
        )


def evaluate_policy(
    network: QNetwork,
    envs: VectorEnv,
    episodes: int,
    epsilon: float,
    device: torch.device,
    seed: int,
    max_steps: int,
    give_up: GiveUp = lambda _: False,
    faults: FaultLog | None = None,
    max_restarts: int = 0,
) -> Evaluation | None:
    """Play ``episodes`` episodes from the envs' own seeds, greedily except with ``epsilon``.

    Return None if ``give_up``, called at every step, returned True before the end.

    Each env plays a fixed share, so that short episodes are not counted more often than long ones.
    After ``max_steps`` steps of all envs, episodes that have begun count with their return so far.
    More than ``max_restarts`` of an env without a finished episode raise EnvironmentFault with the
    newest of ``faults``: an env that fails in every episode would never finish its share.
    """
    random = np.random.default_rng(seed)
    n, spec = envs.num_envs, envs.spec
    share = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    returns, lengths = np.zeros(n), np.zeros(n, dtype=np.int64)
    finished, restarts = np.zeros((2, n), dtype=np.int64)
    ended = np.zeros(n, dtype=np.bool_)
    results: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    was_training = network.training
    network.eval()
    rows, max_rows, stopped = 0, longest_share(max_steps, n), 0
    obs = envs.reset()
    greedy = make_greedy(network, device, obs.shape)
    try:
        while (finished < share).any() and rows < max_rows:
            if give_up(int(finished.sum())):
                return None
            actions = greedy(obs)
            if epsilon > 0:
                explore = random.random(n) < epsilon
                anything = legal_actions(spec, obs, draw_actions(spec, random, n))
                actions = np.where(explore, anything, actions)
            step = envs.step(actions)
            obs = step.obs
            returns += step.reward
            lengths += 1
            rows += 1
            endless = lengths >= LONGEST_EPISODE
            # Every env starts anew after an episode's end; at another time after a fault.
            restarts += step.fresh & ~ended & (finished < share)
            if faults is not None and (count := int(restarts.max())) > max_restarts:
                raise EnvironmentFault(
                    f"{faults.newest} (restart {count} in an evaluation without a finished episode,"
                    f" more than max_env_restarts {max_restarts}); fix it or raise max_env_restarts"
                )
            ended = step.terminated | step.truncated
            done = ended | endless
            restarts[done] = 0
            for env in done.nonzero()[0]:
                if finished[env] < share[env]:
                    results[env].append((float(returns[env]), int(lengths[env])))
                    finished[env] += 1
                    if not ended[env]:  # the env plays on, so that it begins no other episode
                        stopped += 1
                        share[env] = finished[env]
            over = step.fresh | endless
            returns[over] = 0.0
            lengths[over] = 0
    finally:
        network.train(was_training)
    cut = ((finished < share) & ~done & (lengths > 0)).nonzero()[0]
    for env in cut:
        results[env].append((float(returns[env]), int(lengths[env])))
    flat = [result for env_results in results for result in env_results]
    return Evaluation([r for r, _ in flat], [length for _, length in flat], len(cut) + stopped)


def evaluation_config(config: Config) -> Config:
    """Return the configuration with the environment of evaluations."""
    kwargs = {} if config.eval_env else config.json_object("env_kwargs")
    kwargs |= parse_json_object("eval_env_kwargs", config.eval_env_kwargs)
    return config.replace(env=config.eval_env or config.env, env_kwargs=kwargs)


def check_evaluation_env(config: Config, spec: EnvSpec) -> None:
    """Raise ConfigError if evaluations have an environment of their own with other spaces."""
    own = evaluation_config(config)
    if own.env == config.env and own.json_object("env_kwargs") == config.json_object("env_kwargs"):
        return
    with contextlib.closing(make_envs(own, 1, 0, training=False, on_fault=FaultLog())) as envs:
        other = dataclasses.replace(envs.spec, env_id=spec.env_id)
    for name in (column.name for column in dataclasses.fields(spec)):
        if getattr(other, name) != getattr(spec, name):
            raise ConfigError(
                f"the environment of evaluations has {name} {getattr(other, name)!r}, that of "
                f"training {getattr(spec, name)!r}; correct eval_env or eval_env_kwargs"
            )


class HostEvaluator:
    """Plays the evaluations of a run on the host. The first one makes its environments."""

    def __init__(
        self,
        config: Config,
        network: QNetwork,
        device: torch.device,
        seed: int,
        faults: FaultLog,
        apart: bool = False,
    ) -> None:
        """``apart``: as for ``make_envs``."""
        self._config, self._network, self._device = config, network, device
        self._seed, self._faults, self._apart = seed, faults, apart
        self._envs: VectorEnv | None = None

    def play(self, give_up: GiveUp) -> Evaluation | None:
        """Return the episodes; None if ``give_up`` returned True before their end."""
        config, episodes = self._config, self._config.n_eval_episodes
        if self._envs is None:
            own, count = evaluation_config(config), min(episodes, MOST_ENVS)
            self._envs = make_envs(
                own, count, self._seed, training=False, on_fault=self._faults, apart=self._apart
            )
        envs, epsilon, max_steps = self._envs, config.eval_eps, config.eval_max_steps
        return evaluate_policy(
            self._network, envs, episodes, epsilon, self._device, self._seed, max_steps, give_up,
            self._faults, config.max_env_restarts,
        )  # fmt: skip

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
