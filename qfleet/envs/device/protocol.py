"""Environments as tensors: what one must say, and the episodes that are made of it.

A *tensor environment* is three functions of batched tensors: how episodes begin, what an action
does, what is seen. They neither loop over environments nor ask the host for a value, so that a GPU
can run them inside a recorded graph. ``Episodes`` adds what all environments share: next-step
autoreset, a time limit and random numbers.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from qfleet.core.counter_rng import first_counters, next_counters
from qfleet.core.types import EnvSpec

State: TypeAlias = dict[str, Tensor]
"""Whatever an environment needs to know of itself; every tensor is ``[N, …]``."""


class Outcome(NamedTuple):
    state: State
    reward: Tensor
    """float32 ``[N]``."""
    terminated: Tensor
    """bool ``[N]``."""


class TensorEnv(Protocol):
    """N copies of an environment, all at once. Nothing may be changed in place.

    ``counters`` (int64 ``[N]``) are for ``random.draw_…``: give every draw a lane of its own.
    ``begin`` and ``advance`` of one step get the same counters.
    """

    spec: EnvSpec
    max_episode_steps: int
    """Episodes are truncated after so many steps; 0: never."""

    def begin(self, counters: Tensor) -> State:
        """New episodes."""
        ...

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        """What an action (int64 ``[N]``) does. Called for ended episodes too; then nobody looks."""
        ...

    def observe(self, state: State) -> Tensor:
        """``[N, *spec.obs_shape]`` of ``spec.obs_dtype``."""
        ...


class TensorStep(NamedTuple):
    """As ``core.Step``, on the device."""

    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    opened: Tensor
    """The episode before had ended: this step's action was ignored, ``obs`` opens a new one."""


class Episodes(NamedTuple):
    """N running episodes of an environment: a value, replaced by the next one in every step."""

    inner: State
    counters: Tensor
    steps: Tensor
    """int64 ``[N]``, of the running episode."""
    over: Tensor
    """bool ``[N]``: ended, to be begun anew by the next step."""


def begin_episodes(env: TensorEnv, seeds: Tensor) -> Episodes:
    """One episode per int64 seed ``[N]``, on the seeds' device."""
    counters = first_counters(seeds)
    return Episodes(
        inner=env.begin(counters),
        counters=counters,
        steps=torch.zeros_like(seeds),
        over=torch.zeros_like(seeds, dtype=torch.bool),
    )


def step_episodes(
    env: TensorEnv, episodes: Episodes, action: Tensor
) -> tuple[Episodes, TensorStep]:
    """One step of all; episodes that had ended begin anew instead."""
    counters, opened = next_counters(episodes.counters), episodes.over
    fresh = env.begin(counters)
    moved, reward, terminated = env.advance(episodes.inner, action, counters)
    inner = {name: _choose(opened, fresh[name], moved[name]) for name in moved}
    steps = torch.where(opened, 0, episodes.steps + 1)
    terminated = terminated & ~opened
    truncated = torch.zeros_like(terminated)
    if env.max_episode_steps:
        truncated = (steps >= env.max_episode_steps) & ~terminated
    after = Episodes(inner, counters, steps, terminated | truncated)
    reward = torch.where(opened, 0.0, reward)
    return after, TensorStep(env.observe(inner), reward, terminated, truncated, opened)


def hold_episodes(episodes: Episodes) -> Episodes:
    """The same in memory of its own, for ``copy_episodes``: a place that recorded work knows."""
    inner = {name: tensor.clone() for name, tensor in episodes.inner.items()}
    return Episodes(inner, *(tensor.clone() for tensor in episodes[1:]))


def copy_episodes(held: Episodes, episodes: Episodes) -> None:
    """Take over other episodes' values, in place."""
    for name, tensor in held.inner.items():
        tensor.copy_(episodes.inner[name])
    for tensor, value in zip(held[1:], episodes[1:], strict=True):
        tensor.copy_(value)


def _choose(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *(1 for _ in yes.shape[1:])), yes, no)
