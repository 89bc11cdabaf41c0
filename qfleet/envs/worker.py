"""The code of a worker process: it steps its share of the environments on command.

Commands arrive through a pipe and actions through shared memory; observations, rewards and flags
are written to shared memory, and a reply through the pipe says that they are complete. Messages are
bytes and JSON. Only the arguments that multiprocessing needs to start the process are pickled.

Environments are guarded and created by START or LOAD. Atari games are a C++ pool, which is slow to
create: the process creates it before its first reply, while the parent does something else.

=======  ======================================  =================================================
command  payload                                 reply
=======  ======================================  =================================================
START    JSON: ``side``, ``seeds``               the first observations are on that side
STEP     the side, one byte                      the step is on that side
SAVE     –                                       ``state``: of each env, or None
LOAD     JSON: ``seeds``, ``states``             the envs continue from these states
CLOSE    –                                       ``closed``; then the process ends
=======  ======================================  =================================================

A reply is empty, or JSON with ``faults`` (handled ones, for ``on_fault``) and ``error`` (the
message of a fault that could not be handled). The first reply is sent without a command and says
that the process is up.
"""

from __future__ import annotations

import base64
import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError, QfleetError, one_line
from qfleet.core.signals import FOREIGN_ERRORS, ignore_sigterm
from qfleet.core.types import EnvSpec, StateDict, Step
from qfleet.envs.closing import CLOSE_S
from qfleet.envs.registry import look_for_masks
from qfleet.envs.state import as_dict
from qfleet.envs.sync import GuardedEnvs


class Command:
    """The first byte of a message to a worker."""

    START, STEP, SAVE, LOAD, CLOSE = b"r", b"s", b"g", b"l", b"c"


EMPTY_REPLY = b""
FAILED, NO_MASKS, MASKS = 1, 20, 21
"""Exit codes of ``exit_with_masks``."""
_TENSOR = "tensor of"
"""Key of a dict that represents a tensor."""


class Slab:
    """Views of the memory that a pool's workers share with their parent.

    The outputs have two sides, used in turn: the parent may still read the last step while the
    workers write the next one.
    """

    def __init__(self, raw: Any, spec: EnvSpec, num_envs: int) -> None:
        offset_bytes = 0
        arrays: list[NDArray[Any]] = []
        for shape, dtype in _columns(spec, num_envs):
            arrays.append(np.ndarray(shape, dtype, raw, offset_bytes))
            offset_bytes += arrays[-1].nbytes
        self._reward, self.action, self._obs, self._flags = arrays

    def steps(self, envs: slice, *, lives: bool) -> list[Step]:
        """Return the rows of these envs on each side. ``lives``: with ``life_lost``, else None."""
        sides = zip(self._obs, self._reward, self._flags, strict=True)
        used = slice(None if lives else -1)
        return [Step(obs[envs], reward[envs], *flags[used, envs]) for obs, reward, flags in sides]

    @staticmethod
    def size_bytes(spec: EnvSpec, num_envs: int) -> int:
        return sum(
            int(np.prod(shape)) * dtype.itemsize for shape, dtype in _columns(spec, num_envs)
        )


def _columns(spec: EnvSpec, num_envs: int) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shapes and dtypes of the columns, widest first, so that all of them are aligned."""
    return [
        ((2, num_envs), np.dtype(np.float64)),
        ((num_envs,), np.dtype(np.int64)),
        ((2, num_envs, *spec.obs_shape), np.dtype(spec.obs_dtype)),
        # terminated, truncated, invalid, fresh, life_lost
        ((2, 5, num_envs), np.dtype(np.bool_)),
    ]


@dataclass(frozen=True)
class Share:
    """The arguments of a worker: the configuration, and which envs of the pool it steps."""

    config: Config
    spec: EnvSpec
    num_envs: int
    """Number of envs of the whole pool."""
    envs: range
    raw: Any
    """The pool's shared memory."""
    game: str | None = None
    """ROM name of an Atari game; None: another environment."""
    num_threads: int = 0
    """Threads of the worker's own pool of Atari games."""
    training: bool = True
    """Whether the games are for training, not for evaluations."""
    seeds: tuple[int, ...] = ()
    """The seeds of the first episodes of these games."""


