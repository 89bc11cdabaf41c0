"""Networks that disturb the worker process which they are in; in the driver they do nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qfleet.core.errors import MemberSilent
from qfleet.engines.parameter_server.client import RemoteLine
from support.counting_network import COUNTERS, Counting

LOST_EVERY = 5
"""Every so many replies to a worker, one is lost."""
QUIET, BAD_EVERY, FACTOR = 150, 50, 1e6
"""A bad worker sends this many ordinary gradients first, then one in so many times the factor."""
CLAIM = "QFLEET_TEST_CLAIM"
"""Variable with the path of a file: the worker that creates it is the bad one."""
DAY_S = 86_400.0


def is_in_worker() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray._private.worker.global_worker.mode == ray.WORKER_MODE


class LosingReplies(Counting):
    """Loses replies of servers when they have arrived: the worker does not see them."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        if is_in_worker():
            lose_replies()


def lose_replies() -> None:
    finish, replies = RemoteLine.finish, 0

    def finish_or_lose(self: RemoteLine, started: Any) -> Any:
        nonlocal replies
        reply = finish(self, started)
        replies += 1
        if replies % LOST_EVERY == 0:
            raise MemberSilent("the reply was lost")
        return reply

    RemoteLine.finish = finish_or_lose  # type: ignore[method-assign]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, features: Tensor, counters: Tensor, owner: BadGradients) -> Tensor:
        context.like, context.owner = counters, owner
        return features.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.full_like(context.like, context.owner.next_scale()), None


class BadGradients(nn.Module):
    """As ``Counting``; one worker sends some gradients that are far too large."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.features, self._made, self._is_bad = shape[0], 0, False
        self.counters = nn.Parameter(torch.zeros(COUNTERS))
        if is_in_worker():
            with contextlib.suppress(FileExistsError):
                Path(os.environ[CLAIM]).touch(exist_ok=False)
                self._is_bad = True

    def next_scale(self) -> float:
        self._made += 1
        late = self._made > QUIET and self._made % BAD_EVERY == 0
        return FACTOR if self._is_bad and late else 1.0

    def forward(self, observations: Tensor) -> Tensor:
        found: Tensor = _Scaled.apply(observations.float(), self.counters, self)  # type: ignore[no-untyped-call]
        return found


class ClockGoesBack(Counting):
    """The wall clock of a worker is set back by a day while it works."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self._calls = 0

    def forward(self, observations: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == 100 and is_in_worker():
            wall = time.time
            time.time = lambda: wall() - DAY_S
        return super().forward(observations)
