"""Environments of tensors that can be reckoned by hand, and values to act by in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qfleet.agent.device_evaluation import TensorEvaluator
from qfleet.agent.evaluation import Evaluation, GiveUp
from qfleet.core.seeding import env_seeds
from qfleet.core.types import EnvSpec
from qfleet.envs.device.protocol import Outcome, State, TensorEnv

QValues = Callable[[Tensor], Tensor]


class Count(TensorEnv):
    """Counts steps and pays them, every second one in debt; ends at 3 + its start, or by time."""

    spec = EnvSpec("Count", (2,), "float32", 3)
    max_episode_steps = 6

    def begin(self, counters: Tensor) -> State:
        return {"at": torch.zeros_like(counters), "end": 3 + (counters & 7)}

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        at = state["at"] + 1
        sign = torch.where(at % 2 == 0, -1.0, 1.0)
        after = {"at": at, "end": state["end"]}
        return Outcome(after, sign * at * (1.0 + action), at == state["end"])

    def observe(self, state: State) -> Tensor:
        return torch.stack((state["at"], state["end"]), dim=1).float()


class Broken(Count):
    """Has nothing finite to say from its third step on."""

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        after, reward, terminated = super().advance(state, action, counters)
        return Outcome(after, torch.where(after["at"] > 2, torch.nan, reward), terminated)


def scripted(num_actions: int) -> QValues:
    """Values that differ with what is seen, without a network."""
    slopes = torch.linspace(-1.7, 2.3, num_actions)

    def q_values(obs: Tensor) -> Tensor:
        return torch.sin(obs.flatten(1).float().sum(1, keepdim=True) * slopes + slopes)

    return q_values


def constant(best: int, num_actions: int = 3) -> QValues:
    return lambda obs: (torch.arange(num_actions) == best).float().expand(len(obs), -1)


def evaluate_on_device(
    q_values: Callable[[Tensor], Tensor],
    env: TensorEnv,
    episodes: int,
    epsilon: float,
    device: torch.device,
    seed: int,
    give_up: GiveUp = lambda _: False,
    max_steps: int = 125_000,
) -> Evaluation | None:
    seeds = torch.tensor(env_seeds(seed, episodes))
    return TensorEvaluator(q_values, env, seeds, epsilon, device, seed, max_steps).play(give_up)
