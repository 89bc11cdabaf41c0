"""One worker of asynchronous double Q-learning in one file, as in cartpole-textbook-double-q.

The worker repeats: pull, move the target network, draw a batch, compute its gradient, push.

A single worker is its own server, so pulling and pushing cost nothing here. Tests compare the
``serial`` engine with it (tests/equivalence); read it after ``reference_dqn.py``.
"""

from __future__ import annotations

import gymnasium
import numpy as np
import torch
from torch import Tensor

from qfleet.agent.inference import make_greedy
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds, env_seeds
from qfleet.core.types import EnvSpec
from qfleet.lab.reference_dqn import Row, draw_rows, epsilon, new_network


def train_reference(config: Config) -> tuple[list[Tensor], list[float]]:
    """Train one worker with plain SGD; return the weights and the episodes' returns."""
    seeds = Seeds.of(config.seed)
    env = gymnasium.make(config.env)
    assert isinstance(env.action_space, gymnasium.spaces.Discrete)
    num_actions = int(env.action_space.n)
    obs_shape = env.observation_space.shape
    assert obs_shape is not None
    spec = EnvSpec(config.env, obs_shape, "float32", num_actions)
    online, target = new_network(spec, config, seeds), new_network(spec, config, seeds)
    weights = list(online.parameters())
    greedy = make_greedy(online, torch.device("cpu"))

    draws = np.random.default_rng(seeds.actor)
    sampling = torch.Generator().manual_seed(seeds.memory)
    obs, _ = env.reset(seed=env_seeds(seeds.envs, 1)[0])
    rows: list[Row] = []
    env_steps = updates = 0
    is_over, episode_return, returns = False, 0.0, list[float]()

    while env_steps < config.steps:
        # Collect train_freq steps with the current weights.
        count = min(config.train_freq, config.steps - env_steps)
        chance = draws.random((count, 1))
        random_actions = draws.integers(num_actions, size=(count, 1))
        for step in range(count):
            is_random = chance[step, 0] < epsilon(config, env_steps)
            action = int(random_actions[step, 0]) if is_random else int(greedy(obs[None])[0])
            if is_over:
                next_obs, _ = env.reset()
                rows.append(Row(obs, action, 0.0, terminated=False, is_reset=True))
                is_over, episode_return = False, 0.0
            else:
                next_obs, reward, terminated, truncated, _ = env.step(action)
                rows.append(Row(obs, action, float(reward), terminated, is_reset=False))
                is_over = terminated or truncated
                episode_return += float(reward)
                if is_over:
                    returns.append(episode_return)
            obs = next_obs
            env_steps += 1
        rows = rows[-config.buffer_size :]

        owed = (env_steps - config.learning_starts) // config.train_freq - updates
        for _ in range(owed):
            # 1. Pull w: the weights are here already. 2. Move the target network, once per pull.
            with torch.no_grad():
                for old, new in zip(target.parameters(), weights, strict=True):
                    old.lerp_(new, config.tau)
            # 3. Draw b transitions; ŷ = r + γ Q(s', argmax Q(s', ·; w); w⁻).
            picks = draw_rows(rows, config.batch_size, sampling)
            now, after = (
                torch.from_numpy(np.stack([rows[i + ahead].obs for i in picks])) for ahead in (0, 1)
            )
            with torch.no_grad():
                best = online(after).argmax(1, keepdim=True)
                value = target(after).gather(1, best)[:, 0]
            lives = torch.tensor([float(not rows[i].terminated) for i in picks])
            goal = torch.tensor([rows[i].reward for i in picks]) + config.gamma * lives * value
            # L = 1/(2b) Σ (Q(s, a; w) − ŷ)².
            taken = online(now).gather(1, torch.tensor([[rows[i].action] for i in picks]))[:, 0]
            loss = (taken - goal).square().sum() / (2 * config.batch_size)
            gradients = torch.autograd.grad(loss, weights)
            # 4. Push g; the server applies w ← w − α g at once.
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.sub_(config.learning_rate * gradient)
            updates += 1
    env.close()
    return [weight.detach() for weight in weights], returns
