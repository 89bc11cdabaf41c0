"""The interface of tensor environments, and episodes on top of it.

A *tensor environment* is three functions of batched tensors: ``begin`` starts episodes, ``advance``
applies an action, ``observe`` returns the observation. They neither loop over environments nor
synchronise with the host, so that a GPU can run them inside a recorded graph. ``Episodes`` adds the
common parts: next-step autoreset, a time limit and random numbers.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from qfleet.core.counter_rng import first_counters, next_counters
from qfleet.core.types import EnvSpec

State: TypeAlias = dict[str, Tensor]
"""The state of N environments; every tensor is ``[N, …]``."""


class Outcome(NamedTuple):
    state: State
    reward: Tensor
    """float32 ``[N]``."""
    terminated: Tensor
    """bool ``[N]``."""


class TensorEnv(Protocol):
    """An environment whose functions step N copies at once. No tensor may be changed in place.

    ``counters`` (int64 ``[N]``) are for ``draw_uniform`` and ``draw_below`` (``core.counter_rng``):
    use a different lane for every draw. ``begin`` and ``advance`` of one step get the same
    counters.
    """

    spec: EnvSpec
    max_episode_steps: int
    """Number of steps after which episodes are truncated; 0: never."""

    def begin(self, counters: Tensor) -> State:
        """Return the state of N new episodes."""
        ...

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        """Apply an action (int64 ``[N]``). The result for episodes that have ended is ignored."""
        ...

    def observe(self, state: State) -> Tensor:
        """Return the observations ``[N, *spec.obs_shape]`` of ``spec.obs_dtype``."""
        ...


class TensorStep(NamedTuple):
    """A step of N environments: like ``core.Step``, but on the device."""

    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    opened: Tensor
    """The previous episode had ended: this step's action was ignored, ``obs`` starts a new one."""


class Episodes(NamedTuple):
    """N running episodes of an environment; immutable, every step returns a new value."""

    inner: State
    counters: Tensor
    steps: Tensor
    """int64 ``[N]``: steps of the running episode."""
    over: Tensor
    """bool ``[N]``: the episode has ended; the next step starts a new one."""


def begin_episodes(env: TensorEnv, seeds: Tensor) -> Episodes:
    """Start one episode per int64 seed ``[N]``, on the seeds' device."""
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
    """Step all episodes; those that had ended start a new episode instead."""
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
    """Return a copy at fixed addresses, which recorded graphs use; ``copy_episodes`` updates it."""
    inner = {name: tensor.clone() for name, tensor in episodes.inner.items()}
    return Episodes(inner, *(tensor.clone() for tensor in episodes[1:]))


def copy_episodes(held: Episodes, episodes: Episodes) -> None:
    """Copy the values of ``episodes`` into ``held``, in place."""
    for name, tensor in held.inner.items():
        tensor.copy_(episodes.inner[name])
    for tensor, value in zip(held[1:], episodes[1:], strict=True):
        tensor.copy_(value)


def _choose(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *(1 for _ in yes.shape[1:])), yes, no)
