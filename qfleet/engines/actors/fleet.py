"""The actors as one collector: it returns blocks in the order in which actors finish them.

An actor is given its next slice when its last block is taken, so it works while the learner learns,
one block ahead at most: the rate limiter says when a block may be taken. With ``--servers 0``, an
actor that is far ahead of the slowest rests. An actor that dies or does not answer is replaced by a
new one, with new episodes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from qfleet.agent import schedules
from qfleet.agent.schedules import rows_per_block
from qfleet.algorithms.exploration import epsilon_ladder
from qfleet.core.errors import ClusterError
from qfleet.core.types import Clock, EnvSpec, Episode, StateDict
from qfleet.data.recorder import WRITE_TIMEOUT_S
from qfleet.engines.actors.account import Account
from qfleet.engines.actors.broadcast import Broadcast
from qfleet.engines.actors.messages import Order, Report
from qfleet.engines.actors.remote_actor import RemoteActor
from qfleet.engines.actors.replay import RemoteBlock
from qfleet.engines.cluster.member_pool import Member, MemberPool
from qfleet.engines.cluster.ray_cluster import Cluster
from qfleet.engines.parts import Setup
from qfleet.storage.state_checks import check_episodes
from qfleet.telemetry.timers import Timers

BLOCKS_AHEAD = 2
"""With ``--servers 0``: blocks by which an actor may be ahead of the slowest; they wait in RAM."""
LOOK_S = 1.0
"""Longest wait for a block before the run checks for signals and its time limit."""


@dataclass
class _Actor(Member):
    version: int = -1
    """Version of its weights."""
    message: Any = None
    """Reference of the ``BlockMessage`` that it collects, or has collected."""
    ordered_s: float = 0.0
    """Time of its last order, by ``perf_counter``."""


class ActorFleet:
    """The collector of the actors engine."""

    def __init__(
        self,
        cluster: Cluster,
        setup: Setup,
        spec: EnvSpec,
        channel: Broadcast,
        clock: Clock,
        timers: Timers,
        account: Account,
    ) -> None:
        config, traced = setup.config, setup.trace is not None
        self._config, self._spec, self._channel, self._clock = config, spec, channel, clock
        self._faults, self._account, self._waiting = setup.faults, account, timers.span("idle")
        self._pool = MemberPool(
            cluster,
            "actor",
            lambda actor: cluster.spawn(
                RemoteActor, config, actor.number, actor.life, setup.restarted_at, traced
            ),
            [_Actor(number) for number in range(config.workers)],
            timeout_s=config.worker_timeout_s,
            max_failures=config.max_env_restarts,
            processors_needed=config.workers + config.servers,
            advice="fix the cause or raise max_env_restarts",
        )
        self._done: deque[tuple[_Actor, Report]] = deque()
        self._resting: list[_Actor] = []
        """Actors without an order, because others have to catch up."""
        self._rows = dict.fromkeys(range(config.workers), 0)
        """Rows of each actor that were taken."""
        ahead = BLOCKS_AHEAD * rows_per_block(config)
        self._most_ahead = ahead if config.has_learner_replay else math.inf
        self._episodes: list[Episode] = []

    def collect(self, rows: int) -> RemoteBlock:
        """Return the block that was done first; an empty one if none is done for a while."""
        for actor in self._pool.members.values():
            if not actor.ordered_s:  # the first call
                self._order(actor, rows)
        if not self._done:
            with self._waiting:
                self._take_results()
        envs = self._config.envs
        if not self._done:
            return RemoteBlock.of(self._spec, 0, envs, self._clock.updates, actor=0, message=None)
        actor, report = self._done.popleft()
        message = actor.message
        self._note(actor, report)
        self._rows[actor.number] += report.rows
        self._resting.append(actor)
        self._order_all(min(rows, rows_per_block(self._config)))
        return RemoteBlock.of(self._spec, report.rows, envs, report.version, actor.number, message)

    def _order_all(self, rows: int) -> None:
        """Give an order to every resting actor that is not too far ahead."""
        most = min(self._rows.values()) + self._most_ahead
        resting, self._resting = self._resting, []
        for actor in resting:
            if self._rows[actor.number] <= most:
                self._order(actor, rows)
            else:
                self._resting.append(actor)

    def _order(self, actor: _Actor, rows: int) -> None:
        order = Order(rows, self._channel.version, self._clock.progress)
        weights = self._channel.reference if actor.version != order.version else None
        work = actor.handle.work.options(num_returns=2)
        actor.ordered_s = time.perf_counter()
        report, actor.message = work.remote(order, weights)
        actor.version = order.version
        self._account.messages += 1
        # An actor never waits for others: it answers when its slice is done, or it hangs.
        self._pool.call(actor, report)

    def _take_results(self) -> None:
        for actor, report, loss in self._pool.results(LOOK_S):
            if report is None:
                self._replace(actor, loss)
            else:
                actor.failures = 0
                self._done.append((actor, report))

    def _replace(self, actor: _Actor, loss: str) -> None:
        if self._pool.waits_for_room(actor):
            if self._config.has_learner_replay:  # which takes blocks of all actors in turn
                raise ClusterError(
                    f"{loss}, and the cluster has no room for another; with servers 0 every actor "
                    "is needed: add a node and resume the run"
                )
        else:
            self._pool.count_failure(actor, loss)
            self._faults("actor", f"{loss}; replaced")
            self._account.count_restart(actor.number)
        self._pool.replace(actor)
        actor.version = -1
        self._order(actor, rows_per_block(self._config))

    def _note(self, actor: _Actor, report: Report) -> None:
        self._episodes += report.episodes
        for kind, message in report.faults:
            self._faults(kind, message)
        env_steps, age = report.rows * self._config.envs, self._clock.updates - report.version
        self._account.record(actor.number, report, env_steps, age, time.monotonic())
        self._account.add_spans(actor.number, actor.life, report, actor.ordered_s)

    def finish_recordings(self) -> None:
        """Let the actors write the rest of what they recorded."""
        self._pool.finish_recordings(WRITE_TIMEOUT_S, self._faults)

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that ended in the blocks taken since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def exploration_rate(self) -> float:
        """Return the current ε, or the mean of the ladder."""
        config = self._config
        if not config.exploration_ladder:
            return schedules.epsilon(config, self._clock.progress)
        envs = config.workers * config.envs
        return float(epsilon_ladder(envs, config.exploration_final_eps).mean())

    def state_dict(self) -> StateDict:
        """Return no state of the envs: they are in other processes, ahead of the memory."""
        return {"envs": None, "episodes": [[e.env, e.reward, e.length] for e in self._episodes]}

    def load_state_dict(self, state: StateDict) -> bool:
        """Return False: the envs have to start new episodes."""
        self._episodes = check_episodes(state["episodes"], self._config.envs)
        return False
