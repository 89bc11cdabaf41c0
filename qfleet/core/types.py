"""The data types that flow through qfleet, and the interfaces of its components. Read this first.

    env ──► actor ──► memory ──► learner ──► updater ──► weights ──► actor

An actor turns environment steps into *blocks*, a memory turns blocks into *batches*, a learner
turns batches into gradients, an updater turns gradients into weights, and a weights channel brings
a version of the weights back to the actors. An engine decides in which thread, process and device
each of them runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.accelerator.compiling import Compilable

# Row flags, one byte per row. A memory needs to know nothing else about episodes.
TERMINATED = 1
"""The action ended the task: all later states have value 0, so targets do not bootstrap."""
SKIP = 2
"""The row holds no usable transition (the autoreset row after an episode's end, a faulty step). Its
observation is valid, so earlier rows bootstrap from it, but it is never sampled as a start."""
FIRST = 4
"""The observation is the first of an episode: frame stacks must not include earlier rows."""

AnyArray = TypeVar("AnyArray", NDArray[Any], Tensor)
StateDict: TypeAlias = dict[str, Any]
"""Checkpoint state: only tensors and JSON values (numbers, strings, lists, dicts)."""


@dataclass(frozen=True)
class EnvSpec:
    """The interface of an environment: its observations and actions."""

    env_id: str
    obs_shape: tuple[int, ...]
    """Shape of the observation the network sees, e.g. ``(4, 84, 84)``; ``()`` for discrete ones."""
    obs_dtype: str
    """``uint8``, ``float32`` or ``int64`` (discrete observations, one-hot encoded by networks)."""
    num_actions: int
    frame_stack: int = 1
    """Number of frames stacked along the first axis of an observation; 1: no stack."""
    frame_skip: int = 1
    """Emulator frames per env step."""
    num_obs_values: int = 0
    """Number of values of a discrete observation; 0 for boxes."""
    first_obs_value: int = 0
    """The environment's own number for discrete observation 0."""
    first_action: int = 0
    """The environment's own number for action 0."""
    raw_obs: str = ""
    raw_actions: str = ""
    """The environment's own spaces, as JSON, where observations or actions are converted."""
    unmasked_shape: tuple[int, ...] | None = None
    """Shape of the observation itself if masks of legal actions come with it, else None.

    Everything but networks and saved policies then handles *masked* observations: every frame is
    flattened and followed by its mask, one entry per action that is 0 for illegal ones. So masks
    are stored, copied and sent like observations, and the next mask is that of the next row."""

    @property
    def is_masked(self) -> bool:
        return self.unmasked_shape is not None

    @property
    def unmasked(self) -> EnvSpec:
        """The spec of the observations without masks."""
        if self.unmasked_shape is None:
            return self
        return replace(self, obs_shape=self.unmasked_shape, unmasked_shape=None)

    @property
    def spaces(self) -> str:
        """Observations and actions in words."""
        obs = f"{self.num_obs_values or self.unmasked.obs_shape} {self.obs_dtype}"
        return f"{obs} and {self.num_actions} actions{' with masks' if self.is_masked else ''}"

    def with_masks(self) -> EnvSpec:
        """Return the spec of the same observations with masks."""
        stack = (self.frame_stack,) if self.frame_stack > 1 else ()
        shape = (*stack, math.prod(self.frame_shape) + self.num_actions)
        return replace(self, obs_shape=shape, unmasked_shape=self.obs_shape)

    def unmask(self, obs: AnyArray) -> AnyArray:
        """Return the observations ``[B, *unmasked_shape]`` in masked ones."""
        assert self.unmasked_shape is not None
        bare: AnyArray = obs[..., : -self.num_actions]
        return bare.reshape(obs.shape[0], *self.unmasked_shape)

    def legal(self, obs: AnyArray) -> AnyArray:
        """Return which actions are legal, bool ``[B, actions]``, by masked observations."""
        newest = obs[:, -1] if self.frame_stack > 1 else obs
        legal: AnyArray = newest[:, -self.num_actions :] != 0
        return legal

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of what a memory stores per row: one frame, even if observations are stacks."""
        return self.obs_shape if self.frame_stack == 1 else self.obs_shape[1:]

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64}[
            self.obs_dtype
        ]


class Step(NamedTuple):
    """What one call of a vector environment returns; every array is ``[N]`` or ``[N, ...]``."""

    obs: NDArray[Any]
    reward: NDArray[Any]
    """Unclipped."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    invalid: NDArray[np.bool_]
    """The row holds no usable transition: an autoreset row or a faulty step."""
    fresh: NDArray[np.bool_]
    """``obs`` is the first of a new episode."""
    life_lost: NDArray[np.bool_] | None = None
    """A life was lost, which ends the task for learning but not the game (episodic life)."""


class VectorEnv(Protocol):
    """N environments stepped together, with next-step autoreset.

    After an episode ends, the next call ignores that env's action and returns the first
    observation of its next episode, with ``invalid`` and ``fresh`` set.
    """

    spec: EnvSpec
    num_envs: int
    seeds: list[int]
    in_background: bool
    """Whether a step runs in the background between ``send`` and ``recv``."""

    def reset(self) -> NDArray[Any]: ...

    def step(self, actions: NDArray[np.int64]) -> Step:
        """``send``, then ``recv``."""
        ...

    def send(self, actions: NDArray[np.int64]) -> None:
        """Start a step of all envs without waiting for it. ``actions`` may be changed afterwards.

        Only one step can be in flight. Until its ``recv``, only ``close`` may be called.
        """
        ...

    def recv(self) -> Step:
        """Wait for the step that ``send`` has started.

        The next call of ``send`` or ``reset`` may overwrite the returned arrays.
        """
        ...

    def state_dict(self) -> StateDict | None:
        """Return the envs' exact state, or None if they do not support it."""
        ...

    def load_state_dict(self, state: StateDict) -> None: ...

    def close(self) -> None: ...


@dataclass
class Clock:
    """The counters of a run's progress, part of the checkpoint; schedules are functions of them.

    ``env_steps`` counts all steps of every env, including the autoreset step, so that engines with
    environments on a device know the count without synchronising with the device.
    """

    env_steps: int = 0
    updates: int = 0
    frame_skip: int = 1
    elsewhere_env_steps: int = 0
    """Env steps of the run's other workers, as far as they are known to this process."""

    @property
    def progress(self) -> int:
        """Env steps of the whole run, which all schedules depend on."""
        return self.env_steps + self.elsewhere_env_steps

    @property
    def frames(self) -> int:
        return self.env_steps * self.frame_skip


@dataclass
class Block:
    """Time-major rows ``[T, N]``: T steps of N envs."""

    obs: Tensor
    """``[T, N, *frame_shape]``: observation of each action (of a stack, its newest frame)."""
    action: Tensor
    """int64 ``[T, N]``."""
    reward: Tensor
    """float32 ``[T, N]``, clipped if ``clip_rewards`` is set."""
    flags: Tensor
    """uint8 ``[T, N]``: TERMINATED | SKIP | FIRST."""
    version: int = 0
    """Version of the weights that chose the actions."""
    probability: Tensor | None = None
    """float32 ``[T, N]``: that of each action under the policy that acted; only if recorded."""

    @property
    def rows(self) -> int:
        return self.action.shape[0]


@dataclass
class Batch:
    """Samples to learn from, ``[B, ...]``. γ and n are already applied; losses do not need them."""

    obs: Tensor
    action: Tensor
    """int64 ``[B]``."""
    reward: Tensor
    """n-step sum of discounted rewards, float32 ``[B]``."""
    discount: Tensor
    """γ^k for a bootstrap k steps later; 0 if the task terminated, but not if it was truncated."""
    next_obs: Tensor
    weight: Tensor
    """Importance weight; ones unless replay is prioritised."""
    index: Tensor
    """Flat index of each sample in its memory, for priority updates."""

    def __len__(self) -> int:
        return self.action.shape[0]

    def split(self, size: int) -> list[Batch]:
        """Split the samples of a burst of updates into batches of ``size``."""
        columns = zip(*(getattr(self, name).split(size) for name in BATCH_FIELDS), strict=True)
        return [Batch(*column) for column in columns]

    def copy_(self, other: Batch) -> None:
        """Copy another batch's values into this one, in place."""
        for name in BATCH_FIELDS:
            getattr(self, name).copy_(getattr(other, name))

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in BATCH_FIELDS))


