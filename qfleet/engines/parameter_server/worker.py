"""One worker: environments, memory and learner of its own, and weights that are on servers.

In: what the supervisor tells it before a slice of work; out: what it did in it. A plain class: it
runs the very loop that ``--engine serial`` runs, with an updater that asks the servers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qfleet.agent.schedules import own_ladder
from qfleet.config.config import Config
from qfleet.core.errors import GivenUp
from qfleet.core.seeding import mix_seeds
from qfleet.core.signals import ignore_sigterm_if_blocked
from qfleet.engines import serial
from qfleet.engines.cluster.ray_cluster import TIMEOUT_S, from_inside
from qfleet.engines.parameter_server.client import Line, RemoteLine, Servers, ServersLost
from qfleet.engines.parameter_server.compression import make_compressor
from qfleet.engines.parameter_server.updaters import RemoteUpdater, make_remote_updater
from qfleet.engines.parts import Setup
from qfleet.envs.latency import latency_of
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.trace import SpanRecord, Trace

LANE = "learner"


class WorkOrder(NamedTuple):
    """What a worker has to know for its next slice."""

    elsewhere_env_steps: int
    """What the others have done."""
    until_env_steps: int
    """Stop at so many steps of its own."""
    slice_s: float
    """Stop after so long."""
    lr_scale: float = 1.0
    share: float = 1.0
    """Of what a round asks of the quickest worker: of its steps and of its samples."""
    renewed: tuple[tuple[int, Any], ...] = ()
    """Servers that stand in for others since the last slice, and their lines."""


class Report(NamedTuple):
    """What a worker did so far, and in this slice."""

    env_steps: int
    updates: int
    episodes: list[tuple[int, float, int]]
    """Of this slice: env, return, length."""
    metrics: dict[str, float]
    exploration_rate: float
    wall_s: float
    """Since its first slice began."""
    seconds: dict[str, float]
    processor_s: float
    traffic: dict[str, Any]
    faults: dict[str, tuple[int, list[str]]]
    """So far, by kind: how many, and the first few."""
    spans: list[SpanRecord]
    """Of this slice, where a trace is wanted; no two overlap."""
    clock_s: float
    """This worker's ``perf_counter`` at the end."""
    lost_servers: tuple[int, ...]
    host: str
    pid: int