def exit_with_masks(config: Config, pipe: Connection) -> None:
    """End this process with a code that says whether the environment gives masks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send_bytes(EMPTY_REPLY)  # the process is up
    found = None
    with contextlib.suppress(*FOREIGN_ERRORS):  # the parent makes an environment too, and reports
        found = look_for_masks(config)
    os._exit(FAILED if found is None else MASKS if found else NO_MASKS)


def serve(share: Share, pipe: Connection) -> None:
    """Answer commands until CLOSE, or until the parent has died."""
    # Ctrl-C reaches the whole process group, but only the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A separate process group, so that processes started by environments can be killed with it.
    os.setpgid(0, 0)
    ignore_sigterm()  # also that of a batch system to all processes: the parent ends this one
    _let_parent_finish()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = Worker(share)
    reply = EMPTY_REPLY
    while True:
        try:
            pipe.send_bytes(reply)
            command = pipe.recv_bytes()
        except (EOFError, OSError):
            break  # the parent has died
        if command == Command.CLOSE:
            break
        reply = worker.answer(command)
    worker.close()
    with contextlib.suppress(OSError):  # the parent has died
        pipe.send_bytes(pack({"closed": True, "faults": worker.take_faults()}))


def _let_parent_finish() -> None:
    """Run this process, when a command wakes it, only after the parent waits or has used its slice.

    Otherwise a worker may preempt the parent before the parent has sent the command to the others.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with contextlib.suppress(OSError):  # a sandbox may refuse it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _end_with_parent() -> None:
    """Kill this process after its parent has died, even if an environment hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(CLOSE_S)
    # The whole process group: see setpgid.
    os.killpg(0, signal.SIGKILL)


class AtariShare:
    """A worker's own pool of Atari games, with the interface of ``GuardedEnvs``."""

    def __init__(self, share: Share, sides: Sequence[Step]) -> None:
        # Imported only when needed, because importing ale-py takes a fifth of a second.
        from qfleet.envs.atari import AtariEnvs

        assert share.game is not None
        self._envs = AtariEnvs(
            share.config,
            share.game,
            len(share.envs),
            seed=0,
            training=share.training,
            num_threads=share.num_threads,
        )
        self._sides = sides
        # A reset with seeds creates the games anew: also before it is needed.
        self._envs.seeds = list(share.seeds)
        self._opening: NDArray[Any] | None = self._envs.reset()

    def seed(self, seeds: list[int]) -> None:
        if seeds != self._envs.seeds:
            self._envs.seeds, self._opening = seeds, None

    def start(self, side: int) -> None:
        obs, self._opening = self._opening, None
        self._sides[side].obs[:] = self._envs.reset() if obs is None else obs

    def step(self, actions: list[int], side: int) -> None:
        made = self._envs.step(np.array(actions))
        for column, rows in zip(self._sides[side], made, strict=True):
            if column is not None:
                column[:] = rows

    def states(self) -> None:
        """Return None: the state of ale-py's pool is not accessible."""

    def load_states(self, states: Sequence[StateDict]) -> None:
        self._envs.load_state_dict(as_dict(list(states)))

    def close(self) -> None:
        self._envs.close()


class Worker:
    """The environments of one share: guarded ones, or a pool of Atari games."""

    def __init__(self, share: Share) -> None:
        self._share = share
        slab = Slab(share.raw, share.spec, share.num_envs)
        rows = slice(share.envs.start, share.envs.stop)
        self._action: NDArray[np.int64] = slab.action[rows]
        self._sides = slab.steps(rows, lives=share.config.episodic_life and share.training)
        self._envs: GuardedEnvs | AtariShare | None = None
        if share.game is not None:
            self._envs = AtariShare(share, self._sides)
        self._seeds: dict[int, int] = {}
        self._faults: list[tuple[str, str]] = []

    def answer(self, command: bytes) -> bytes:
        """Execute a command and return the reply, which contains any error."""
        reply: dict[str, Any] = {}
        try:
            if command[:1] == Command.STEP:
                assert self._envs is not None
                self._envs.step(self._action.tolist(), command[1])
            elif command[:1] == Command.SAVE:
                reply["state"] = None if self._envs is None else self._envs.states()
            else:
                payload = unpack(command[1:])
                envs = self._build(payload["seeds"])
                if command[:1] == Command.START:
                    envs.start(payload["side"])
                else:
                    envs.load_states(payload["states"])
            if not reply and not self._faults:
                return EMPTY_REPLY
            return pack({**reply, "faults": self.take_faults()})
        except QfleetError as error:
            text = str(error)
        except FOREIGN_ERRORS as error:
            text = f"environment '{self._share.spec.env_id}' failed: {one_line(error)}"
        return pack({"error": text, "faults": self.take_faults()})

    def _build(self, env_seeds: list[int]) -> GuardedEnvs | AtariShare:
        """Create environments with these seeds; keep existing ones if the seeds are equal.

        Creating an environment may be slow. A pool of Atari games is kept: it only takes the seeds.
        """
        if isinstance(self._envs, AtariShare):
            self._envs.seed(env_seeds)
            return self._envs
        seeds = dict(zip(self._share.envs, env_seeds, strict=True))
        if self._envs is None or seeds != self._seeds:
            self.close()
            self._seeds = seeds
            self._envs = GuardedEnvs(
                self._share.config,
                self._share.spec,
                seeds,
                self._sides,
                lambda kind, message: self._faults.append((kind, message)),
            )
        return self._envs

    def take_faults(self) -> list[tuple[str, str]]:
        faults, self._faults = self._faults, []
        return faults

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()


def pack(message: Any) -> bytes:
    """Encode JSON values and tensors as bytes."""
    return json.dumps(_to_json(message)).encode()


def unpack(data: bytes) -> Any:
    return json.loads(data, object_hook=_from_json)


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        array = value.numpy()
        data = base64.b64encode(array.tobytes()).decode()
        return {_TENSOR: array.dtype.str, "shape": list(array.shape), "data": data}
    if isinstance(value, dict):
        for key in value:
            # JSON would silently turn the key into a string, which the env would not recognise.
            if not isinstance(key, str):
                raise CheckpointError(f"environment state key {key!r} must be a string; rename it")
        return {key: _to_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(entry) for entry in value]
    return value


def _from_json(entry: dict[str, Any]) -> Any:
    if _TENSOR not in entry:
        return entry
    array = np.frombuffer(base64.b64decode(entry["data"]), dtype=entry[_TENSOR])
    return torch.from_numpy(array.reshape(entry["shape"]).copy())