BATCH_FIELDS = ("obs", "action", "reward", "discount", "next_obs", "weight", "index")


class Memory(Protocol):
    """A memory that stores blocks and samples batches."""

    device: torch.device

    def extend(self, block: Block) -> None: ...

    def can_sample(self) -> bool: ...

    def sample(self, count: int, beta: float | Tensor) -> Batch:
        """Draw ``count`` transitions; ``beta`` is the importance-weight exponent."""
        ...

    def update_priorities(self, index: Tensor, priority: Tensor) -> None: ...

    def generators(self) -> list[torch.Generator]:
        """Return the random generators that sampling uses."""
        ...

    def compilables(self) -> list[Compilable]:
        """Return the functions that torch.compile may be switched on for."""
        ...

    def end_open_episodes(self) -> None:
        """Mark the newest rows as the end of their episodes, because their envs cannot continue."""
        ...

    def close(self) -> None:
        """Close files; the memory must not be used afterwards."""
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class Updater(Protocol):
    """The rule that turns gradients into new weights. It owns the optimiser."""

    def before_gradient(self) -> None:
        """Called right before the gradient of a batch is computed."""
        return

    def apply(
        self, learning_rate: float | Tensor, loss: Callable[[], Tensor] | None = None
    ) -> Mapping[str, Tensor | float]:
        """Turn the gradient in the flat weights' buffer into new weights; return metrics.

        ``loss`` returns the loss of the gradient, for updaters that check it for outliers.

        A non-finite gradient changes no state and sets metric ``skipped`` to 1.
        """
        ...

    def compilables(self) -> list[Compilable]:
        """Return the functions that torch.compile may be switched on for."""
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class Lag:
    """Statistics of the lag, in updates, of the acting weights behind the learner's weights."""

    def __init__(self) -> None:
        self.largest = 0
        self._sum = self._blocks = 0

    def record(self, updates: int) -> None:
        self.largest = max(self.largest, updates)
        self._sum += updates
        self._blocks += 1

    @property
    def mean(self) -> float | None:
        return self._sum / self._blocks if self._blocks else None


class WeightsChannel(Protocol):
    """The channel that brings a *version* of the weights to the actors."""

    lag: Lag
    """By how many updates the weights of each block were behind when it was stored."""

    def publish(self, version: int) -> None:
        """Publish the weights as ``version``; the learner calls this after updates."""
        ...

    def restart(self, version: int) -> None:
        """Publish weights restored from a checkpoint; no actor may use older ones afterwards."""
        ...

    def refresh(self) -> int:
        """Take over the newest available weights for the next block; return their version."""
        ...


@dataclass
class Episode:
    """One finished episode; its reward is the unclipped return."""

    env: int
    reward: float
    length: int


class EpisodeSource(Protocol):
    """What plays the episodes of a run, in this process or in others."""

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that finished since the last call."""
        ...

    def exploration_rate(self) -> float: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> bool:
        """Restore the state; return False if the environments had to start new episodes."""
        ...


class Collector(EpisodeSource, Protocol):
    """A source of blocks: an actor called directly, one that works ahead, or many actors."""

    def collect(self, rows: int) -> Block:
        """Return a block of ``rows`` rows."""
        ...
