"""A tensor environment as a ``core.VectorEnv``, for engines that step environments on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError, EnvironmentFault, one_line
from qfleet.core.seeding import env_seeds
from qfleet.core.types import StateDict, Step
from qfleet.envs.base import BaseEnvs
from qfleet.envs.device.protocol import Episodes, TensorEnv, begin_episodes, step_episodes
from qfleet.envs.guard import all_finite


def check_tensor_env(env: TensorEnv, device: torch.device | None = None) -> None:
    """Step two environments once and raise ConfigError if shapes or dtypes are wrong."""
    name = type(env).__name__
    try:
        spec, _ = env.spec, env.max_episode_steps
        begun = begin_episodes(env, torch.arange(2, device=device))
        nothing = torch.zeros(2, dtype=torch.int64, device=device)
        episodes, step = step_episodes(env, begun, nothing)
    except Exception as error:
        raise ConfigError(
            f"tensor environment {name} cannot take a step: {one_line(error)}"
        ) from error
    expected = {
        "obs": ((2, *spec.obs_shape), spec.torch_dtype),
        "reward": ((2,), torch.float32),
        "terminated": ((2,), torch.bool),
    }
    for part, (shape, dtype) in expected.items():
        found = getattr(step, part)
        if tuple(found.shape) != shape or found.dtype != dtype:
            raise ConfigError(
                f"tensor environment {name} returns {part} of {found.dtype} {tuple(found.shape)}; "
                f"for two envs it must be {dtype} {shape}"
            )
    for key in episodes.inner:
        if not isinstance(key, str) or not key.isidentifier():
            raise ConfigError(
                f"tensor environment {name} has a state key {key!r}; keys must be identifiers"
            )
        before, after = begun.inner[key], episodes.inner[key]
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            raise ConfigError(
                f"tensor environment {name}: begin() returns {key} of {before.dtype} "
                f"{tuple(before.shape)}, advance() of {after.dtype} {tuple(after.shape)}; "
                "they must be alike"
            )


class TensorEnvs(BaseEnvs):
    """A ``core.VectorEnv`` of N environments as tensors on the CPU; resumes are exact."""

    def __init__(self, env: TensorEnv, num_envs: int, seed: int) -> None:
        check_tensor_env(env)
        super().__init__(env.spec, env_seeds(seed, num_envs), num_envs)
        self._env = env
        self._episodes = self._begun()

    def _begun(self) -> Episodes:
        return begin_episodes(self._env, torch.tensor(self.seeds))

    def reset(self) -> NDArray[Any]:
        self._episodes = self._begun()
        obs: NDArray[Any] = self._env.observe(self._episodes.inner).numpy()
        return obs

    @torch.no_grad()
    def _recv(self) -> Step:
        actions = torch.from_numpy(self._actions)
        try:
            self._episodes, step = step_episodes(self._env, self._episodes, actions)
        except Exception as error:
            raise EnvironmentFault(
                f"'{self.spec.env_id}' failed in a step: {one_line(error)}"
            ) from error
        obs, reward, terminated, truncated, opened = (column.numpy() for column in step)
        if not all_finite(reward) or not all_finite(obs):
            raise EnvironmentFault(
                f"'{self.spec.env_id}' gave a NaN or Inf; no env of a tensor environment can be "
                "reset alone"
            )
        return Step(obs, reward, terminated, truncated, opened, opened)

    def state_dict(self) -> StateDict:
        return {**self._episodes._asdict(), "inner": dict(self._episodes.inner)}

    def load_state_dict(self, state: StateDict) -> None:
        self._episodes = Episodes(**{name: state[name] for name in Episodes._fields})

    def close(self) -> None:
        """Do nothing: there are no threads or processes to end."""
