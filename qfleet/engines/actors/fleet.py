"""The actors as one collector. In: a way to make them; out: blocks, in the order they are done.

An actor is given its next slice at the moment its last block is taken, so it works while the
learner learns, one block ahead at most: the ordinary limiter says when a block may be taken. One
that dies or falls silent is replaced by a new one, with new episodes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from qfleet.agent import schedules
from qfleet.agent.schedules import rows_per_block
from qfleet.algorithms.exploration import epsilon_ladder
from qfleet.config.config import Config
from qfleet.core.errors import ClusterError
from qfleet.core.types import Clock, EnvSpec, Episode, StateDict
from qfleet.engines.actors.account import Account
from qfleet.engines.actors.broadcast import Broadcast
from qfleet.engines.actors.messages import Order, Report
from qfleet.engines.actors.replay import FarBlock
from qfleet.engines.cluster.member_pool import MemberPool
from qfleet.engines.cluster.ray_cluster import RUN_AGAIN, TIMEOUT_S, Cluster
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timers import Timers

LOOK_S = 1.0
"""How long nothing may come before the run looks at its clockwork (a signal, the wall clock)."""


@dataclass
class _Member:
    handle: Any
    life: int = 0
    is_there: bool = False
    """It has reported: a node had room for it, and it has started."""
    version: int = -1
    """Of the weights that it has."""
    letter: Any = None
    """Stands for the rows that it is collecting."""
    ordered_s: float = 0.0
    """When it was last told to, by ``perf_counter``."""
    failures: int = 0
    """Times in a row that it was lost without having done anything."""


class _Done(NamedTuple):
    number: int
    report: Report
    letter: Any


class ActorFleet:
    def __init__(
        self,
        cluster: Cluster,
        config: Config,
        spec: EnvSpec,
        channel: Broadcast,
        clock: Clock,
        timers: Timers,
        faults: FaultLog,
        account: Account,
        spawn: Callable[[int, int], Any],
    ) -> None:
        """``spawn`` makes an actor with this number and life."""
        self._cluster, self._config, self._spec = cluster, config, spec
        self._channel, self._clock, self._waiting = channel, clock, timers.span("idle")
        self._faults, self._account, self._spawn = faults, account, spawn
        self._crew = MemberPool(cluster, "actor", config.worker_timeout_s)
        self._members = [_Member(spawn(number, 0)) for number in range(config.workers)]
        self._done: deque[_Done] = deque()
        self._episodes: list[Episode] = []
        self._begun = False

    def collect(self, rows: int) -> FarBlock:
        """The block that was done first; an empty one where none is done for a while."""
        if not self._begun:
            self._begun = True
            for number in range(len(self._members)):
                self._order(number, rows)
        if not self._done:
            with self._waiting:
                self._hear(LOOK_S)
        if not self._done:
            return FarBlock.of(
                self._spec, 0, self._config.envs, self._clock.updates, actor=0, letter=None
            )
        number, report, letter = self._done.popleft()
        self._note(number, report)
        self._order(number, min(rows, rows_per_block(self._config)))
        return FarBlock.of(
            self._spec, report.rows, self._config.envs, report.version, number, letter
        )

    def _order(self, number: int, rows: int) -> None:
        member = self._members[number]
        order = Order(rows, self._channel.version, self._clock.progress)
        news = self._channel.reference if member.version != order.version else None
        work = member.handle.work.options(num_returns=2)
        member.ordered_s = time.perf_counter()
        report, member.letter = work.remote(order, news)
        member.version = order.version
        self._account.messages += 1
        # An actor waits for nobody. It answers when its slice is done, or it hangs; but a new one
        # has yet to start, and perhaps to find room.
        grace_s = 0.0 if member.is_there else TIMEOUT_S
        self._crew.called(number, report, member.handle.ping.remote, grace_s)

    def _hear(self, wait_s: float) -> None:
        """Take note of who is done, and replace who was lost."""
        for came in self._crew.come(wait_s):
            member = self._members[came.number]
            if came.report is None:
                self._replace(came.number, came.loss)
            else:
                member.failures, member.is_there = 0, True
                self._done.append(_Done(came.number, came.report, member.letter))
                member.letter = None

    def _replace(self, number: int, why: str) -> None:
        member = self._members[number]
        if member.is_there or self._has_room():
            member.failures += 1
            if member.failures > self._config.max_env_restarts:
                raise ClusterError(
                    f"actor {number} was lost {member.failures} times in a row: {why}; mend the "
                    "cause or raise max_env_restarts"
                )
            self._faults("actor", f"{why.removesuffix(RUN_AGAIN)}; replaced")
            self._account.replaced(number)
        self._cluster.stop(member.handle)
        self._members[number] = _Member(
            self._spawn(number, member.life + 1), member.life + 1, failures=member.failures
        )
        self._order(number, rows_per_block(self._config))

    def _has_room(self) -> bool:
        """Or is an actor only waiting for a node to come? Not for ever, if all of them are."""
        there = self._cluster.processors()
        if there >= self._config.workers + self._config.servers:
            return True
        if not any(member.is_there for member in self._members):
            raise ClusterError(
                f"no actor is left, and cluster {self._cluster.address} has {there} processors; "
                "add nodes and resume the run"
            )
        return False

    def _note(self, number: int, report: Report) -> None:
        self._episodes += report.episodes
        for kind, message in report.faults:
            self._faults(kind, message)
        env_steps, age = report.rows * self._config.envs, self._clock.updates - report.version
        self._account.took(number, report, env_steps, age, time.monotonic())
        member = self._members[number]
        self._account.saw(number, member.life, report, member.ordered_s)

    def take_episodes(self) -> list[Episode]:
        """Episodes finished in the blocks taken since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def exploration_rate(self) -> float:
        """ε now, or the mean of the ladder's."""
        config = self._config
        if not config.exploration_ladder:
            return schedules.epsilon(config, self._clock.progress)
        envs = config.workers * config.envs
        return float(epsilon_ladder(envs, config.exploration_final_eps).mean())

    def state_dict(self) -> StateDict:
        """Envs are ahead of the memory, in other processes: they have no state here."""
        return {"envs": None, "episodes": [[e.env, e.reward, e.length] for e in self._episodes]}

    def load_state_dict(self, state: StateDict) -> bool:
        """Return False: the envs have to start new episodes."""
        self._episodes = [Episode(*fields) for fields in state["episodes"]]
        return False
