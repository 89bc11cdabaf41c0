"""The rate of updates of one layout of ranks, and what it is made of (`qfleet doctor --parallel`).

In: the configuration of an all-reduce run, and the ranks. Out: a ``RankReport`` of each rank. The
ranks build what a run would build and learn from a memory of zeros, without steps of environments.
Then all ranks repeat updates without exchanges, at the same time, so that the time of computing
includes what ranks take from each other where they share cores or a GPU.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from qfleet.agent.learner import Learner
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import UserError
from qfleet.engines.all_reduce.group import RUN, Group, LocalRanks
from qfleet.engines.all_reduce.mesh import Axis
from qfleet.engines.all_reduce.rank import build_rank
from qfleet.engines.all_reduce.world import World
from qfleet.engines.parts import LoopParts, Setup
from qfleet.engines.recording import blank_block
from qfleet.engines.registry import build
from qfleet.engines.torch_settings import TorchSettings
from qfleet.telemetry.faults import FaultLog

SIZES = (256, 2**16, 2**20, 2**24)
"""Bytes of the exchanges that are timed."""
BURST = 8
"""Updates at a time, as a run makes them, unless a network is so large that they take too long."""
FILLED_ROWS = 64
"""Rows in the memory that samples are drawn from."""
REPEATS = 5
"""Slices of a measurement. The fastest counts: other programs can only make one slower."""


@dataclass(frozen=True)
class RankReport:
    """What one rank measured of its layout."""

    update_s: float
    """Seconds of an update."""
    compute_s: float
    """Seconds of an update without its exchanges."""
    state_bytes: int
    """Weights, gradient, target weights and moments of this rank."""
    exchanges: list[tuple[str, int, float]]
    """Kind ("all" ranks or a "pair"), bytes and number of the exchanges of an update."""
    exchange_s: dict[str, list[float]]
    """Kind → seconds of an exchange of each of ``SIZES``."""


class CountingGroup(Group):
    """Ranks that count the exchanges of their updates, and can leave them out."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.counted = Counter[tuple[str, int]]()
        """Kind and bytes → number of exchanges."""
        self.is_silent = False
        """Whether exchanges are left out."""

    def count(self, kind: str, tensor: Tensor) -> bool:
        """Count an exchange; return whether it is to be made."""
        self.counted[kind, tensor.nbytes] += 1
        return not self.is_silent


