"""An actor in its own thread, one block ahead of the learner.

In: an actor and the weights channel. Out: blocks, in the order in which they were collected.

A run stays reproducible: the thread starts a block only when its last one is taken, with the
weights of that moment. Block k + 1 is therefore always collected with weights learnt from the
blocks before k, at any speed, and the memory changes only between two bursts of updates.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeAlias

import torch

from qfleet.agent.actor import Actor
from qfleet.agent.schedules import next_rows
from qfleet.config.config import Config
from qfleet.core.errors import EnvironmentFault
from qfleet.core.types import Block, Clock, Episode, StateDict, WeightsChannel
from qfleet.telemetry.timers import Timers

_Collected: TypeAlias = tuple[Block, list[Episode]]
BOOT_S = 60.0
"""Most seconds for the start of an environment's process."""
CLOSE_S = 5.0
"""Most seconds for the thread to finish its block at the end of a run."""


class Ahead:
    """A collector whose actor works in a thread, one block ahead or (``lockstep``) on demand."""

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

        ``tensor_threads``: number of torch's threads for this thread's work; None: every core, as
        for the learner's thread.
        """
        self._actor, self._channel = actor, channel
        self._config, self._clock, self._lockstep = config, clock, lockstep
        self._waiting = timers.span("idle")
        self._block_ready = block_ready
        self._under_way: Future[_Collected] | None = None
        self._episodes: list[Episode] = []
        self._rows = 0
        """Rows of the block under way."""
        self._jobs: queue.SimpleQueue[tuple[int, int, int, Future[_Collected]] | None]
        self._jobs = queue.SimpleQueue()
        # A daemon, unlike an executor's threads: the process must end even if an environment
        # hangs.
        self._thread = threading.Thread(
            target=self._work, args=(tensor_threads,), name="collector", daemon=True
        )
        self._thread.start()

    def collect(self, rows: int) -> Block:
        future = self._under_way or self._start(rows, self._clock.env_steps)
        self._under_way = None
        block, episodes = self._result(future)
        self._block_ready()
        self._episodes += episodes
        if not self._lockstep:
            after = self._clock.env_steps + block.rows * self._config.envs
            following = next_rows(self._config, after)
            self._under_way = self._start(following, after) if following else None
        return block

    def _start(self, rows: int, env_steps: int) -> Future[_Collected]:
        # The weights are refreshed here, while the actor is idle, and never later.
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
                future.set_result((block, self._actor.take_episodes()))
            except BaseException as error:  # ``_result`` raises it again
                future.set_exception(error)

    def _result(self, future: Future[_Collected]) -> _Collected:
        # Longer than all timeouts and restarts of environments, which should come first.
        restarts = self._config.max_env_restarts + 1
        waits = self._rows * max(1, self._config.env_groups) + restarts
        deadline_s = self._config.env_timeout_s * waits + BOOT_S * restarts
        try:
            with self._waiting:
                return future.result(deadline_s)
        except FutureTimeout:
            if future.done():
                raise  # the timeout of an environment, from the thread
            raise EnvironmentFault(
                f"no block of '{self._config.env}' within {deadline_s:g} s: an environment hangs; "
                "use --vectorize async, which restarts it, or raise env_timeout_s"
            ) from None

    def _settle(self) -> None:
        """Wait for the block under way; ``collect`` returns it later."""
        if self._under_way is not None:
            self._result(self._under_way)

    def take_episodes(self) -> list[Episode]:
        """Return the episodes finished in the blocks taken since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def exploration_rate(self) -> float:
        return self._actor.exploration_rate(self._clock.env_steps)

    def state_dict(self) -> StateDict:
        """Return the actor's state, without the envs if they are ahead of the memory."""
        try:
            self._settle()
        except EnvironmentFault:
            if self._lockstep:
                raise
            # ``collect`` raises it again; a checkpoint can be written without the block.
        state = self._actor.state_dict()
        state["episodes"] = [[e.env, e.reward, e.length] for e in self._episodes]
        return state if self._lockstep else {**state, "envs": None}

    def load_state_dict(self, state: StateDict) -> bool:
        return self._actor.load_state_dict(state)

    def land(self) -> None:
        """Wait until no step is in flight, at the end of a run."""
        self._settle()
        self._actor.land()

    def close(self) -> None:
        """End the thread; drop what it collects."""
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
