"""The nouns that flow through qfleet, and the seams between its rooms. Read this first.

    env ──► actor ──► memory ──► learner ──► updater ──► weights ──► actor

An actor turns environment steps into *blocks*, a memory turns blocks into *batches*, a learner
turns batches into gradients, an updater turns gradients into weights, and a weights channel brings
a version of them back to the actors. Engines only decide where each of these lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.accelerator.compiling import Compilable

# Row flags, one byte a row. They are all a memory needs to know about episodes.
TERMINATED = 1
"""The action ended the task: nothing is worth anything afterwards, so do not bootstrap."""
SKIP = 2
"""The action led nowhere usable (the autoreset row after an episode's end, a faulty step). Its
observation is true, so earlier rows bootstrap from it, but it is never sampled as a start."""
FIRST = 4
"""The observation opens an episode: frame stacks must not reach behind it."""

StateDict: TypeAlias = dict[str, Any]
"""Checkpoint state: tensors, and JSON values (numbers, strings, lists, dicts). Nothing else."""


@dataclass(frozen=True)
class EnvSpec:
    """What an environment looks like to everything behind it."""

    env_id: str
    obs_shape: tuple[int, ...]
    """Shape of the observation the network sees, e.g. ``(4, 84, 84)``; ``()`` for discrete ones."""
    obs_dtype: str
    """``uint8``, ``float32`` or ``int64`` (discrete observations, one-hot encoded by networks)."""
    num_actions: int
    frame_stack: int = 1
    """How many frames are stacked along the first axis of an observation; 1: not a stack."""
    frame_skip: int = 1
    """Emulator frames per env step."""
    num_obs_values: int = 0
    """Number of values of a discrete observation; 0 for boxes."""
    first_obs_value: int = 0
    """The environment's own number for discrete observation 0."""
    first_action: int = 0
    """The environment's own number for action 0."""

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of what a memory stores per row: one frame, however many are stacked."""
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
    """The action taken in this row led nowhere usable: an autoreset row or a faulty step."""
    fresh: NDArray[np.bool_]
    """``obs`` opens a new episode."""
    life_lost: NDArray[np.bool_] | None = None
    """Ends the task for learning but not the game (episodic life)."""


class VectorEnv(Protocol):
    """N environments stepped together, with next-step autoreset.

    After an episode ends, the next call ignores that env's action and returns the first
    observation of its next episode, with ``invalid`` and ``fresh`` set.
    """

    spec: EnvSpec
    num_envs: int
    seeds: list[int]
    in_background: bool
    """Whether a step goes on by itself between ``send`` and ``recv``."""

    def reset(self) -> NDArray[Any]: ...

    def step(self, actions: NDArray[np.int64]) -> Step:
        """``send``, then ``recv``."""
        ...

    def send(self, actions: NDArray[np.int64]) -> None:
        """Start a step of all envs without waiting for it. ``actions`` may be changed afterwards.

        One step can be in flight. Until its ``recv``, nothing but ``close`` may be called.
        """
        ...

    def recv(self) -> Step:
        """Wait for the step that ``send`` has started.

        The returned arrays may be overwritten from the next call on, be it ``send`` or ``reset``.
        """
        ...

    def state_dict(self) -> StateDict | None:
        """The envs' exact state, or None where they cannot give it."""
        ...

    def load_state_dict(self, state: StateDict) -> None: ...

    def close(self) -> None: ...


@dataclass
class Clock:
    """The one clock. Every schedule is a function of it, and it is in the checkpoint.

    ``env_steps`` counts calls of every env, the autoreset call included, so that engines whose
    environments live on a device know it without asking the device.
    """

    env_steps: int = 0
    updates: int = 0
    frame_skip: int = 1
    elsewhere_env_steps: int = 0
    """Steps of other workers of the same run, as far as they are known here."""

    @property
    def progress(self) -> int:
        """Env steps of the whole run: what schedules are a function of."""
        return self.env_steps + self.elsewhere_env_steps

    @property
    def frames(self) -> int:
        return self.env_steps * self.frame_skip


@dataclass
class Block:
    """Time-major rows ``[T, N]``: what N envs did in T steps."""

    obs: Tensor
    """``[T, N, *frame_shape]``: what each action was chosen on (the newest frame of a stack)."""
    action: Tensor
    """int64 ``[T, N]``."""
    reward: Tensor
    """float32 ``[T, N]``, as learnt from (clipped where asked)."""
    flags: Tensor
    """uint8 ``[T, N]``: TERMINATED | SKIP | FIRST."""
    version: int = 0
    """Version of the weights that chose the actions."""

    @property
    def rows(self) -> int:
        return self.action.shape[0]


@dataclass
class Batch:
    """Samples to learn from, ``[B, ...]``. γ and n are already inside: no loss ever sees them."""

    obs: Tensor
    action: Tensor
    """int64 ``[B]``."""
    reward: Tensor
    """n-step sum of discounted rewards, float32 ``[B]``."""
    discount: Tensor
    """γ^k for a bootstrap k steps on; 0 where the task terminated, not where it was truncated."""
    next_obs: Tensor
    weight: Tensor
    """Importance weight; ones unless replay is prioritised."""
    index: Tensor
    """Flat index of each sample in its memory, for priority updates."""

    def __len__(self) -> int:
        return self.action.shape[0]

    def split(self, size: int) -> list[Batch]:
        """Cut a burst's worth of samples into batches of ``size``."""
        columns = zip(*(getattr(self, name).split(size) for name in BATCH_FIELDS), strict=True)
        return [Batch(*column) for column in columns]

    def copy_(self, other: Batch) -> None:
        """Take over another batch's values, in place."""
        for name in BATCH_FIELDS:
            getattr(self, name).copy_(getattr(other, name))

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in BATCH_FIELDS))


