"""One worker: environments, memory and learner of its own, and weights that are on servers.

In: an order before each slice of work; out: a report after it. ``Worker`` is a plain class that
runs the loop of the serial engine, with an updater that calls the servers.
"""

from __future__ import annotations

import math
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
from qfleet.data.dataset_memory import DatasetMemory
from qfleet.engines import offline, serial
from qfleet.engines.cluster.own_core import take_core
from qfleet.engines.cluster.ray_cluster import TIMEOUT_S, from_inside
from qfleet.engines.parameter_server.client import Line, RemoteLine, Servers, ServersLost
from qfleet.engines.parameter_server.compression import make_compressor
from qfleet.engines.parameter_server.updaters import (
    RemoteGradients,
    RemoteUpdater,
    fetches_before_gradients,
    make_remote_updater,
)
from qfleet.engines.parts import Setup
from qfleet.envs.latency import latency_of
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.trace import SpanRecord, Trace
from qfleet.telemetry.usage import processor_s

LANE = "learner"


class WorkOrder(NamedTuple):
    """The limits and settings of a worker's next slice."""

    elsewhere_env_steps: int
    """Env steps of all other workers so far."""
    until_env_steps: int
    """The slice ends when the worker has taken this many env steps in all."""
    slice_s: float
    """The slice ends after this time."""
    lr_scale: float = 1.0
    share: float = 1.0
    """Steps and samples per round, as a share of those of the fastest worker."""
    renewed: tuple[tuple[int, Any], ...] = ()
    """Number and connection of each server that was replaced since the last slice."""
    rows: range | None = None
    """With a dataset: the rows of its order to read, all in this slice."""


class Report(NamedTuple):
    """What a worker did: totals of this life, and episodes and spans of this slice."""

    env_steps: int
    updates: int
    episodes: list[tuple[int, float, int]]
    """Env, return and length of each episode of this slice."""
    metrics: dict[str, float]
    exploration_rate: float
    wall_s: float
    """Time since its first slice began."""
    slice_s: float
    """Time of this slice."""
    seconds: dict[str, float]
    processor_s: float
    traffic: dict[str, Any]
    faults: dict[str, tuple[int, list[str]]]
    """By kind: the number of faults so far, and the first few messages."""
    spans: list[SpanRecord]
    """The spans of this slice, without overlap, if a trace is recorded."""
    clock_s: float
    """This worker's ``perf_counter`` at the end."""
    lost_servers: tuple[int, ...]
    host: str
    pid: int


