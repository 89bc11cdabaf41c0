"""Ranks that measure the updates of a layout, with and without their exchanges."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from qfleet.core.errors import ConfigError
from qfleet.engines.all_reduce.layout_rates import (
    SIZES,
    MeasuredRanks,
    RepeatingGroup,
    measure_plain,
)
from qfleet.engines.all_reduce.world import World
from qfleet.training.parallel_advice import measured_settings


def test_a_repeated_update_exchanges_nothing_and_keeps_whole_numbers() -> None:
    group = RepeatingGroup(World(0, 2, 0, 2, "127.0.0.1", 1), 0, 10.0, HashStore())
    group.noted = [("all", 8, None), ("pair", 16, torch.tensor([3, 4])), ("all", 8, None)]
    for _ in range(2):
        with group.repeating():
            own = torch.tensor([1.0, 2.0])
            group.sum_within(None, own)
            shape = torch.empty(2, dtype=torch.int64)
            group.receive_within(None, shape, 1)
            gathered = group.gather_within(None, own, 2)
        assert own.tolist() == [1.0, 2.0]
        assert shape.tolist() == [3, 4]
        assert [part.tolist() for part in gathered] == [[1.0, 2.0]] * 2
    with pytest.raises(ValueError, match="process group"):  # not connected: a real exchange fails
        group.sum_within(None, own)


def test_ranks_measure_one_layout_after_another() -> None:
    """4 → 16 → 2 weights; a layout that is refused does not end the ranks."""
    config = measured_settings("CartPole-v1", {"net_arch": (16,), "device": "cpu"}).config
    ranks = config.replace(engine="all-reduce", workers=2, worker_timeout_s=30.0)
    whole = 4 * 5 * (4 * 16 + 16 + 16 * 2 + 2)  # weights, gradient, target weights, two moments
    (plain,) = measure_plain(config, 0.05)
    assert (plain.state_bytes, plain.exchanges) == (whole, [])
    with contextlib.closing(MeasuredRanks(2)) as measured:
        data = measured.measure(ranks, 0.05)
        with pytest.raises(ConfigError, match="pipeline_parallel"):
            measured.measure(ranks.replace(net_arch=(), pipeline_parallel=2), 0.05)
        tensor = measured.measure(ranks.replace(tensor_parallel=2), 0.05)
    assert [rank.state_bytes for rank in data] == [whole, whole]
    assert ("all", whole // 5, 1.0) in [tuple(e) for e in data[0].exchanges]  # the gradient
    # By outputs, then by inputs: all of the last bias is on both ranks.
    assert [rank.state_bytes for rank in tensor] == [(whole + 4 * 5 * 2) // 2] * 2
    for rank in (*data, *tensor):
        assert min(rank.compute_s, rank.update_s) > 0
        assert all(len(seconds) == len(SIZES) for seconds in rank.exchange_s.values())
