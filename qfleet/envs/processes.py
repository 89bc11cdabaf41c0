"""N environments in worker processes: for slow ones, and for ones that may crash the process.

There are as many processes as cores, at most one per environment, and each steps its share of the
environments one after another (``worker.py``). Every environment is guarded inside its worker.
Workers are started by a fork server: forking this process, with its threads and perhaps a GPU, is
unsafe, and spawning would import all modules again for each worker, which is slow.

Many Atari games live in worker processes too, fewer ones, each with a C++ pool for its share of the
games. The workers create their pools side by side, and this process need not wait for them until
the first reset.

A worker that dies is replaced, and one that does not answer in time is killed and replaced: in that
step its environments' rows are invalid and start new episodes. More than ``max_env_restarts`` of
these failures without a completed step in between raise EnvironmentFault. Every wait has a
deadline, and ``close`` leaves no process behind.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing import forkserver, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError, EnvironmentFault, one_line
from qfleet.core.seeding import env_seeds, mix_seeds
from qfleet.core.types import EnvSpec, StateDict, Step
from qfleet.envs.base import BaseEnvs
from qfleet.envs.closing import CLOSE_S, close_env
from qfleet.envs.guard import OnFault
from qfleet.envs.registry import make_single, single_spec, uses_masks
from qfleet.envs.state import as_dict
from qfleet.envs.sync import check_env_count
from qfleet.envs.threads import cores_for, pool_processes, pool_threads
from qfleet.envs.worker import (
    MASKS,
    NO_MASKS,
    Command,
    Share,
    Slab,
    exit_with_masks,
    pack,
    serve,
    unpack,
)

_BOOT_S = 60.0
"""Timeout of a new process until its first reply; ``env_timeout_s`` is the timeout of commands."""
_BOOT_GAME_S = 2.0
"""Added to it for each Atari game of the process: creating one takes 0.3 s on a busy machine."""
_START_S = 60.0
"""Timeout of the thread that starts the processes of Atari games."""
_NO_SCRIPT = "games"
"""How the names of processes begin that do not import the user's script."""
_STARTING = threading.Lock()
"""Held while ``multiprocessing`` is changed by ``_without_script``."""
_RESTARTS = "process_restarts"
"""Key that this pool adds to the state of an environment, next to the guard's keys."""


class _Loss(NamedTuple):
    """How a worker was lost: the kind of fault, a description and what to do."""

    kind: str
    text: str
    fix: str


