"""Ranks that measure the updates of a layout, with and without their exchanges."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from qfleet.engines.all_reduce.layout_rates import (
    SIZES,
    CountingAxis,
    CountingGroup,
    measure_plain,
    measure_ranks,
)
from qfleet.engines.all_reduce.world import World
from qfleet.training.parallel_advice import measured_settings


class Alone(CountingAxis):
    """One of two ranks, which are not connected."""

    def __init__(self, group: CountingGroup) -> None:
        self._group = self._counting = group
        self._counts, self.size = group.count, 2
        self._ranks, self._gloo, self._nccl = [0, 1], None, None
        self.bytes_sent = self.messages = 0


def test_silent_ranks_exchange_nothing_and_count_everything() -> None:
    group = CountingGroup(World(0, 2, 0, 2, "127.0.0.1", 1), 0, 10.0, HashStore())
    axis, own = Alone(group), torch.tensor([1.0, 2.0])
    group.is_silent = True
    axis.sum(own)
    axis.least(own)
    axis.broadcast(own, 1)
    axis.send(own, 1)
    assert [part.tolist() for part in axis.gather(own)] == [[1.0, 2.0]] * 2
    assert own.tolist() == [1.0, 2.0]
    axis.receive(received := torch.full((3,), torch.nan), 1)
    assert received.tolist() == [0.0] * 3
    assert group.counted == {("all", 8): 4, ("pair", 12): 1}
    group.is_silent = False
    with pytest.raises(ValueError, match="process group"):  # not connected: a real exchange fails
        axis.sum(own)


@pytest.mark.slow
def test_ranks_measure_their_part_of_an_update() -> None:
    """4 → 16 → 2 weights."""
    config = measured_settings("CartPole-v1", {"net_arch": (16,), "device": "cpu"}).config
    ranks = config.replace(engine="all-reduce", workers=2)
    whole = 4 * 5 * (4 * 16 + 16 + 16 * 2 + 2)  # weights, gradient, target weights, two moments
    (plain,) = measure_plain(config, 0.05)
    assert (plain.state_bytes, plain.exchanges) == (whole, [])
    data = measure_ranks(ranks, 0.05)
    tensor = measure_ranks(ranks.replace(tensor_parallel=2), 0.05)
    assert [rank.state_bytes for rank in data] == [whole, whole]
    assert ("all", whole // 5, 1.0) in [tuple(e) for e in data[0].exchanges]  # the gradient
    # By outputs, then by inputs: all of the last bias is on both ranks.
    assert [rank.state_bytes for rank in tensor] == [(whole + 4 * 5 * 2) // 2] * 2
    for rank in (*data, *tensor):
        assert min(rank.compute_s, rank.update_s) > 0
        assert all(len(seconds) == len(SIZES) for seconds in rank.exchange_s.values())
