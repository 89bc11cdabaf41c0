"""An actor in a process of its own. In: orders and weights; out: reports and block messages.

It is the ordinary ``Actor`` with a network of its own on the CPU. With prioritised replay it also
computes the first priority of each transition with its own network. Every call is one slice of work
(``member_pool.py``).
"""

from __future__ import annotations

import functools
import socket
import time

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.agent.actor import Actor
from qfleet.agent.inference import HostInference
from qfleet.agent.schedules import own_ladder, rows_per_block
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds, mix_seeds
from qfleet.core.signals import ignore_sigterm_if_blocked
from qfleet.data.recorder import make_recorder
from qfleet.engines.actors.block_messages import BlockMessage, encode
from qfleet.engines.actors.messages import Order, Report
from qfleet.engines.actors.priorities import FirstPriorities
from qfleet.engines.cluster.own_core import take_core
from qfleet.engines.factories import make_objective
from qfleet.engines.torch_settings import set_threads
from qfleet.envs.factory import make_envs
from qfleet.envs.latency import latency_of
from qfleet.networks.factory import make_network
from qfleet.telemetry import usage
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Trace

HOST = torch.device("cpu")


def actor_seed(seed: int, number: int, life: int, restarted_at: int) -> int:
    """Return a seed of its own for every actor and for each of its lives."""
    salts = (restarted_at, number, life)
    # All or none: mixing in only those that are not 0 would make life 1 of actor 0 actor 1.
    return functools.reduce(mix_seeds, salts, seed) if any(salts) else seed


class RemoteActor:
    """An ``Actor`` that collects one block per call."""

    def __init__(
        self,
        config: Config,
        number: int,
        life: int = 0,
        restarted_at: int = 0,
        traced: bool = False,
    ) -> None:
        """``life``: how often it was replaced; ``restarted_at``: env steps at a resume."""
        ignore_sigterm_if_blocked()
        self._config, self._number, self._life = config, number, life
        seeds = Seeds.of(config.seed)
        own_seed = actor_seed(seeds.actor, number, life, restarted_at)
        self._faults: list[tuple[str, str]] = []
        self._lane = Trace().lane(f"actor {number}") if traced else None
        self._timers = Timers(self._lane)
        self._host = socket.gethostname()
        self._ended_s: float | None = None
        """End of its last slice, by ``perf_counter``."""
        env_seed = actor_seed(seeds.envs, number, life, restarted_at)
        self._envs = make_envs(
            config.replace(step_latency_s=latency_of(config, number), threads=1),
            config.envs,
            env_seed,
            training=True,
            on_fault=self._note_fault,
        )
        spec = self._spec = self._envs.spec
        set_threads(1, spec)  # other actors use the other cores
        self._network = make_network(config, spec, HOST, seeds.network)
        self._weights = FlatWeights(self._network)
        inference = HostInference(self._network, HOST, spec.obs_dtype, own_seed)
        rows = rows_per_block(config)
        ladder = own_ladder(config, number)
        envs = [self._envs]
        self._actor = Actor(envs, inference, config, self._timers, rows, own_seed, ladder=ladder)
        self._recorder = (
            make_recorder(config, spec, config.envs, self._note_fault) if config.record else None
        )
        self._rows_made = 0
        objective = make_objective(config, HOST, own_seed)
        self._priorities = (
            FirstPriorities(config, spec, self._network, objective, rows)
            if config.prioritized_replay
            else None
        )
        self._core = take_core(config.replace(threads=1))
        # Not for every block, whose time a look for children would add to, if there are none.
        self._used_s = usage.processor_s if config.vectorize == "async" else time.process_time
        self._processor_s = self._used_s()
        """Processor time at its last report; the start of the process is not counted."""

    def work(
        self, order: Order, weights: NDArray[np.float32] | None
    ) -> tuple[Report, BlockMessage]:
        """Collect one block; use ``weights`` from now on unless they are None."""
        began_s = time.perf_counter()
        since_s = began_s if self._ended_s is None else self._ended_s
        before = dict(self._timers.seconds)
        self._timers.add("idle", since_s, began_s)
        if weights is not None:
            with self._timers.span("communicate"):
                np.copyto(self._weights.data.numpy(), weights)
        block = self._actor.collect(order.rows, order.version, order.progress)
        if self._recorder is not None:
            self._recorder.add(block)
        priority = None
        if self._priorities is not None:
            with self._timers.span("learn"):
                priority = self._priorities(block)
        with self._timers.span("communicate"):
            message = encode(
                block,
                self._number,
                self._life,
                self._rows_made,
                self._spec.num_actions,
                priority,
                self._config.replay_compression,
            )
        self._rows_made += block.rows
        faults, self._faults = self._faults, []
        processor_s, self._processor_s = self._processor_s, self._used_s()
        self._ended_s = time.perf_counter()
        return (
            Report(
                rows=block.rows,
                version=block.version,
                block_bytes=message.nbytes,
                plain_bytes=message.plain_nbytes,
                weight_bytes=0 if weights is None else weights.nbytes,
                messages=2 if weights is None else 3,
                host=self._host,
                began_s=began_s,
                wall_s=self._ended_s - since_s,
                processor_s=self._processor_s - processor_s,
                episodes=self._actor.take_episodes(),
                faults=faults,
                seconds={stage: s - before[stage] for stage, s in self._timers.seconds.items()},
                spans=[] if self._lane is None else self._lane.take(),
            ),
            message,
        )

    def finish_recording(self) -> list[str]:
        """Write the rest of what ``--record`` recorded; return what failed. No work may follow."""
        if self._recorder is not None:
            self._recorder.close()
        return [message for _, message in self._faults]

    def ping(self) -> None:
        """Answer between two slices; an actor whose slice hangs does not answer."""

    def _note_fault(self, kind: str, message: str) -> None:
        self._faults.append((kind, f"actor {self._number}: {message}"))
