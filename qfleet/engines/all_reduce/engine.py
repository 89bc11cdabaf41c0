"""The all-reduce engine, as rank 0 runs it: the folder, evaluations and checkpoints are its own.

Without a launcher, it starts the other ranks on this machine for the run. With torchrun or mpirun
they are there already and serve all runs of this process, one after another.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from qfleet.core.errors import RankLost
from qfleet.data.recorder import WRITE_TIMEOUT_S
from qfleet.engines import serial
from qfleet.engines.all_reduce.group import END, RUN, Group, LocalRanks, Order, connect
from qfleet.engines.all_reduce.rank import RankParts, build_rank, rank_config
from qfleet.engines.all_reduce.world import World, launched_world
from qfleet.engines.factories import check_replay_fits
from qfleet.engines.parts import EngineHook, Parts, Setup
from qfleet.telemetry.fleet import TRAFFIC, ShareRow, share_scalars, shares_of
from qfleet.telemetry.usage import Usage

REPORT_S = 5.0
"""Seconds between two reports of the other ranks."""


def build(setup: Setup) -> Parts:
    """Create the parts of rank 0, and the other ranks."""
    config = setup.config
    with contextlib.ExitStack() as made:
        group, ranks_here = _open_group(setup, made)
        try:
            parts = build_rank(setup, group, ranks_here)
            made.callback(parts.closing.close)
            if config.replay and not config.data:
                # Every rank's memory here, and those of all others when a checkpoint is written.
                held = ranks_here if parts.memory.device.type == "cpu" else 0
                shares = held + group.size - 1
                transitions = shares * rank_config(config, 0).replay_capacity
                check_replay_fits(config, parts.spec, transitions, torch.device("cpu"))
        except BaseException as error:
            group.close(error)
            raise
        made.callback(_dismiss, group)
        parts.closing = made.pop_all()
    parts.hooks.append(RanksHook(parts))
    ranks = f"{group.size} ranks" if group.size > 1 else "1 rank"
    parts.notes.append(f"{ranks}, {parts.config.batch_size} samples per update in all")
    return parts


def run(parts: Parts, keep_going: Callable[[], bool]) -> None:
    """Advance the loop of all ranks until ``keep_going`` returns False on this one."""
    assert isinstance(parts, RankParts)
    group = parts.group

    def lead() -> bool:
        is_going = keep_going()
        if is_going:
            group.give_order(Order.GO, parts.model.lr_scale)
        return is_going

    try:
        parts.bring_in_step()
        serial.run(parts, lead)
    except BaseException as error:
        group.close(error)
        raise


class RanksHook(EngineHook):
    """Adds faults of the other ranks to the run's, and an account of all ranks to its result."""

    def __init__(self, parts: RankParts) -> None:
        self._parts, self._group = parts, parts.group
        self._reported_s = time.monotonic()
        self._reports: dict[int, dict[str, Any]] = {}
        """The newest report of each other rank."""

    def on_turn(self, folder: Path) -> str | None:
        del folder
        if time.monotonic() - self._reported_s > REPORT_S:
            self._ask()
        return None

    def _ask(self) -> None:
        self._reported_s = time.monotonic()
        for rank in range(1, self._group.size):
            self._group.give_order(Order.SEND_REPORT, rank)
            self._reports[rank] = self._group.receive_state(rank)
            for kind, message in self._reports[rank].pop("faults"):
                self._parts.faults(kind, f"rank {rank}: {message}")

    def scalars(self, wall_s: float) -> Mapping[str, float | None]:  # noqa: ARG002
        rows = list[ShareRow]()
        for rank, report in enumerate((self._parts.report(), *self._reports.values())):
            seconds = report["seconds"]
            # Of the measured time: after a resume only rank 0 knows that of earlier invocations.
            rows.append((f"rank {rank}", None, shares_of(seconds, sum(seconds.values()))))
        return share_scalars(rows)

    def result(self) -> Mapping[str, Any]:
        group = self._group
        if not group.is_closed:
            with contextlib.suppress(RankLost):
                self._ask()
        ranks = [{"rank": 0, **self._parts.report()}]
        ranks += [{"rank": rank, **report} for rank, report in sorted(self._reports.items())]
        config, updates = self._parts.config, self._parts.clock.updates - self._parts.first_update
        # Not what the group has counted: recorded exchanges run without it.
        sent, messages = (updates * number for number in self._parts.updater.traffic)
        if self._parts.mesh is not None:
            for axis in self._parts.mesh[1:]:  # those of a copy, and of evaluations
                sent, messages = sent + axis.bytes_sent, messages + axis.messages
        fleet = {
            "ranks": ranks,
            "effective_batch_size": config.batch_size,
            "effective_learning_rate": config.learning_rate,
        }
        traffic = dict(zip(TRAFFIC, (sent, sent, messages), strict=True))
        return {"communication": traffic, "fleet": fleet}

    def usage(self, here: Usage) -> Usage:
        """Add the ranks that a launcher has started; others are children of this process."""
        others = list(self._reports.values())
        ranks = [self._parts.report(), *others]
        used_s, joules = here.processor_s, here.joules
        if launched_world() is not None:
            used_s += sum(rank["processor_s"] for rank in others)
        gpus = {(rank["host"], rank["device"]) for rank in ranks if rank["device"]}
        if len(gpus) > 1 or len({rank["host"] for rank in ranks}) > 1:
            joules = None  # only a part of it is measured here
        return Usage(used_s, here.device_s and here.device_s * len(gpus), joules)


def _dismiss(group: Group) -> None:
    if not group.is_closed:
        with contextlib.suppress(RankLost):
            group.give_order(Order.STOP)
        group.close()


def _open_group(setup: Setup, made: contextlib.ExitStack) -> tuple[Group, int]:
    """Return the group, not connected yet, and the number of its ranks on this machine."""
    config, world = setup.config, launched_world()
    processes: list[subprocess.Popen[bytes]] = []
    store: Store
    if world is None:
        # With a recording, they write the rest of it.
        ranks = LocalRanks(config.workers, 5.0 + (WRITE_TIMEOUT_S if config.record else 0.0))
        made.callback(ranks.close)
        world, store, number, processes = ranks.world, ranks.store, 0, ranks.processes
    else:
        store, number = _launched_store(world)
    told = {"config": asdict(config), "restarted_at": setup.restarted_at}
    store.set(RUN.format(number), json.dumps(told))
    group = Group(world, number, config.worker_timeout_s, store, processes)
    made.callback(group.close)
    return group, world.local_size


_launched: list[tuple[Store, Iterator[int]]] = []
"""The store of the ranks that a launcher started, and the numbers of their runs."""


def _launched_store(world: World) -> tuple[Store, int]:
    if not _launched:
        _launched.append((connect(world, not world.is_stored_elsewhere), itertools.count()))
        # The other ranks wait for the next run until this process ends.
        atexit.register(lambda: _launched[0][0].set(RUN.format(next(_launched[0][1])), END))
    store, numbers = _launched[0]
    return store, next(numbers)
