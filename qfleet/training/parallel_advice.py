"""Which of data, tensor and pipeline parallelism pays: `qfleet doctor --parallel`.

In: a configuration and a number of ranks. Out: a ``Row`` per layout, with its predicted and its
measured rate of updates at the same batch size, and the layout to use.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from qfleet.agent.devices import resolve_device
from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.core.errors import (
    ConfigError,
    QfleetError,
    RankLost,
    UserError,
    lacks_memory,
)
from qfleet.engines.all_reduce.layout_rates import (
    BURST,
    SIZES,
    RankReport,
    measure_plain,
    measure_ranks,
)
from qfleet.envs.factory import make_envs
from qfleet.networks.factory import build_network
from qfleet.networks.parallel.schedule import MICRO_BATCHES_PER_STAGE
from qfleet.telemetry.faults import FaultLog

WORTHWHILE = 1.1
"""Least gain of ranks over one process, which is simpler and whose rate varies less."""


class Sizes(NamedTuple):
    """A layout of ranks: the sizes of its axes."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    threads: int = 0
    """Of one process; 0: torch's number."""

    def __str__(self) -> str:
        if self.ranks == 1:
            return "one process" + (", 1 thread" if self.threads == 1 else "")
        axes = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}
        return " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1)

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def options(self) -> str:
        """The options of ``qfleet train`` for this layout."""
        if self.ranks == 1:
            return f"--threads {self.threads}" if self.threads else ""
        parts = {"tensor": self.tensor, "pipeline": self.pipeline}
        split = [f"--{name}-parallel {size}" for name, size in parts.items() if size > 1]
        return " ".join(["--engine all-reduce", f"--workers {self.ranks}", *split])


@dataclass(frozen=True)
class Row:
    """A layout and its rates in updates per second; None where it is not possible."""

    sizes: Sizes
    predicted: float | None = None
    measured: float | None = None
    bytes_per_rank: int | None = None
    """Most bytes of weights, gradient, target weights and moments that a rank holds."""
    refused: str = ""


def layouts(ranks: int) -> list[Sizes]:
    """Return all layouts of this number of ranks, those with few axes first."""
    found = [
        Sizes(ranks // (tensor * pipeline), tensor, pipeline)
        for tensor in range(1, ranks + 1)
        for pipeline in range(1, ranks + 1)
        if ranks % (tensor * pipeline) == 0
    ]
    return sorted(found, key=lambda sizes: (sum(size > 1 for size in sizes), -sizes.data, sizes))


def predict_update_s(sizes: Sizes, ranks: Sequence[RankReport]) -> float:
    """Return the seconds of an update: those of computing and of its exchanges, without waiting.

    ``ranks`` of the first copy are numbered stage by stage. Stages that take ``w`` seconds for a
    batch of ``m`` micro-batches end after Σ w/m + (m − 1) max w/m: the first micro-batch passes all
    stages, and the others follow at the pace of the slowest one.
    """
    busy_s = [rank.compute_s + exchange_seconds(rank.exchanges, rank.exchange_s) for rank in ranks]
    if sizes.pipeline == 1:
        return max(busy_s)
    tensor, micro_batches = sizes.tensor, MICRO_BATCHES_PER_STAGE * sizes.pipeline
    copies = np.reshape(busy_s, (sizes.data, sizes.pipeline, tensor)).max(2)
    slots = (copies.sum(1) + (micro_batches - 1) * copies.max(1)) / micro_batches
    return float(slots.max())


def exchange_seconds(
    exchanges: Sequence[tuple[str, int, float]], measured: Mapping[str, Sequence[float]]
) -> float:
    """Return the seconds of exchanges (kind, bytes, number), from those of some sizes.

    Between these sizes the time is a straight line; beyond the largest it grows with the bytes.
    """
    total_s = 0.0
    for kind, nbytes, count in exchanges:
        longer = max(1.0, nbytes / SIZES[-1])
        total_s += count * longer * float(np.interp(nbytes, SIZES, measured[kind]))
    return total_s


def choose(rows: Sequence[Row]) -> Row:
    """Return the row with the highest measured rate; one process if ranks gain little over it."""
    measured = [row for row in rows if row.measured is not None]
    if not measured:
        raise UserError(f"no layout can train this network: {rows[0].refused}")
    best = max(measured, key=lambda row: row.measured or 0.0)
    plain = next((row for row in measured if row.sizes.ranks == 1), best)
    return plain if (best.measured or 0) < WORTHWHILE * (plain.measured or 0) else best


def measure_layouts(config: Config, ranks: int, seconds: float) -> list[Row]:
    """Measure one process and all layouts of ``ranks`` ranks, one after another."""
    # With one thread too: two threads of a small network are slower on cores that other programs
    # use (240 instead of 1,900 updates per second of an MLP of 386 weights, on two such cores).
    numbers = (0, 1) if config.engine == "serial" else (0,)
    plain = [
        _row(Sizes(threads=n), partial(measure_plain, config.replace(threads=n), seconds))
        for n in numbers
    ]
    rows = [max(plain, key=lambda row: row.measured or 0.0)]
    for sizes in layouts(ranks):
        split = config.replace(
            engine="all-reduce", workers=ranks,
            tensor_parallel=sizes.tensor, pipeline_parallel=sizes.pipeline,
        )  # fmt: skip
        rows.append(_row(sizes, partial(measure_ranks, split, seconds)))
    return rows


def _row(sizes: Sizes, measure: Callable[[], list[RankReport]]) -> Row:
    gc.collect()  # the parts of a run refer to each other: the last layout's are still in memory
    try:
        ranks = measure()
    except (QfleetError, RuntimeError, MemoryError) as error:
        # The operating system kills a rank for want of memory. Only rank 0 sees its exit status:
        # another one may report first that it is gone. What a rank says of itself is a fault.
        is_killed = isinstance(error, RankLost) and re.search("SIGKILL|was killed", str(error))
        if not (isinstance(error, UserError) or is_killed or lacks_memory(error)):
            raise
        return Row(sizes, refused=" ".join(str(error).split())[:200])
    return Row(
        sizes,
        1 / predict_update_s(sizes, ranks),
        1 / max(rank.update_s for rank in ranks),
        max(rank.state_bytes for rank in ranks),
    )


class Measured(NamedTuple):
    """The settings that are measured, and what they are of."""

    config: Config
    device: str
    weights: int
    """Weights of the whole network."""


def measured_settings(env: str, fields: Mapping[str, object]) -> Measured:
    """Return the settings of a run of this environment, as they are measured.

    They are those of its preset with ``fields``, with one environment, bursts of updates, and a
    memory of few transitions.
    """
    config, _ = resolve(env, fields=fields)
    if not config.replay:
        raise ConfigError(
            f"--parallel measures updates from replay, which {env} has not; use an "
            "environment whose preset has it, such as CartPole-v1"
        )
    config = config.replace(
        envs=1, env_groups=1, train_freq=1, gradient_steps=BURST, block_rows=1, learning_starts=0,
        eval_freq=0, buffer_size=config.batch_size + 1024,
    )  # fmt: skip
    validate(config)
    made = make_envs(config, 1, seed=0, training=True, on_fault=FaultLog())
    with contextlib.closing(made) as envs, torch.device("meta"):
        device = resolve_device(config.device, envs.spec).type
        network = build_network(envs.spec, config)
    config = config.replace(engine="serial" if device == "cpu" else "pipeline")
    return Measured(config, device, sum(weight.numel() for weight in network.parameters()))