def worker_config(config: Config, number: int) -> Config:
    """A worker's own settings: its share of what is counted over the whole run."""
    workers = config.workers
    least = (config.n_steps + 2) * max(config.envs, 1) + config.batch_size
    return config.replace(
        engine="serial",
        learning_starts=-(-config.learning_starts // workers),
        buffer_size=max(least, config.buffer_size // workers),
        seed=config.seed if number == 0 else mix_seeds(config.seed, number),
        threads=config.threads or 1,
        step_latency_s=latency_of(config, number),
        replay_dir=os.path.join(config.replay_dir, f"worker-{number}") if config.replay_dir else "",
        env_groups=0,
    )


class Worker:
    def __init__(
        self,
        config: Config,
        number: int,
        lines: Sequence[Line],
        restarted_at: int = 0,
        traced: bool = False,
        clock: Callable[[], float] = time.monotonic,
        life: int = 0,
        is_late: bool = False,
    ) -> None:
        """``config`` is the run's; ``lines`` lead to its servers, in order.

        ``life`` counts those that had this number before. Who ``is_late`` comes when others have
        long begun, who must not wait while it fills its memory.
        """
        self._clock = clock
        self._faults = FaultLog()
        self._trace = Trace() if traced else None
        self._told_spans = 0
        self._servers: Servers
        self._updater: RemoteUpdater

        def remote(weights: Any, timers: Any) -> RemoteUpdater:
            self._servers = Servers(
                number, weights.data.numel(), lines, timers, lambda: make_compressor(config), life
            )
            self._servers.on_entering = self._fall_in_step
            self._updater = make_remote_updater(config, weights, self._servers)
            return self._updater

        self._own = worker_config(config, number)
        self._parts = serial.build(
            Setup(self._own, self._faults, restarted_at, self._trace),
            make_updater=remote,
            ladder=own_ladder(config, number),
        )
        self._processor_s = time.process_time()
        self._inside_s = 0.0
        """Spent on messages and waits in the middle of learning."""
        self._began_s: float | None = None
        self._is_late, self._has_joined = is_late, False
        self._share = 1.0
        self._updater.share = float(config.batch_size)
        self._lost: tuple[int, ...] = ()

    def work(self, order: WorkOrder) -> Report:
        """One slice: the loop goes on until time or steps are up, or a server is lost."""
        parts = self._parts
        parts.clock.elsewhere_env_steps = order.elsewhere_env_steps
        parts.learner.lr_scale = order.lr_scale
        if order.share != self._share:
            self._take_share(order.share)
        began_s = self._clock()
        until_s = began_s + order.slice_s
        self._began_s = began_s if self._began_s is None else self._began_s
        try:
            self._join(order)
            self._lost = ()
            self._servers.ping()
            before_s = self._apart_s()
            try:
                serial.run(
                    parts,
                    lambda: (
                        parts.clock.env_steps < order.until_env_steps and self._clock() < until_s
                    ),
                )
            finally:
                self._inside_s += self._apart_s() - before_s
        except ServersLost as error:
            self._lost = error.numbers
            if self._own.replay:
                # A burst was cut short: what it came to counts. (A rollout is begun again.)
                parts.clock.updates = self._updater.made
        return self._report()

    def _apart_s(self) -> float:
        seconds = self._parts.timers[0].seconds
        return seconds["communicate"] + seconds["idle"]

    def _take_share(self, share: float) -> None:
        """Collect and learn from less in each round, if others are quicker."""
        self._share = share
        parts, envs = self._parts, self._own.envs
        train_freq = max(1, round(share * self._own.train_freq / envs)) * envs
        samples = max(1, round(share * self._own.batch_size))
        parts.limiter.set_train_freq(train_freq)
        parts.learner.batch_size = samples
        self._updater.share = float(samples)

    def _join(self, order: WorkOrder) -> None:
        for number, line in order.renewed:
            self._servers.replace(number, line)
        if not self._has_joined:
            self._updater.join(takes_part=not self._is_late)
            self._parts.learner.move_target(1.0)
            self._has_joined = True
        elif self._parts.clock.updates == 0 and not self._servers.takes_part:
            # Its memory is filling, and others go on: it is to begin with the newest weights.
            self._updater.join(takes_part=False)
            self._parts.learner.move_target(1.0)
        elif order.renewed or self._lost:
            # Or a server that only could not be reached: what it has heard, it knows.
            self._updater.join(self._servers.takes_part)

    def _fall_in_step(self, first_round: int) -> None:
        """Who is late begins its first burst of updates somewhere in one of the others'.

        It is to end a burst with them, by leaving some updates out. Else all would collect in turns
        from now on, and be waited for. (A rollout is used up whole.)
        """
        if self._own.update == "sync" and self._own.replay:
            self._parts.limiter.forgive(first_round % self._own.gradient_steps)

    def _report(self) -> Report:
        parts = self._parts
        spans: list[SpanRecord] = []
        if self._trace is not None:
            every = self._trace.lane(LANE).spans()
            spans = apart(every[self._told_spans :])
            self._told_spans = len(every)
        seconds = dict(parts.timers[0].seconds)
        seconds["learn"] -= self._inside_s
        traffic = self._servers.traffic
        return Report(
            env_steps=parts.clock.env_steps,
            updates=parts.clock.updates,
            episodes=[(e.env, e.reward, e.length) for e in parts.collector.take_episodes()],
            metrics=parts.learner.read_metrics(),
            exploration_rate=parts.collector.exploration_rate(),
            wall_s=self._clock() - (self._began_s or 0.0),
            seconds=seconds,
            processor_s=time.process_time() - self._processor_s,
            traffic={
                **vars(traffic),
                "outcomes": +traffic.outcomes,
                "sent": [dict(counts) for counts in traffic.sent],
                "calls": list(traffic.calls),
            },
            faults={
                kind: (count, self._faults.first_messages(kind))
                for kind, count in self._faults.counts.items()
            },
            spans=spans,
            clock_s=time.perf_counter(),
            lost_servers=self._lost,
            host=self._host(),
            pid=os.getpid(),
        )  # fmt: skip

    def _host(self) -> str:
        return socket.gethostname()

    def close(self) -> None:
        self._parts.close()


class RemoteWorker(Worker):
    """A worker in a process of its own: its lines are made there."""

    def __init__(
        self,
        config: Config,
        number: int,
        handles: Sequence[Any],
        restarted_at: int,
        traced: bool,
        life: int,
        is_late: bool,
    ) -> None:
        ignore_sigterm_if_blocked()
        self._cluster = from_inside(TIMEOUT_S)
        self._node_ip = self._cluster.node_ip()
        lines = [self._line(shard, handle) for shard, handle in enumerate(handles)]
        super().__init__(config, number, lines, restarted_at, traced, life=life, is_late=is_late)

    def _line(self, shard: int, handle: Any) -> Line:
        return RemoteLine(self._cluster, handle, shard)

    def _host(self) -> str:
        """With its address: machines may be of one name."""
        return f"{super()._host()} ({self._node_ip})"

    def ping(self) -> bool:
        """Here."""
        return True

    def work(self, order: WorkOrder) -> Report:
        renewed = tuple((shard, self._line(shard, handle)) for shard, handle in order.renewed)
        try:
            return super().work(order._replace(renewed=renewed))
        except GivenUp:
            # Whoever gave it up could not reach it to end it, and its processor is wanted.
            os._exit(1)


def apart(spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    """Spans of one thread in order of time, those that have others inside cut around them."""
    cut: list[SpanRecord] = []
    inside: list[SpanRecord] = []
    for stage, start_s, end_s in spans:  # in the order in which they ended
        within = [span for span in inside if span[1] >= start_s]
        inside = [span for span in inside if span[1] < start_s]
        at_s = start_s
        for span in sorted(within, key=lambda span: span[1]):
            if span[1] > at_s:
                cut.append((stage, at_s, span[1]))
            at_s = max(at_s, span[2])
        if end_s > at_s:
            cut.append((stage, at_s, end_s))
        inside.append((stage, start_s, end_s))
    return sorted(cut, key=lambda span: span[1])