class CountingAxis(Axis):
    """These ranks along an axis of the mesh."""

    def __init__(self, group: CountingGroup, every: Sequence[Sequence[int]]) -> None:
        super().__init__(group, every)
        self._counting, self._counts = group, group.count

    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        if self._counts("all", tensor):
            super()._reduce(tensor, operation)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return super().gather(tensor) if self._counts("all", tensor) else [tensor] * self.size

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        if self._counts("all", tensor):
            super().broadcast(tensor, rank)

    def send(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        # The receiver counts it: sending does not wait.
        return (lambda: None) if self._counting.is_silent else super().send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        if self._counts("pair", tensor):
            super().receive(tensor, rank)
        else:
            tensor.zero_()  # memory that was never written may hold slow numbers


def measure_ranks(config: Config, seconds: float) -> list[RankReport]:
    """Start ``config.workers`` ranks, of which this process is the first; return their reports."""
    config = validate(config)
    ranks = LocalRanks(config.workers)
    try:
        told = {"config": asdict(config), "measured_s": seconds}
        ranks.store.set(RUN.format(0), json.dumps(told))
        return measure_rank(ranks.world, ranks.store, config, seconds, ranks.processes)
    finally:
        ranks.close()


def measure_rank(
    world: World,
    store: Store,
    config: Config,
    seconds: float,
    started: Sequence[subprocess.Popen[bytes]] = (),
) -> list[RankReport]:
    """Measure as one of the ranks; return the reports of all."""
    group = CountingGroup(world, 0, config.worker_timeout_s, store, started)
    settings = TorchSettings()
    try:
        with contextlib.closing(
            build_rank(Setup(config, FaultLog()), group, world.local_size, CountingAxis)
        ) as parts:
            report = _measure(parts, group, seconds)
            told = group.meet("report", json.dumps(asdict(report)))
    except UserError:  # all ranks raise it, so that none has to report it to the others
        group.close()
        raise
    except BaseException as error:
        group.close(error)
        raise
    finally:
        settings.restore()
    group.close()
    return [RankReport(**json.loads(text)) for text in told]


def _measure(parts: LoopParts, group: CountingGroup, seconds: float) -> RankReport:
    pace = _pace(parts, seconds, lambda s: max(float(t) for t in group.meet("update", str(s))))
    group.counted.clear()
    update_s = pace.update_seconds(parts.learner)
    exchanges = [(*exchange, number / pace.updates) for exchange, number in group.counted.items()]
    group.meet("measure updates", "")
    group.is_silent = True
    compute_s = pace.update_seconds(parts.learner)
    group.is_silent = False
    group.meet("measure computing", "")
    exchange_s = time_exchanges(Axis(group, [range(group.size)]), parts.device)
    return RankReport(update_s, compute_s, state_bytes(parts.learner), exchanges, exchange_s)


def measure_plain(config: Config, seconds: float) -> list[RankReport]:
    """Measure one process with the whole network, without ranks."""
    settings = TorchSettings()
    try:
        parts = build(validate(config), FaultLog())
        assert isinstance(parts, LoopParts)
        with contextlib.closing(parts):
            pace = _pace(parts, seconds, lambda first_s: first_s)
            update_s = pace.update_seconds(parts.learner)
            return [RankReport(update_s, update_s, state_bytes(parts.learner), [], {})]
    finally:
        settings.restore()


class Pace(NamedTuple):
    """How updates are timed."""

    device: torch.device
    burst: int
    """Updates at a time."""
    bursts: int
    """In each slice of a measurement."""
    slices: int

    @property
    def updates(self) -> int:
        return self.slices * self.bursts * self.burst

    def update_seconds(self, learner: Learner) -> float:
        """Return the seconds of an update in the fastest slice."""

        def learn() -> None:
            for _ in range(self.bursts):
                learner.learn(self.burst)

        fastest_s = min(_seconds(learn, self.device) for _ in range(self.slices))
        return fastest_s / (self.bursts * self.burst)


def _pace(parts: LoopParts, seconds: float, agree: Callable[[float], float]) -> Pace:
    """Fill the memory and make the first updates; return how to time the next ones.

    ``agree`` returns the seconds of an update on the slowest rank, given those on this one.
    """
    parts.memory.extend(blank_block(parts.spec, parts.config.envs, FILLED_ROWS))
    learn = parts.learner.learn
    learn(1)  # the first update also allocates
    slice_s, first_s = seconds / REPEATS, agree(_seconds(partial(learn, 1), parts.device))
    if BURST * first_s > slice_s:  # a large network
        return Pace(parts.device, 1, max(1, round(slice_s / first_s)), 3)
    learn(BURST)
    return Pace(parts.device, BURST, round(slice_s / (BURST * first_s)), REPEATS)


def state_bytes(learner: Learner) -> int:
    """Return the bytes of weights, gradient, target weights and the optimiser's moments."""
    state = learner.state_dict()
    vectors = [learner.weights.grad, *(state[name] for name in state if name.endswith("weights"))]
    vectors += [value for value in state["optimiser"].values() if value.dim()]
    return sum(vector.nbytes for vector in vectors)


def time_exchanges(ranks: Axis, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of a sum of all ranks, and of a message between two, for ``SIZES``."""

    def there_and_back(tensor: Tensor) -> None:
        for sender in (0, 1):
            if ranks.rank == sender:
                ranks.send(tensor, 1 - sender)()
            elif ranks.rank == 1 - sender:
                ranks.receive(tensor, sender)

    def fastest_s(exchange: Callable[[Tensor], None], nbytes: int) -> float:
        tensor = torch.zeros(nbytes // 4, device=device)
        exchange(tensor)
        return min(_seconds(partial(exchange, tensor), device) for _ in range(REPEATS))

    return {
        "all": [fastest_s(ranks.sum, nbytes) for nbytes in SIZES],
        "pair": [fastest_s(there_and_back, nbytes) / 2 for nbytes in SIZES],
    }


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    began_s = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began_s
