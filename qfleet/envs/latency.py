"""Environments that take longer than they need: for lessons and measurements.

In: a ``core.VectorEnv`` and seconds; out: one whose every step takes so much longer. It sleeps, as
a program that waits for a robot or another machine would: many such waits fit on one core, which
is what workers are for. What is computed does not change.

The latency runs from ``send`` on, and ``recv`` waits for what is left of it. Environments that step
in ``recv`` do so afterwards; those that step in the background do so meanwhile, and a step then
takes as long as the longer of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.types import StateDict, Step, VectorEnv


def latency_of(config: Config, worker: int) -> float:
    """``step_latency_s`` of a worker: that of number 0 is ``straggler`` times as long."""
    return config.step_latency_s * (config.straggler if worker == 0 else 1.0)


class DelayedEnvs:
    """A ``core.VectorEnv`` around another. Resets are not delayed."""

    in_background = True
    """The wait is: who steps two groups in turn waits for both at once."""

    def __init__(
        self,
        envs: VectorEnv,
        latency_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec, self.num_envs, self.seeds = envs.spec, envs.num_envs, envs.seeds
        self._envs = envs
        self._latency_s = latency_s
        self._clock, self._sleep = clock, sleep
        self._due_s = 0.0

    def reset(self) -> NDArray[Any]:
        return self._envs.reset()

    def step(self, actions: NDArray[np.int64]) -> Step:
        self.send(actions)
        return self.recv()

    def send(self, actions: NDArray[np.int64]) -> None:
        self._envs.send(actions)
        self._due_s = self._clock() + self._latency_s

    def recv(self) -> Step:
        left_s = self._due_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        return self._envs.recv()

    def state_dict(self) -> StateDict | None:
        return self._envs.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._envs.load_state_dict(state)

    def close(self) -> None:
        self._envs.close()
