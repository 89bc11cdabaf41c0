"""PQN in one file: no engine, no interfaces, a list of environments, lists for a rollout.

Tests compare the ``serial`` engine with it (tests/equivalence); read it after ``reference_dqn.py``.
It shares with that file ``Row`` and ε, and with the rest of qfleet only the configuration's field
names, the random numbers and the network module. Returns are computed by recursion from their
definition, and the optimiser is torch's own RAdam.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from qfleet.config.config import Config
from qfleet.core.counter_rng import draw_bits, first_counters, next_counters
from qfleet.core.seeding import Seeds, env_seeds
from qfleet.core.types import EnvSpec
from qfleet.lab.reference_dqn import Row, epsilon
from qfleet.networks.factory import build_network


def train_reference(config: Config) -> tuple[list[Tensor], list[float]]:
    """Train PQN (2407.04811) on ``config.envs`` environments; return weights and returns."""
    seeds, count = Seeds.of(config.seed), config.envs
    envs = [gymnasium.make(config.env) for _ in range(count)]
    space = envs[0].action_space
    assert isinstance(space, gymnasium.spaces.Discrete)
    num_actions, obs_shape = int(space.n), envs[0].observation_space.shape
    assert obs_shape is not None
    torch.manual_seed(seeds.network)
    network = build_network(EnvSpec(config.env, obs_shape, "float32", num_actions), config)
    weights = list(network.parameters())
    radam = torch.optim.RAdam(weights, config.learning_rate, eps=config.optimizer_eps)

    draws = np.random.default_rng(seeds.actor)
    shuffling = first_counters(torch.tensor([seeds.memory]))
    chosen_seeds = env_seeds(seeds.envs, count)
    obs = [env.reset(seed=seed)[0] for env, seed in zip(envs, chosen_seeds, strict=True)]
    rows: list[list[Row]] = [[] for _ in envs]
    is_over, episode_returns, returns = [False] * count, [0.0] * count, []
    length = config.train_freq // count

    for env_steps in range(0, config.steps, length * count):
        # Collect a rollout: ``length`` steps of every env.
        chance = draws.random((length, count))
        random_actions = draws.integers(num_actions, size=(length, count))
        for step in range(length):
            with torch.no_grad():
                greedy = network(torch.from_numpy(np.stack(obs))).argmax(1).tolist()
            explore = chance[step] < epsilon(config, env_steps + step * count)
            for i, env in enumerate(envs):
                action = int(random_actions[step, i]) if explore[i] else greedy[i]
                if is_over[i]:
                    next_obs, _ = env.reset()
                    rows[i].append(Row(obs[i], action, 0.0, terminated=False, is_reset=True))
                    is_over[i], episode_returns[i] = False, 0.0
                else:
                    next_obs, reward, terminated, truncated, _ = env.step(action)
                    rows[i].append(Row(obs[i], action, float(reward), terminated, is_reset=False))
                    is_over[i] = terminated or truncated
                    episode_returns[i] += float(reward)
                    if is_over[i]:
                        returns.append(episode_returns[i])
                obs[i] = next_obs

        # Learn from the rollout, except its newest row, whose next observation is not known yet.
        rows = [own[-length - 1 :] for own in rows]
        goals = [_lambda_returns(own, network, config) for own in rows]
        done = (env_steps + length * count) / config.steps
        radam.param_groups[0]["lr"] = config.learning_rate * (1.0 - done)
        shuffling = next_counters(shuffling)
        order = _order(config, length, shuffling)
        for start in range(0, len(order), config.batch_size):
            picks = order[start : start + config.batch_size]
            # Rows are counted from the oldest one; the first rollout has one row less.
            missing = length + 1 - len(rows[0])
            places = [(pick % count, pick // count - missing) for pick in picks]
            places = [(i, row) for i, row in places if row >= 0 and not rows[i][row].is_reset]
            q = network(torch.from_numpy(np.stack([rows[i][row].obs for i, row in places])))
            actions = torch.tensor([rows[i][row].action for i, row in places])
            goal = torch.tensor([goals[i][row] for i, row in places])
            error = q.gather(1, actions[:, None])[:, 0] - goal
            loss = 0.5 * (error**2).sum() / config.batch_size
            radam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm)
            radam.step()
    for env in envs:
        env.close()
    return [weight.detach() for weight in weights], returns


def _lambda_returns(rows: list[Row], network: Any, config: Config) -> list[float]:
    """Return the λ-return of every row but the newest."""
    with torch.no_grad():
        values = network(torch.from_numpy(np.stack([row.obs for row in rows]))).amax(1).tolist()

    def from_row(t: int) -> float:
        row, after = rows[t], rows[t + 1]
        if row.terminated:
            return row.reward
        ahead: float = values[t + 1]
        if not after.is_reset and t + 2 < len(rows):
            ahead = (1 - config.td_lambda) * ahead + config.td_lambda * from_row(t + 1)
        return row.reward + config.gamma * ahead

    return [from_row(t) for t in range(len(rows) - 1)]


def _order(config: Config, length: int, counter: Tensor) -> list[int]:
    """Return indices row · envs + env, each once per epoch, shuffled by sorting random numbers."""
    epochs = config.gradient_steps * config.batch_size // config.train_freq
    of_each = first_counters(counter + torch.arange(length * config.envs))
    keys = [draw_bits(of_each, epoch).numpy() for epoch in range(epochs)]
    return [pick for own in keys for pick in np.argsort(own, kind="stable").tolist()]
