"""A cluster without processes: every call is made on the spot, and a member dies when it is told.

In: what ``ray_cluster.Cluster`` is asked for. Out: the same answers, in a fixed order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from qfleet.config.config import Config
from qfleet.core.errors import ClusterError, MemberLost, ValueLost
from qfleet.core.types import FIRST, SKIP, Block, EnvSpec
from support.configs import tiny_config

SPEC = EnvSpec("Test-v0", (2,), "float32", 3)
FRAMES = EnvSpec("Frames-v0", (2, 3, 5), "uint8", 3, frame_stack=2)


@dataclass(eq=False)
class Reference:
    value: Any = None
    lost: bool = False


class Method:
    def __init__(self, handle: Handle, name: str, returns: int = 1) -> None:
        self._handle, self._name, self._returns = handle, name, returns

    def options(self, num_returns: int) -> Method:
        return Method(self._handle, self._name, num_returns)

    def remote(self, *args: Any) -> Any:
        handle = self._handle
        plain = [arg.value if isinstance(arg, Reference) else arg for arg in args]
        if handle.doomed and not handle.dead:
            handle.dead = True
            handle.instance = None
        if any(isinstance(arg, Reference) and arg.lost for arg in args):
            return Reference(ValueLost("what it was sent was lost"))
        if handle.dead:
            lost = [Reference(lost=True) for _ in range(self._returns)]
            return lost[0] if self._returns == 1 else lost
        # Through bytes, as between processes: nothing is shared, and arrays are read-only.
        answer = _frozen(getattr(handle.instance, self._name)(*_frozen(plain)))
        if self._returns == 1:
            return Reference(answer)
        return [Reference(part) for part in answer]


def _frozen(value: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


@dataclass
class Handle:
    instance: Any
    kind: str
    args: tuple[Any, ...]
    dead: bool = False
    doomed: bool = False
    """Dies at its next call."""

    def __getattr__(self, name: str) -> Method:
        if name.startswith("__"):
            raise AttributeError(name)
        return Method(self, name)


@dataclass
class OneProcess:
    timeout_s: float = 60.0
    address: str = "here"
    folder: None = None
    is_lost: bool = False
    handles: list[Handle] = field(default_factory=list)
    store: int = 2**40
    room: int = 2**10

    def spawn(self, kind: type, *args: Any) -> Handle:
        handle = Handle(kind(*_frozen(list(args))), kind.__name__, args)
        self.handles.append(handle)
        return handle

    def stop(self, handle: Handle) -> None:
        handle.dead = True

    def put(self, value: Any) -> Reference:
        return Reference(_frozen(value))

    def ready(self, pending: list[Reference], _wait_s: float) -> list[Reference]:
        return pending

    def get(self, reference: Reference, who: str, _wait_s: float | None = None) -> Any:
        if reference.lost:
            raise MemberLost(f"{who} died")
        if isinstance(reference.value, ClusterError):
            raise reference.value
        return reference.value

    def processors(self) -> int:
        return self.room

    def store_bytes(self) -> int:
        return self.store

    def living(self, kind: str) -> list[Handle]:
        return [handle for handle in self.handles if handle.kind == kind and not handle.dead]


def small(**fields: Any) -> Config:
    """Two actors of two envs each."""
    base: dict[str, Any] = {
        "engine": "actors", "workers": 2, "envs": 2, "buffer_size": 400, "batch_size": 8,
        "learning_starts": 40, "train_freq": 4, "n_steps": 2, "gamma": 0.9, "net_arch": (8,),
        "steps": 400, "block_rows": 5, "checkpoint_freq": 200, "threads": 1,
    }  # fmt: skip
    return tiny_config(**{**base, **fields})


def random_block(
    rows: int, envs: int, seed: int, spec: EnvSpec = SPEC, skip: float = 0.2, first: bool = False
) -> Block:
    """Rows of an env that never terminates; some are SKIP, and the ones after open an episode."""
    random = np.random.default_rng(seed)
    shape = (rows, envs)
    skips = random.random(shape) < skip
    flags = skips * np.uint8(SKIP)
    flags[1:] |= skips[:-1] * np.uint8(FIRST)
    if first:
        flags[0] |= FIRST
    frames = random.integers(0, 255, (*shape, *spec.frame_shape)).astype(spec.obs_dtype)
    return Block(
        obs=torch.from_numpy(frames),
        action=torch.from_numpy(random.integers(0, spec.num_actions, shape)),
        reward=torch.from_numpy(random.normal(size=shape).astype(np.float32)),
        flags=torch.from_numpy(flags),
        version=seed,
    )


def pinned(value: float) -> Callable[[int], np.ndarray[Any, Any]]:
    """Stands for ``Generator.random``: always this number."""
    return lambda count: np.full(count, value)
