"""DQN in one file: no engine, no interfaces, one environment, a list as replay memory.

Tests compare the ``serial`` engine with it, bit for bit (tests/equivalence); it is the place to
start reading. It shares with the rest of qfleet only the configuration's field names, the
derivation of seeds and the network module: the bits agree only if the same products are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.agent.inference import make_greedy
from qfleet.agent.updaters.optimisers import VECTOR_FLOATS
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds, env_seeds
from qfleet.core.types import EnvSpec
from qfleet.networks.factory import build_network


@dataclass
class Row:
    """One call of the environment. ``is_reset`` marks the call after an episode's end, which only
    returns the first observation of the next episode; ``obs`` is the final one of the old."""

    obs: NDArray[np.float32]
    action: int
    reward: float
    terminated: bool
    is_reset: bool


def train_reference(config: Config) -> tuple[list[Tensor], list[float]]:
    """Train plain DQN (Mnih 2015) on one environment; return the weights and the returns."""
    seeds = Seeds.of(config.seed)
    env = gymnasium.make(config.env)
    assert isinstance(env.action_space, gymnasium.spaces.Discrete)
    num_actions = int(env.action_space.n)
    obs_shape = env.observation_space.shape
    assert obs_shape is not None
    spec = EnvSpec(config.env, obs_shape, "float32", num_actions)
    online, target = new_network(spec, config, seeds), new_network(spec, config, seeds)
    # One vector holds all weights, so that Adam is one kernel; the network has views of it. It is
    # padded to whole vector registers, because that kernel rounds a remainder differently.
    shapes = [weight.shape for weight in online.parameters()]
    flat = torch.cat([weight.detach().reshape(-1) for weight in online.parameters()])
    size = len(flat)
    flat = torch.nn.functional.pad(flat, (0, -size % VECTOR_FLOATS))
    for weight, view in zip(online.parameters(), _cut(flat[:size], shapes), strict=True):
        weight.data = view
    weights = list(online.parameters())
    flat.grad = torch.zeros_like(flat)
    gradient = flat.grad[:size]
    adam = torch.optim.Adam(
        [flat.requires_grad_()], config.learning_rate, eps=config.optimizer_eps, fused=True
    )
    greedy = make_greedy(online, torch.device("cpu"))

    draws = np.random.default_rng(seeds.actor)
    sampling = torch.Generator().manual_seed(seeds.memory)
    obs, _ = env.reset(seed=env_seeds(seeds.envs, 1)[0])
    rows: list[Row] = []
    env_steps = updates = target_updates = 0
    is_over, episode_return, returns = False, 0.0, []

    while env_steps < config.steps:
        # Collect train_freq steps.
        count = min(config.train_freq, config.steps - env_steps)
        chance = draws.random((count, 1))
        random_actions = draws.integers(num_actions, size=(count, 1))
        for step in range(count):
            if chance[step, 0] < epsilon(config, env_steps):
                action = int(random_actions[step, 0])
            else:
                action = int(greedy(obs[None])[0])
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

        # Learn gradient_steps batches for every train_freq steps.
        bursts = (env_steps - config.learning_starts) // config.train_freq
        owed = bursts * config.gradient_steps - updates
        if owed <= 0:
            continue
        due = env_steps // config.target_update_interval - target_updates
        if due > 0:
            target_updates += due
            move = 1.0 if config.tau == 1.0 else 1.0 - (1.0 - config.tau) ** due
            with torch.no_grad():
                for old, new in zip(target.parameters(), weights, strict=True):
                    old.copy_(new) if move == 1.0 else old.lerp_(new, move)
        picks = draw_rows(rows, owed * config.batch_size, sampling)
        goals = _targets(rows, picks, target, config.gamma)
        for k in range(owed):
            part = slice(k * config.batch_size, (k + 1) * config.batch_size)
            batch = [rows[i] for i in picks[part]]
            q = online(torch.from_numpy(np.stack([row.obs for row in batch])))
            taken = q.gather(1, torch.tensor([row.action for row in batch])[:, None])[:, 0]
            loss = torch.nn.functional.huber_loss(taken, goals[part])
            grads = torch.autograd.grad(loss, weights)
            torch.cat([grad.reshape(-1) for grad in grads], out=gradient)
            if config.max_grad_norm:
                norm = float(torch.linalg.vector_norm(gradient))
                if norm > config.max_grad_norm:
                    gradient.mul_(config.max_grad_norm / (norm + 1e-6))
            adam.step()
            updates += 1
    env.close()
    return [w.detach() for w in weights], returns


def new_network(spec: EnvSpec, config: Config, seeds: Seeds) -> Any:
    torch.manual_seed(seeds.network)
    return build_network(spec, config)


def epsilon(config: Config, env_steps: int) -> float:
    done = env_steps / config.steps
    if done >= config.exploration_fraction:
        return config.exploration_final_eps
    fall = config.exploration_final_eps - config.exploration_initial_eps
    return config.exploration_initial_eps + done * fall / config.exploration_fraction


def draw_rows(rows: list[Row], count: int, generator: torch.Generator) -> list[int]:
    """Draw rows uniformly from those with a successor; reset rows are drawn again."""
    picks = torch.randint(len(rows) - 1, (count,), generator=generator).tolist()
    while any(rows[i].is_reset for i in picks):
        others = torch.randint(len(rows) - 1, (count,), generator=generator).tolist()
        picks = [o if rows[i].is_reset else i for i, o in zip(picks, others, strict=True)]
    return picks


def _targets(rows: list[Row], picks: list[int], target: Any, gamma: float) -> Tensor:
    """Return r + γ max Q(s'); s' is the observation of the next row, even of a reset row."""
    with torch.no_grad():
        values = target(torch.from_numpy(np.stack([rows[i + 1].obs for i in picks]))).amax(1)
    reward = torch.tensor([rows[i].reward for i in picks])
    discount = torch.tensor([0.0 if rows[i].terminated else gamma for i in picks])
    return torch.addcmul(reward, discount, values)


def _cut(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
