"""N environments stepped one after another.

This is not Gymnasium's SyncVectorEnv, because a fault must not affect the other environments, and
because this loop is faster: no info dicts are merged, no observation is copied twice, and all
arrays are allocated once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError
from qfleet.core.seeding import env_seeds
from qfleet.core.types import EnvSpec, StateDict, Step
from qfleet.envs.base import BaseEnvs
from qfleet.envs.closing import CLOSE_S
from qfleet.envs.guard import GuardedEnv, OnFault
from qfleet.envs.registry import make_single, single_spec
from qfleet.envs.spaces import AnyEnv
from qfleet.envs.state import as_dict


class GuardedEnvs:
    """Guarded environments that write their steps into one of several ``sides``.

    Two sides are used in turn: an actor still reads its last observation while the next one is
    written.
    """

    def __init__(
        self,
        config: Config,
        spec: EnvSpec,
        seeds: dict[int, int],
        sides: Sequence[Step],
        on_fault: OnFault,
        first: AnyEnv | None = None,
    ) -> None:
        """Create the guards. ``seeds``: number in the pool → seed. ``first``: an existing env."""
        self.guards = [
            GuardedEnv(
                functools.partial(make_single, config, masked=spec.is_masked),
                spec,
                index=index,
                seed=seed,
                max_restarts=config.max_env_restarts,
                on_fault=on_fault,
                env=first if i == 0 else None,
            )
            for i, (index, seed) in enumerate(seeds.items())
        ]
        self._sides = sides
        self._rows: list[list[NDArray[Any]]] = [
            [side.obs[i, ...] for i in range(len(seeds))] for side in sides
        ]

    def start(self, side: int) -> None:
        for guard, row in zip(self.guards, self._rows[side], strict=True):
            guard.start(row)

    def step(self, actions: list[int], side: int) -> None:
        rows = self._rows[side]
        _, reward, terminated, truncated, invalid, fresh, _ = self._sides[side]
        for i, action in enumerate(actions):
            reward[i], terminated[i], truncated[i], invalid[i], fresh[i] = self.guards[i].step(
                action, rows[i]
            )

    def states(self) -> list[StateDict] | None:
        """Return the state of each environment, or None if one of them has none."""
        states = [guard.state_dict() for guard in self.guards]
        return None if None in states else [state for state in states if state is not None]

    def load_states(self, states: Iterable[StateDict]) -> None:
        for guard, state in zip(self.guards, states, strict=True):
            guard.load_state_dict(state)

    def close(self) -> None:
        """Close all environments within one deadline; after it, each has a short time left."""
        end_s = time.monotonic() + CLOSE_S
        for guard in self.guards:
            guard.close(max(0.5, end_s - time.monotonic()))


class SyncEnvs(BaseEnvs):
    """A ``core.VectorEnv`` that steps N environments in this thread.

    All arrays stay valid for one more call than the protocol requires.
    """

    def __init__(self, config: Config, num_envs: int, seed: int, on_fault: OnFault) -> None:
        first = make_single(config)
        super().__init__(single_spec(config, first), env_seeds(seed, num_envs), num_envs)
        shape = (num_envs, *self.spec.obs_shape)
        self._steps = [
            Step(
                np.zeros(shape, dtype=self.spec.obs_dtype),
                np.zeros(num_envs, dtype=np.float64),
                *(np.zeros(num_envs, dtype=np.bool_) for _ in range(4)),
            )
            for _ in range(2)
        ]
        self._side = 0
        seeds = dict(enumerate(self.seeds))
        self._envs = GuardedEnvs(config, self.spec, seeds, self._steps, on_fault, first)

    def reset(self) -> NDArray[Any]:
        self._side ^= 1
        self._envs.start(self._side)
        return self._steps[self._side].obs

    def _recv(self) -> Step:
        self._side ^= 1
        self._envs.step(self._actions.tolist(), self._side)
        return self._steps[self._side]

    def state_dict(self) -> StateDict | None:
        states = self._envs.states()
        return None if states is None else as_dict(states)

    def load_state_dict(self, state: StateDict) -> None:
        check_env_count(state, self.num_envs)
        self._envs.load_states(state.values())

    def close(self) -> None:
        self._envs.close()


def check_env_count(state: StateDict, num_envs: int) -> None:
    """Raise CheckpointError unless the state is that of ``num_envs`` environments."""
    if len(state) != num_envs:
        raise CheckpointError(
            f"{len(state)} envs were saved, this run has {num_envs}; "
            f"resume with --envs {len(state)}"
        )
