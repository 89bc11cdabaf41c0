"""Axes of the mesh: what they count, and what passes between two processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from qfleet.engines.all_reduce.mesh import Mesh
from support.configs import tiny_config
from support.processes import python, start
from support.waiting import finish

EXCHANGES = """
import contextlib, os, sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from qfleet.engines.all_reduce.mesh import Axis

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
group = SimpleNamespace(
    rank=rank, has_nccl=False, exchange=lambda of_all=True: contextlib.nullcontext(),
    open_channels=lambda every, backend: dist.group.WORLD,
)
axis = Axis(group, [[0, 1]])
numbers = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
channels_last = numbers.to(memory_format=torch.channels_last)
assert not channels_last.is_contiguous()
for sender, sent, received in [(0, channels_last, torch.empty_like(numbers)),
                               (1, numbers, torch.empty_like(channels_last)),
                               (0, channels_last, torch.empty_like(channels_last))]:
    if rank == sender:
        axis.send(sent, 1 - sender)()
    else:
        axis.receive(received, sender)
        assert torch.equal(received, numbers)
print(axis.messages, axis.bytes_sent, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_activations_of_convolutions_pass_between_two_processes(tmp_path: Path) -> None:
    """They are in the layout channels-last, which gloo neither sends nor receives."""
    words = [python("-c", EXCHANGES, str(rank), str(tmp_path / "store")) for rank in (0, 1)]
    ranks = [start(command) for command in words]
    printed = [finish(process, "the exchange") for process in ranks]
    assert [output.split() for output, _ in printed] == [["2", "960"], ["1", "480"]], printed


class Counted:
    """The first of eight ranks, which exchange nothing."""

    rank, size, has_nccl, is_tuning = 0, 8, False, False

    def __init__(self) -> None:
        self.passed = 0

    def open_channels(self, *_: object) -> None:
        return

    @contextlib.contextmanager
    def exchange(self, of_all: bool = True) -> Iterator[None]:
        self.passed += of_all
        yield


@pytest.fixture
def nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_reduce", "all_gather", "broadcast"):
        monkeypatch.setattr(distributed, name, lambda *_, **__: None)


@pytest.mark.usefixtures("nothing_is_sent")
def test_progress_is_counted_by_exchanges_that_all_ranks_make_equally_often() -> None:
    """Stages have different numbers of layers: their ranks would look slow, or lost."""
    group: Any = Counted()
    mesh = Mesh.of(group, tiny_config(workers=8, tensor_parallel=2, pipeline_parallel=2))
    counts = dict[str, int]()
    for name, axis in mesh._asdict().items():
        group.passed = 0
        axis.sum(torch.zeros(1))
        axis.gather(torch.zeros(1))
        axis.broadcast(torch.zeros(1), 0)
        counts[name] = group.passed
    assert counts == {"data": 3, "copy": 3, "stages": 0, "tensor": 0, "every": 3}


@pytest.mark.usefixtures("nothing_is_sent")
def test_a_broadcast_is_a_message_to_every_other_rank() -> None:
    group: Any = Counted()
    mesh = Mesh.of(group, tiny_config(workers=8, tensor_parallel=2, pipeline_parallel=2))
    mesh.copy.broadcast(torch.zeros(5), 0)
    mesh.copy.broadcast(torch.zeros(5), 1)  # by another rank
    assert (mesh.copy.messages, mesh.copy.bytes_sent) == (3, 60)
    mesh.every.broadcast(torch.zeros(5), 0)
    assert (mesh.every.messages, mesh.every.bytes_sent) == (7, 140)