def worker_config(config: Config, number: int) -> Config:
    """Return a worker's own settings: its share of those that count over the whole run."""
    workers = config.workers
    least = (config.n_steps + 2) * max(config.envs, 1) + config.batch_size
    return config.replace(
        engine="offline" if config.data else "serial",
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
        life: int = 0,
        is_late: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``config`` is the run's; ``lines`` are the connections to its servers, in order.

        ``life`` counts the earlier workers with this number. ``is_late``: the other workers have
        begun already, and must not wait while this one fills its memory.
        """
        self._clock, self._host = clock, socket.gethostname()
        self._faults = FaultLog()
        self._trace = Trace() if traced else None
        self._servers: Servers
        self._updater: RemoteUpdater

        def remote(weights: Any, timers: Any) -> RemoteUpdater:
            self._servers = Servers(
                number, weights.data.numel(), lines, timers, lambda: make_compressor(config), life
            )
            self._servers.on_entering = self._align_bursts
            self._updater = make_remote_updater(config, weights, self._servers)
            return self._updater

        self._own = worker_config(config, number)
        setup = Setup(self._own, self._faults, restarted_at, self._trace)
        if config.data:
            variant = offline.Variant(updater=remote, order_seed=config.seed)
            self._parts = offline.build(setup, variant)
        else:
            ladder = own_ladder(config, number)
            self._parts = serial.build(setup, updater_factory=remote, ladder=ladder)
        fetches = fetches_before_gradients(config) or config.overlap
        if isinstance(self._updater, RemoteGradients) and fetches:
            self._updater.own_clock = self._parts.clock
        self._processor_s = processor_s()
        self._inside_s = 0.0
        """Time of messages and waits that the timers also count as learning."""
        self._began_s: float | None = None
        self._is_late, self._has_joined = is_late, False
        self._share = 1.0
        self._updater.share = float(config.batch_size)
        self._lost: tuple[int, ...] = ()

    def work(self, order: WorkOrder) -> Report:
        """Run the loop until the slice's time or steps are used up, or a server is lost."""
        parts, clock = self._parts, self._parts.clock
        env_steps, updates = clock.env_steps, clock.updates
        clock.elsewhere_env_steps = order.elsewhere_env_steps
        parts.learner.lr_scale = order.lr_scale
        if order.share != self._share:
            self._take_share(order.share)
        began_s = self._clock()
        until_s = math.inf if order.rows else began_s + order.slice_s
        if order.rows:
            self._go_to(order.rows)
        self._began_s = began_s if self._began_s is None else self._began_s
        try:
            self._join(order)
            self._lost = ()
            self._servers.ping()
            before_s = self._waiting_s()
            try:
                serial.run(
                    parts,
                    lambda: clock.env_steps < order.until_env_steps and self._clock() < until_s,
                )
            finally:
                self._inside_s += self._waiting_s() - before_s
            self._updater.finish()
        except ServersLost as error:
            self._lost = error.numbers
            if self._own.replay:
                # The burst was interrupted: its finished updates count. (A rollout starts again.)
                clock.updates = self._updater.made
            if order.rows:
                # Rows without an update are not read: they are given out again. A gradient of the
                # piece before may be lost too; its rows were counted.
                made = max(0, clock.updates - updates)
                clock.env_steps = env_steps + made * self._own.batch_size
                parts.limiter.forgive(parts.limiter.updates_owed())
        return self._report(self._clock() - began_s)

    def _waiting_s(self) -> float:
        seconds = self._parts.timers[0].seconds
        return seconds["communicate"] + seconds["idle"]

    def _go_to(self, rows: range) -> None:
        memory, collector = self._parts.memory, self._parts.collector
        assert isinstance(memory, DatasetMemory)
        assert isinstance(collector, offline.NoCollector)
        memory.go_to_row(rows.start)
        collector.rows_left = len(rows)

    def _take_share(self, share: float) -> None:
        """Collect and learn from less in each round, if other workers are faster."""
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
            # Its memory is not full enough yet, and the others go on: fetch the newest weights.
            self._updater.join(takes_part=False)
            self._parts.learner.move_target(1.0)
        elif order.renewed or self._lost:
            # Also after a connection was lost: the server reports which messages it received.
            self._updater.join(self._servers.takes_part)

    def _align_bursts(self, first_round: int) -> None:
        """Skip some updates, so that a late worker ends its first burst with the other workers.

        It joins in the middle of a burst of theirs. Without this, the workers would collect at
        different times from then on and wait for each other. (A rollout is always used in full.)
        """
        if self._own.update == "sync" and self._own.replay:
            self._parts.limiter.forgive(first_round % self._own.gradient_steps)

    def _report(self, slice_s: float) -> Report:
        parts = self._parts
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
            slice_s=slice_s,
            seconds=seconds,
            processor_s=processor_s() - self._processor_s,
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
            spans=[] if self._trace is None else without_overlap(self._trace.lane(LANE).take()),
            clock_s=time.perf_counter(),
            lost_servers=self._lost,
            host=self._host,
            pid=os.getpid(),
        )

    def finish_recording(self) -> list[str]:
        """Write the rest of what ``--record`` recorded; return what failed. No work may follow."""
        before = self._faults.counts.get("record", 0)
        self.close()
        after = self._faults.counts.get("record", 0)
        return self._faults.first_messages("record") if after > before else []

    def close(self) -> None:
        self._parts.close()


class RemoteWorker(Worker):
    """A worker in a process of its own, which connects to the servers' handles."""

    def __init__(self, config: Config, number: int, handles: Sequence[Any], *others: Any) -> None:
        ignore_sigterm_if_blocked()
        self._cluster = from_inside(TIMEOUT_S)
        lines = [RemoteLine(self._cluster, handle, shard) for shard, handle in enumerate(handles)]
        super().__init__(config, number, lines, *others)
        self._core = take_core(config)
        self._host += f" ({self._cluster.node_ip()})"  # several machines may have one name

    def ping(self) -> bool:
        """Return True: a cheap call that proves the process is alive."""
        return True

    def work(self, order: WorkOrder) -> Report:
        renewed = tuple((n, RemoteLine(self._cluster, handle, n)) for n, handle in order.renewed)
        try:
            return super().work(order._replace(renewed=renewed))
        except GivenUp:
            # The supervisor cannot reach this process to end it, and needs its processor.
            os._exit(1)


def without_overlap(spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    """Return the spans of one thread by time; a span with others inside is cut around them."""
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