class _Worker:
    """A worker process and the pipe to it. ``loss`` says why it no longer answers, or is None."""

    def __init__(self, context: Any, share: Share) -> None:
        self._context, self._share = context, share
        self._timeout_s = _timeout_s(share.config)
        self.boot_s = _BOOT_S + (_BOOT_GAME_S * len(share.envs) if share.game else 0.0)
        self.envs = share.envs
        first, last = share.envs[0], share.envs[-1]
        numbers = f"env {first}" if first == last else f"envs {first}-{last}"
        self.name = f"{numbers} of '{share.spec.env_id}'"
        self.failures = 0
        self.spawn()

    def spawn(self) -> None:
        """Start the process; its first reply says that it is up."""
        self.loss: _Loss | None = None
        self.is_up = False
        self._process: BaseProcess | None = None
        self._pipe: Connection
        self._pipe, worker_end = self._context.Pipe()
        _set_deadline(self._pipe, self._timeout_s)
        process = self._context.Process(target=serve, args=(self._share, worker_end), daemon=True)
        try:
            if self._share.game:
                process.name = f"{_NO_SCRIPT} {process.name}"
            with _without_script():
                process.start()
            self._process = process
            assert process.pid is not None
            # multiprocessing ends its processes with SIGTERM at exit and waits; workers ignore it.
            self._at_exit = util.Finalize(None, _kill, args=(process.pid,), exitpriority=10)
            # Wait for the sentinel too: a process that the environment started may keep the pipe
            # open. ``connection.wait`` would register both again for every reply, see ``receive``.
            self._ready = select.poll()
            self._ready.register(self._pipe, select.POLLIN)
            self._ready.register(process.sentinel, select.POLLIN)
        except (OSError, EOFError) as error:
            text = f"the process of {self.name} could not be started: {one_line(error)}"
            self.loss = _Loss("env_process", text, "use fewer envs")
        finally:
            # This process's copy of the worker's end would keep the pipe open if the worker dies.
            worker_end.close()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, command: bytes) -> None:
        if self.loss is None:
            try:
                self._pipe.send_bytes(command)
            except OSError as error:
                self.loss = self._find_loss(error)

    def receive(self, deadline_s: float) -> bytes | None:
        """Return the reply to the last command; None if the worker is lost."""
        if self.loss is not None:
            return None
        ready = self._poll(deadline_s)
        if ready and self._pipe.fileno() not in ready and self._outlives_server():
            self._ready.unregister(next(iter(ready)))
            ready = self._poll(deadline_s)
        error: OSError | EOFError = EOFError() if ready else BlockingIOError()
        if self._pipe.fileno() in ready:
            try:
                reply = self._pipe.recv_bytes()
                self.is_up = True
                return reply
            except (OSError, EOFError) as caught:
                error = caught
        self.loss = self._find_loss(error)
        return None

    def _poll(self, deadline_s: float) -> set[int]:
        found = self._ready.poll(1000 * max(0.0, deadline_s - time.monotonic()))
        return {file for file, _ in found}

    def _outlives_server(self) -> bool:
        """Return whether the fork server has died instead, e.g. of a SIGTERM to all processes."""
        assert self.pid is not None
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _find_loss(self, error: OSError | EOFError) -> _Loss:
        assert self._process is not None
        if isinstance(error, BlockingIOError):
            if not self.is_up:
                text = f"the process of {self.name} did not start within {self.boot_s:g} s"
                return _Loss("env_timeout", text, "use fewer envs")
            text = f"{self.name} did not answer within env_timeout_s {self._timeout_s:g}"
            return _Loss("env_timeout", text, "fix the environment, raise env_timeout_s")
        # The pipe closes shortly before the exit code is available.
        self._process.join(CLOSE_S)
        text = f"the process of {self.name} died (exit code {self._process.exitcode})"
        if self._share.game:
            return _Loss("env_process", text, "use fewer envs if memory is short")
        fix = "run it with --vectorize sync to see why"
        if not self.is_up:
            # Each process imports the user's script again, which must not start training there.
            fix += ", put a script's own code under if __name__ == '__main__'"
        return _Loss("env_process", text, fix)

    def end(self, grace_s: float) -> list[tuple[str, str]]:
        """Wait for the process to end, and kill it if it does not; kill a lost one at once.

        Also one that is not up: it has no guarded environments yet, and may be busy with creating
        games for a long time. Return faults of environments that were closed.
        """
        if self._process is None or self._process.pid is None:
            return []
        until_s = time.monotonic() + grace_s
        faults, is_closed = list[tuple[str, str]](), self.loss is not None or not self.is_up
        while self.loss is None and not is_closed:  # also replies to earlier commands
            reply = unpack(self.receive(until_s) or b"{}")
            faults += [(kind, message) for kind, message in reply.get("faults", ())]
            is_closed = "closed" in reply
        if self.loss is None and self.is_up:
            self._process.join(max(0.0, until_s - time.monotonic()))
        if not is_closed and self._process.is_alive():
            faults.append(("env_close", f"{self.name} did not close within {CLOSE_S:g} s, killed"))
        _kill(self._process.pid)
        self._at_exit.cancel()
        self._process.join(CLOSE_S)
        self._pipe.close()
        self._process = None
        return faults


def _look_for_masks(context: Any, config: Config) -> bool | None:
    """Return whether an environment gives masks, by the exit code of a process; None: it failed."""
    here, there = context.Pipe()
    process = context.Process(target=exit_with_masks, args=(config, there), daemon=True)
    with here, there:
        try:
            process.start()
            here.poll(_BOOT_S)  # until the process is up
        except (OSError, EOFError):
            return None
        process.join(_timeout_s(config))
    if process.exitcode is None:
        process.kill()
        process.join(CLOSE_S)
    return {NO_MASKS: False, MASKS: True}.get(process.exitcode)