BATCH_FIELDS = ("obs", "action", "reward", "discount", "next_obs", "weight", "index")


class Memory(Protocol):
    """Blocks in, batches out."""

    device: torch.device

    def extend(self, block: Block) -> None: ...

    def can_sample(self) -> bool: ...

    def sample(self, count: int, beta: float | Tensor) -> Batch:
        """Draw ``count`` transitions; ``beta`` is the importance-weight exponent."""
        ...

    def update_priorities(self, index: Tensor, priority: Tensor) -> None: ...

    def generators(self) -> list[torch.Generator]:
        """What samples are drawn from."""
        ...

    def compilables(self) -> list[Compilable]:
        """What torch.compile may be switched on for."""
        ...

    def end_open_episodes(self) -> None:
        """Close what the newest rows left open, because their envs cannot be continued."""
        ...

    def close(self) -> None:
        """Let go of files; the memory is not used afterwards."""
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class Updater(Protocol):
    """How gradients become new weights. It owns the optimiser."""

    def apply(
        self, learning_rate: float | Tensor, loss: Callable[[], Tensor] | None = None
    ) -> Mapping[str, Tensor | float]:
        """Turn the gradient in the flat weights' buffer into new weights; return metrics.

        ``loss`` tells the loss that the gradient is of, for those who judge it.

        A non-finite gradient changes nothing at all and sets metric ``skipped`` to 1.
        """
        ...

    def compilables(self) -> list[Compilable]:
        """What torch.compile may be switched on for."""
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class Lag:
    """By how many updates the weights that acted were behind those that learnt."""

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
    """How a *version* of the weights reaches the actors."""

    lag: Lag

    def publish(self, version: int) -> None:
        """Called by the learner's side after updates."""
        ...

    def restart(self, version: int) -> None:
        """The weights were replaced, by those of a checkpoint: nobody may act with older ones."""
        ...

    def refresh(self) -> int:
        """Called before a block is collected; returns the version that then acts."""
        ...

    def record_lag(self, updates: int) -> None:
        """A block enters the memory whose weights were so many updates behind the newest."""
        ...


@dataclass
class Episode:
    """One finished episode, unclipped."""

    env: int
    reward: float
    length: int


class Collector(Protocol):
    """Gives blocks of experience: an actor called directly, one that works ahead, many actors."""

    def collect(self, rows: int) -> Block:
        """Return a block of ``rows`` rows."""
        ...

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that finished since the last call."""
        ...

    def exploration_rate(self) -> float: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict, env_steps: int) -> bool:
        """Restore the state; return False if the environments had to start new episodes."""
        ...

    def land(self) -> None:
        """Wait until no environment step is in flight; the run is over."""
        ...

    def close(self) -> None: ...
