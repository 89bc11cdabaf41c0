"""The base class of vector environments: the parts of ``core.VectorEnv`` that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import CheckpointError
from qfleet.core.types import EnvSpec, StateDict, Step


class BaseEnvs(ABC):
    """A ``core.VectorEnv`` without environments; a subclass adds at least ``reset`` and ``_recv``.

    By default a step runs in ``recv``, in the calling thread, and there is no state to save.
    """

    in_background = False

    def __init__(self, spec: EnvSpec, seeds: list[int], num_envs: int) -> None:
        self.spec, self.seeds, self.num_envs = spec, seeds, num_envs
        self._is_in_flight = False

    @abstractmethod
    def reset(self) -> NDArray[Any]:
        """Reset all envs to their seeds: two resets give the same episodes."""

    def step(self, actions: NDArray[np.int64]) -> Step:
        self.send(actions)
        return self.recv()

    def send(self, actions: NDArray[np.int64]) -> None:
        assert not self._is_in_flight, "send() before the recv() of the step before"
        self._is_in_flight = True
        self._send(actions)

    def recv(self) -> Step:
        # Checked here, because a C++ pool would wait forever.
        assert self._is_in_flight, "recv() without a send() before it"
        self._is_in_flight = False
        return self._recv()

    def _send(self, actions: NDArray[np.int64]) -> None:
        self._actions = actions.copy()

    @abstractmethod
    def _recv(self) -> Step:
        """Finish the step that ``_send`` has started."""

    def _begin_episodes(self, lives: NDArray[Any] | None = None) -> None:
        """Prepare ``_autoreset_step`` after a reset. ``lives``: those of each game, if counted."""
        self._is_over = np.zeros(self.num_envs, dtype=np.bool_)
        self._lives: Any = lives

    def _autoreset_step(
        self,
        obs: NDArray[Any],
        reward: NDArray[Any],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        lives: NDArray[Any] | None = None,
    ) -> Step:
        """Return the step of a pool that resets its envs on the step after an episode's end."""
        opened = self._is_over
        self._is_over = terminated | truncated
        life_lost = None
        if lives is not None:
            life_lost = (lives < self._lives) & ~terminated & ~opened
            self._lives = lives
        return Step(obs, reward, terminated, truncated, opened, opened, life_lost)

    def state_dict(self) -> StateDict | None:
        """Return None: the state of these environments is not accessible."""
        return None

    def load_state_dict(self, state: StateDict) -> None:
        raise CheckpointError(
            f"'{self.spec.env_id}' cannot be resumed from a state ({len(state)} entries)"
        )

    @abstractmethod
    def close(self) -> None:
        """End the environments' threads and processes, also during a step."""