class ProcessEnvs(BaseEnvs):
    """A ``core.VectorEnv`` of N environments in worker processes.

    All arrays stay valid for one more call than the protocol requires.
    """

    in_background = True

    def __init__(
        self,
        config: Config,
        num_envs: int,
        seed: int,
        on_fault: OnFault,
        game: str | None = None,
        *,
        training: bool = True,
    ) -> None:
        """Start the workers, those of an Atari game in a thread.

        ``game``: its ROM name, None for other environments. ``training``: as for ``make_envs``.
        """
        context = _context(game)
        spec = _probe(context, config, on_fault) if game is None else _atari_spec(config, game)
        super().__init__(spec, env_seeds(seed, num_envs), num_envs)
        self._on_fault = on_fault
        self._max_restarts = config.max_env_restarts
        self._timeout_s = _timeout_s(config)
        self._restarts = [0] * num_envs
        self._side = 0
        raw = context.RawArray("b", Slab.size_bytes(self.spec, num_envs))
        self._slab = Slab(raw, self.spec, num_envs)
        self._steps = self._slab.steps(slice(None), lives=config.episodic_life and training)
        count, threads = min(num_envs, cores_for(config)), 0
        if game is not None:
            count = pool_processes(config, num_envs) if training else 1
            threads = -(-pool_threads(config, num_envs, training=training) // count)
        cuts = [num_envs * i // count for i in range(count + 1)]
        own = (game, threads, training)
        shares = [
            Share(config, spec, num_envs, range(a, b), raw, *own, tuple(self.seeds[a:b]))
            for a, b in itertools.pairwise(cuts)
        ]
        self._is_closed = False
        self._started = list[_Worker]()
        self._starting: Future[None] | None = None
        if game is None:
            self._start_workers(context, shares)
        else:  # the fork server may still be importing
            self._starting = Future()
            given = (context, shares, self._starting)
            threading.Thread(target=self._start_workers, args=given, daemon=True).start()

    def _start_workers(
        self, context: Any, shares: list[Share], done: Future[None] | None = None
    ) -> None:
        try:
            for share in shares:
                self._started.append(_Worker(context, share))
                if self._is_closed:
                    self._started[-1].end(0.0)
        except BaseException as error:
            if done is None:
                raise
            done.set_exception(error)
        else:
            if done is not None:
                done.set_result(None)

    @property
    def _workers(self) -> list[_Worker]:
        if self._starting is not None:
            try:
                self._starting.result(_START_S)
            except FutureTimeout:
                raise EnvironmentFault(
                    f"no processes for '{self.spec.env_id}' within {_START_S:g} s; use fewer envs"
                ) from None
            self._starting = None
        return self._started

    def reset(self) -> NDArray[Any]:
        self._side ^= 1
        self._restarts = [0] * self.num_envs
        self._start(self._workers)
        self._replace_lost()
        return self._steps[self._side].obs

    def _send(self, actions: NDArray[np.int64]) -> None:
        self._side ^= 1
        self._slab.action[:] = actions
        for worker in self._workers:
            worker.send(Command.STEP + bytes([self._side]))

    def _recv(self) -> Step:
        replies = self._gather(self._workers, self._timeout_s)
        self._end_on_error(replies)
        for worker, _ in replies:
            worker.failures = 0
        self._replace_lost()
        return self._steps[self._side]

    # --- workers ----------------------------------------------------------------------------

    def _start(self, workers: list[_Worker]) -> None:
        """Start episodes in the envs of these workers; workers that cannot are marked as lost."""
        self._wait_until_up(workers)
        for worker in workers:
            message = {"side": self._side, "seeds": self._worker_seeds(worker)}
            worker.send(Command.START + pack(message))
        self._end_on_error(self._gather(workers, self._timeout_s))

    def _wait_until_up(self, workers: list[_Worker]) -> None:
        assert not self._is_in_flight, "call recv() first: a step is in flight"
        booting = [worker for worker in workers if not worker.is_up]
        self._gather(booting, max((worker.boot_s for worker in booting), default=0.0))

    def _worker_seeds(self, worker: _Worker) -> list[int]:
        return [
            # Guards number their own rebuilds from 1, so 0 gives seeds that no guard uses.
            mix_seeds(mix_seeds(self.seeds[i], 0), self._restarts[i])
            if self._restarts[i]
            else self.seeds[i]
            for i in worker.envs
        ]

    def _gather(
        self, workers: list[_Worker], timeout_s: float
    ) -> list[tuple[_Worker, dict[str, Any]]]:
        """Return the replies received before the deadline; mark the other workers as lost."""
        deadline_s = time.monotonic() + timeout_s
        replies: list[tuple[_Worker, dict[str, Any]]] = []
        for worker in workers:
            data = worker.receive(deadline_s)
            if data is not None:
                replies.append((worker, unpack(data) if data else {}))
        for _, reply in replies:
            for kind, message in reply.get("faults", ()):
                self._on_fault(kind, message)
        return replies

    def _end_on_error(self, replies: list[tuple[_Worker, dict[str, Any]]]) -> None:
        error = _first_error(replies)
        if error is not None:
            self.close()
            raise EnvironmentFault(error)

    def _replace_lost(self) -> None:
        """Replace lost workers by new processes; their rows start new episodes."""
        step = self._steps[self._side]
        while lost := [worker for worker in self._workers if worker.loss is not None]:
            if self._is_closed:  # by another thread
                raise EnvironmentFault(f"'{self.spec.env_id}' is closed")
            for worker in lost:
                self._count_failure(worker)
                worker.end(0.0)
                worker.spawn()
                for i in worker.envs:
                    self._restarts[i] += 1
                    step.reward[i] = 0.0
                    step.terminated[i] = step.truncated[i] = False
                    step.invalid[i] = step.fresh[i] = True
                    if step.life_lost is not None:
                        step.life_lost[i] = False
            self._start(lost)

    def _count_failure(self, worker: _Worker) -> None:
        assert worker.loss is not None
        kind, text, fix = worker.loss
        worker.failures += 1
        if worker.failures > self._max_restarts:
            self._on_fault(kind, text)
            self.close()
            raise EnvironmentFault(
                f"{text} (failure {worker.failures} in a row, more than max_env_restarts "
                f"{self._max_restarts}); {fix} or raise max_env_restarts"
            )
        remedy = "killed and restarted" if kind == "env_timeout" else "restarted"
        self._on_fault(kind, f"{text}, {remedy}")

    # --- state ------------------------------------------------------------------------------

    def state_dict(self) -> StateDict | None:
        """Return the state as ``SyncEnvs`` does; None also if a worker is lost.

        The next step replaces a lost worker.
        """
        self._wait_until_up(self._workers)
        for worker in self._workers:
            worker.send(Command.SAVE)
        replies = self._gather(self._workers, self._timeout_s)
        if error := _first_error(replies):
            raise CheckpointError(error)
        shares = [reply["state"] for _, reply in replies]
        if len(shares) < len(self._workers) or None in shares:
            return None
        states = itertools.chain.from_iterable(shares)
        numbered = zip(states, self._restarts, strict=True)
        return as_dict([{**state, _RESTARTS: restarts} for state, restarts in numbered])

    def load_state_dict(self, state: StateDict) -> None:
        check_env_count(state, self.num_envs)
        states = list(state.values())
        self._restarts = [entry.get(_RESTARTS, 0) for entry in states]
        self._wait_until_up(self._workers)
        for worker in self._workers:
            share = states[worker.envs.start : worker.envs.stop]
            worker.send(Command.LOAD + pack({"seeds": self._worker_seeds(worker), "states": share}))
        error = _first_error(self._gather(self._workers, self._timeout_s))
        losses = [worker.loss.text for worker in self._workers if worker.loss is not None]
        if error or losses:
            raise CheckpointError(error or f"{losses[0]} while its state was loaded; try again")

    def close(self) -> None:
        """Tell the workers to close their environments, and kill workers that take too long."""
        self._is_closed = True  # workers that start later end at once
        for worker in self._started:
            if worker.pid is not None:
                worker.send(Command.CLOSE)
        deadline_s = time.monotonic() + CLOSE_S
        for worker in self._started:
            for fault in worker.end(max(0.0, deadline_s - time.monotonic())):
                self._on_fault(*fault)


def _context(game: str | None) -> Any:
    """Return the multiprocessing context. Its type depends on the system, hence Any."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qfleet.envs.atari" if game else "__main__", __name__])
    # Its imports take seconds: begin now, because the spec is not yet known.
    forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Start processes that do not import the user's script, if their name begins so.

    Atari games do not need it. A script without ``if __name__ == '__main__'`` would train again in
    every process, and it need not know how many games make qfleet start processes.
    """

    def prepare_without(name: str) -> dict[str, Any]:
        needed = prepare(name)
        if name.startswith(_NO_SCRIPT):
            needed = {key: needed[key] for key in needed if not key.startswith("init_main")}
        return needed

    with _STARTING:
        prepare = spawn.get_preparation_data
        spawn.get_preparation_data = prepare_without
        try:
            yield
        finally:
            spawn.get_preparation_data = prepare


def _kill(pid: int) -> None:
    """Kill a worker and what its environments have started: it leads a process group."""
    for kill in (os.killpg, os.kill):  # it may not have created its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _probe(context: Any, config: Config, on_fault: OnFault) -> EnvSpec:
    """Return the spec of an environment, by making one."""
    # Not in this process: an environment that hangs or crashes must not do so here.
    masked = uses_masks(config, functools.partial(_look_for_masks, context))
    probe = make_single(config, masked=masked)
    spec = single_spec(config, probe)
    if problem := close_env(probe):
        on_fault("env_close", f"environment '{config.env}' {problem}")
    return spec


@functools.lru_cache(maxsize=1)  # all groups have the same
def _atari_spec(config: Config, game: str) -> EnvSpec:
    """Return the spec of an Atari game, by making one; ConfigError if options are wrong."""
    # Imported only when needed, because importing ale-py takes a fifth of a second.
    from qfleet.envs.atari import AtariEnvs

    with contextlib.closing(AtariEnvs(config, game, 1, 0, training=True)) as envs:
        return envs.spec


def _timeout_s(config: Config) -> float:
    """Return ``env_timeout_s``, limited to 24 days, the longest wait of the operating system."""
    return min(config.env_timeout_s, 1e6)


def _set_deadline(pipe: Connection, timeout_s: float) -> None:
    """Set a timeout for reads and writes of this end: a stopped worker would block it forever."""
    whole_s = int(timeout_s)
    timeval = struct.pack("ll", whole_s, int((timeout_s - whole_s) * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as half:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            half.setsockopt(socket.SOL_SOCKET, option, timeval)


def _first_error(replies: list[tuple[_Worker, dict[str, Any]]]) -> str | None:
    return next((reply["error"] for _, reply in replies if "error" in reply), None)
