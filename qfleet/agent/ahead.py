"""An actor in a thread of its own, one block ahead of the learner.

In: an actor and the weights channel. Out: blocks, in the order in which they were collected.

A run stays reproducible. The thread gets work only when its last block is taken, with the weights
of that moment, so block k + 1 is always collected with what was learnt from the blocks before k,
however fast either side is; and the memory changes only between two bursts of updates.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import NamedTuple

import torch

from qfleet.agent.actor import Actor
from qfleet.agent.schedules import next_rows
from qfleet.config.config import Config
from qfleet.core.errors import EnvironmentFault
from qfleet.core.types import Block, Clock, Episode, StateDict, WeightsChannel
from qfleet.telemetry.timers import Timers


class _Collected(NamedTuple):
    block: Block
    episodes: list[Episode]


BOOT_S = 60.0
"""How long a restarted environment's process may take to come up."""
CLOSE_S = 5.0
"""How long the thread may take to finish its block when the run is over."""


class Ahead:
    """The actor works in a thread, one block ahead, or (``lockstep``) only while waited for."""

    def __init__(
        self,
        actor: Actor,
        channel: WeightsChannel,
        config: Config,
        clock: Clock,
        timers: Timers,
        *,
        lockstep: bool,
        tensor_threads: int | None = None,
        block_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """``block_ready`` is called in the caller's thread before it gets a block.

        ``tensor_threads``: torch's threads for work that this thread asks for; None leaves its own
        choice, which is every core, as it is for the learner's thread beside it.
        """
        self._actor, self._channel = actor, channel
        self._config, self._clock, self._lockstep = config, clock, lockstep
        self._waiting = timers.span("idle")
        self._block_ready = block_ready
        self._under_way: Future[_Collected] | None = None
        self._episodes: list[Episode] = []
        self._rows = 0
        """Of the block under way."""
        self._jobs: queue.SimpleQueue[tuple[int, int, int, Future[_Collected]] | None]
        self._jobs = queue.SimpleQueue()
        # A daemon, unlike an executor's threads: an environment that hangs must not keep the
        # process from ending.
        self._thread = threading.Thread(
            target=self._work, args=(tensor_threads,), name="collector", daemon=True
        )
        self._thread.start()

    def collect(self, rows: int) -> Block:
        collected = self._finished() or self._result(self._start(rows, self._clock.env_steps))
        self._block_ready()
        self._episodes += collected.episodes
        if not self._lockstep:
            after = self._clock.env_steps + collected.block.rows * self._config.envs
            following = next_rows(self._config, after)
            self._under_way = self._start(following, after) if following else None
        return collected.block

    def _start(self, rows: int, env_steps: int) -> Future[_Collected]:
        # The weights are taken over here, while the actor is idle, and never later.
        self._rows = rows
        future: Future[_Collected] = Future()
        self._jobs.put((rows, self._channel.refresh(), env_steps, future))
        return future

    def _work(self, tensor_threads: int | None) -> None:
        if tensor_threads is not None:
            torch.set_num_threads(tensor_threads)
        while (job := self._jobs.get()) is not None:
            rows, version, env_steps, future = job
            try:
                block = self._actor.collect(rows, version, env_steps)
                future.set_result(_Collected(block, self._actor.take_episodes()))
            except BaseException as error:  # raised again where the block is waited for
                future.set_exception(error)

    def _finished(self) -> _Collected | None:
        """The block under way, once it is complete; None if there is none."""
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else self._result(under_way)

    def _result(self, future: Future[_Collected]) -> _Collected:
        # Envs that hang have their own deadline and restarts; this one is beyond all of them.
        restarts = self._config.max_env_restarts + 1
        waits = self._rows * max(1, self._config.env_groups) + restarts
        deadline_s = self._config.env_timeout_s * waits + BOOT_S * restarts
        try:
            with self._waiting:
                return future.result(deadline_s)
        except FutureTimeout:
            if future.done():
                raise  # an environment's own, from the thread
            raise EnvironmentFault(
                f"no block of '{self._config.env}' within {deadline_s:g} s: an environment hangs; "
                "run it with --vectorize async, which restarts such ones, or raise env_timeout_s"
            ) from None

    def _settle(self) -> None:
        """Wait for the block under way; it stays the next to be taken."""
        if self._under_way is not None:
            self._result(self._under_way)

    def take_episodes(self) -> list[Episode]:
        """Episodes finished in the blocks taken since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def exploration_rate(self) -> float:
        return self._actor.exploration_rate(self._clock.env_steps)

    def state_dict(self) -> StateDict:
        """The actor's state. With a block under way the envs are ahead of the memory: no state."""
        try:
            self._settle()
        except EnvironmentFault:
            if self._lockstep:
                raise
            # It is raised again when the block is taken; a checkpoint can be written without it.
        state = self._actor.state_dict()
        state["episodes"] = [[e.env, e.reward, e.length] for e in self._episodes]
        return state if self._lockstep else {**state, "envs": None}

    def load_state_dict(self, state: StateDict) -> bool:
        return self._actor.load_state_dict(state)

    def land(self) -> None:
        """Wait until no step is in flight; the run is over."""
        self._settle()
        self._actor.land()

    def close(self) -> None:
        """End the thread; what it collects is dropped."""
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
