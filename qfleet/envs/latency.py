"""A wrapper that delays the steps of a ``core.VectorEnv``, for demonstrations and measurements.

The wrapper sleeps for a given time per step, like a program that waits for a robot or another
machine: many of these waits fit on one core, which is why several workers help. The results do not
change.

The latency starts at ``send``, and ``recv`` waits for the rest of it. Environments that step in
``recv`` do so afterwards; environments that step in the background do so at the same time, and a
step then takes as long as the longer of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.types import StateDict, Step, VectorEnv
from qfleet.envs.base import BaseEnvs


def latency_of(config: Config, worker: int) -> float:
    """Return a worker's step latency in seconds: ``straggler`` times as long for worker 0."""
    return config.step_latency_s * (config.straggler if worker == 0 else 1.0)


class DelayedEnvs(BaseEnvs):
    """A ``core.VectorEnv`` that delays the steps of another one. Resets are not delayed."""

    in_background = True
    """The wait runs in the background: the waits of two groups that step in turn overlap."""

    def __init__(
        self,
        envs: VectorEnv,
        latency_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(envs.spec, envs.seeds, envs.num_envs)
        self._envs = envs
        self._latency_s = latency_s
        self._clock, self._sleep = clock, sleep
        self._due_s = 0.0

    def reset(self) -> NDArray[Any]:
        return self._envs.reset()

    def _send(self, actions: NDArray[np.int64]) -> None:
        self._envs.send(actions)
        self._due_s = self._clock() + self._latency_s

    def _recv(self) -> Step:
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
        self._is_in_flight = False
