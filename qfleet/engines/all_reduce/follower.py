"""A rank other than 0: it trains as rank 0 says, and writes no files of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from qfleet.config.config import Config
from qfleet.core.errors import QfleetError, RankLost, UserError, one_line
from qfleet.engines import serial
from qfleet.engines.all_reduce.group import END, GONE, RUN, Group, Order, connect
from qfleet.engines.all_reduce.layout_rates import measure_rank
from qfleet.engines.all_reduce.rank import RankParts, build_rank
from qfleet.engines.all_reduce.split_model import SplitModel
from qfleet.engines.all_reduce.world import World, launched_world, see_own_gpu
from qfleet.engines.parts import Setup
from qfleet.telemetry.faults import FaultLog


def follow() -> NoReturn:
    """Serve the runs of rank 0 until its process ends, then end this one."""
    world = launched_world()
    assert world is not None, "a rank is started by rank 0 or by a launcher"
    see_own_gpu(world)
    try:
        _serve(world)
    except QfleetError as error:
        _end(f"qfleet: rank {world.rank}: {error}", error.exit_code)
    except Exception as error:
        _end(f"qfleet: rank {world.rank}: {one_line(error)}", 1)
    _end("", 0)


def _end(line: str, code: int) -> NoReturn:
    # In one write, newline included: other ranks may print at the same moment.
    sys.stderr.write(f"{line}\n" if line else "")
    sys.stderr.flush()
    sys.stdout.flush()
    # Not sys.exit: threads of an environment must not keep the process.
    os._exit(code)


def _serve(world: World) -> None:
    store, number = connect(world, serves=False), 0
    while (told := _next_run(store, number)) != END:
        with _deaf_to_signals():
            _train(world, number, store, json.loads(told))
        number += 1


def _next_run(store: Store, number: int) -> str:
    key = RUN.format(number)
    try:
        while not store.check([key]):
            time.sleep(0.05)
        return bytes(store.get(key)).decode()
    except RuntimeError:  # rank 0 serves it
        if number:
            return END
        raise RankLost(GONE) from None


@contextlib.contextmanager
def _deaf_to_signals() -> Iterator[None]:
    """A launcher signals all ranks: rank 0 stops the run, with a checkpoint that needs this one."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    # Not SIG_IGN, which the processes that an environment starts would inherit.
    earlier = [signal.signal(number, lambda *_: None) for number in numbers]
    yield
    for number, handler in zip(numbers, earlier, strict=True):
        signal.signal(number, handler)


def _train(world: World, number: int, store: Store, told: dict[str, Any]) -> None:
    config = Config(**told["config"])
    if "measured_s" in told:  # qfleet doctor --parallel
        with contextlib.suppress(UserError):  # rank 0 shows it
            measure_rank(world, store, config, told["measured_s"])
        return
    group = Group(world, number, config.worker_timeout_s, store)
    faults = UnsentFaults()
    try:
        parts = build_rank(Setup(config, faults, told["restarted_at"]), group, world.local_size)
        with contextlib.closing(parts):
            if _obey(parts, faults):  # rank 0 sends what all begin with
                serial.run(parts, lambda: _obey(parts, faults))
        group.close()
    except BaseException as error:
        group.close(error)
        raise


class UnsentFaults(FaultLog):
    """Also keeps the faults that rank 0 does not know yet."""

    def __init__(self) -> None:
        super().__init__()
        self._unsent: list[tuple[str, str]] = []

    def __call__(self, kind: str, message: str) -> None:
        super().__call__(kind, message)
        self._unsent.append((kind, message))

    def take(self) -> list[tuple[str, str]]:
        taken, self._unsent = self._unsent, []
        return taken


def _obey(parts: RankParts, faults: UnsentFaults) -> bool:
    """Follow the orders of rank 0 until one of them is to begin, to go on or to stop."""
    group = parts.group
    while True:
        order, number = group.take_order()
        if order == Order.GO:
            parts.model.lr_scale = number
        if order in (Order.GO, Order.STOP):
            return order == Order.GO
        if order in (Order.SEND_PIECE, Order.FORWARD):
            assert isinstance(parts.model, SplitModel)
            model = parts.model
            (model.follow if order == Order.FORWARD else model.send_piece)(int(number))
            continue
        if number != group.rank:
            continue
        if order == Order.TAKE_STATE:
            parts.get_in_step()
            return True
        if order == Order.SEND_STATE:
            group.send_state(parts.own_state(), 0)
        else:
            group.send_state({**parts.report(), "faults": faults.take()}, 0)
