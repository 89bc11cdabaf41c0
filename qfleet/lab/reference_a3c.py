"""The actor-critic of A3C in one file: no engine, no interfaces, lists for a rollout, one worker.

Tests compare the ``serial`` engine with it (tests/equivalence); read it after ``reference_pqn.py``.
It shares with the rest of qfleet only the configuration's field names, the random numbers and the
network module; returns are computed by recursion from their definition, and the optimiser is
torch's own. With ``separate_networks``, ``target_update_interval`` 0 and ``sum_gradients`` it is
the worker of the preset ``cartpole-textbook-a3c``.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from qfleet.config.config import Config
from qfleet.core.seeding import Seeds, env_seeds
from qfleet.core.types import EnvSpec
from qfleet.lab.reference_dqn import Row
from qfleet.networks.factory import build_network


def train_reference(config: Config) -> tuple[list[Tensor], list[float]]:
    """Train one worker of A3C (1602.01783); return the weights and the episodes' returns."""
    seeds, count = Seeds.of(config.seed), config.envs
    envs = [gymnasium.make(config.env) for _ in range(count)]
    space = envs[0].action_space
    assert isinstance(space, gymnasium.spaces.Discrete)
    obs_shape = envs[0].observation_space.shape
    assert obs_shape is not None
    torch.manual_seed(seeds.network)
    network = build_network(EnvSpec(config.env, obs_shape, "float32", int(space.n)), config)
    target = copy.deepcopy(network)
    weights = list(network.parameters())
    # The value's own network, if there is one, has a learning rate of its own.
    of_value = [] if network.critic is None else list(network.critic.parameters())
    rates = [config.learning_rate, config.value_learning_rate or config.learning_rate]
    groups = [{"params": weights[: len(weights) - len(of_value)]}, {"params": of_value}]
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    more = {} if config.optimizer == "sgd" else {"eps": config.optimizer_eps}
    optimiser = kinds[config.optimizer](groups, config.learning_rate, **more)

    draws = torch.Generator().manual_seed(seeds.actor)
    chosen_seeds = env_seeds(seeds.envs, count)
    obs = [env.reset(seed=seed)[0] for env, seed in zip(envs, chosen_seeds, strict=True)]
    rows: list[list[Row]] = [[] for _ in envs]
    is_over, episode_returns, returns = [False] * count, [0.0] * count, list[float]()
    length = config.train_freq // count

    for env_steps in range(0, config.steps, length * count):
        # Collect a rollout: ``length`` steps of every env, with actions drawn from the policy.
        for _ in range(length):
            with torch.no_grad():
                logits = network(torch.from_numpy(np.stack(obs)))[:, :-1]
            chance = torch.rand(count, generator=draws)
            actions = (logits.softmax(1).cumsum(1)[:, :-1] <= chance[:, None]).sum(1).tolist()
            for i, env in enumerate(envs):
                if is_over[i]:
                    next_obs, _ = env.reset()
                    rows[i].append(Row(obs[i], actions[i], 0.0, terminated=False, is_reset=True))
                    is_over[i], episode_returns[i] = False, 0.0
                else:
                    next_obs, reward, terminated, truncated, _ = env.step(actions[i])
                    rows[i].append(
                        Row(obs[i], actions[i], float(reward), terminated, is_reset=False)
                    )
                    is_over[i] = terminated or truncated
                    episode_returns[i] += float(reward)
                    if is_over[i]:
                        returns.append(episode_returns[i])
                obs[i] = next_obs

        # The target network, if there is one, moves by τ whenever its interval has passed, or
        # before every gradient.
        now = env_steps + length * count
        interval = config.target_update_interval
        moves = now // interval - env_steps // interval if interval else 1
        moves = moves if config.target_network else 0
        for _ in range(moves):
            for old, new in zip(target.parameters(), weights, strict=True):
                old.data.lerp_(new.data, config.tau)

        # Learn from the rollout, except its newest row, whose next observation is not known yet.
        rows = [own[-length - 1 :] for own in rows]
        critic = target if config.target_network else network
        goals = [_n_step_returns(own, critic, config) for own in rows]
        places = [(i, t) for i, own in enumerate(rows) for t in range(len(own) - 1)]
        places = [(i, t) for i, t in places if not rows[i][t].is_reset]
        output = network(torch.from_numpy(np.stack([rows[i][t].obs for i, t in places])))
        log_policy, value = output[:, :-1].log_softmax(1), output[:, -1]
        goal = torch.tensor([goals[i][t] for i, t in places])
        taken = torch.tensor([rows[i][t].action for i, t in places])
        advantage = (goal - value).detach()
        log_taken = log_policy.gather(1, taken[:, None])[:, 0]
        entropy = -(log_policy.exp() * log_policy).sum(1)
        loss = config.value_weight * (goal - value) ** 2 - advantage * log_taken
        loss = loss - config.entropy_weight * entropy
        left = 1.0 - now / config.steps if config.lr_schedule == "linear" else 1.0
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * left
        optimiser.zero_grad()
        (loss.sum() / (1 if config.sum_gradients else config.batch_size)).backward()
        if config.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm)
        optimiser.step()
    for env in envs:
        env.close()
    return [weight.detach() for weight in weights], returns


def _n_step_returns(rows: list[Row], critic: Any, config: Config) -> list[float]:
    """Return the return of every row but the newest: rewards up to the end of the rollout or the
    episode, then the critic's value."""
    with torch.no_grad():
        values = critic(torch.from_numpy(np.stack([row.obs for row in rows])))[:, -1].tolist()

    def from_row(t: int) -> float:
        row, after = rows[t], rows[t + 1]
        if row.terminated:
            return row.reward
        ends = after.is_reset or t + 2 == len(rows)
        return row.reward + config.gamma * (values[t + 1] if ends else from_row(t + 1))

    return [from_row(t) for t in range(len(rows) - 1)]
