"""N environments as one of Gymnasium's vector environments (a registered vector entry point).

CartPole has one, for example. A vector environment has one seed, and none of its environments can
be reset alone, so a NaN stops the run.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, EnvironmentFault, one_line
from qfleet.core.seeding import env_seeds
from qfleet.core.types import StateDict, Step
from qfleet.envs.base import BaseEnvs
from qfleet.envs.guard import FLOAT32_MAX, all_finite
from qfleet.envs.masks import KEY
from qfleet.envs.registry import env_kwargs, has_vector_entry_point, unknown_env
from qfleet.envs.spaces import describe
from qfleet.envs.state import load_vector_env, save_vector_env


class NativeEnvs(BaseEnvs):
    """A ``core.VectorEnv`` around a Gymnasium vector environment."""

    def __init__(self, config: Config, num_envs: int, seed: int) -> None:
        self._envs = _make(config, num_envs)
        mode = self._envs.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            self._envs.close()
            raise ConfigError(
                f"the vector entry point of '{config.env}' has autoreset mode {mode}, not "
                f"{AutoresetMode.NEXT_STEP}; use --vectorize sync"
            )
        actions = self._envs.single_action_space
        observations = self._envs.single_observation_space
        super().__init__(describe(config.env, observations, actions), env_seeds(seed, 1), num_envs)
        self._is_float = self.spec.obs_dtype == "float32"
        self._uses_masks = config.action_masks
        self._begin_episodes()

    def reset(self) -> NDArray[Any]:
        obs, info = self._envs.reset(seed=self.seeds[0])
        if self._uses_masks and KEY in info:
            raise ConfigError(
                f"the vector entry point of '{self.spec.env_id}' gives action masks, which only "
                "--vectorize sync and async can use; use one of them or --no-action-masks"
            )
        self._begin_episodes()
        return self._canonical(obs)

    def _recv(self) -> Step:
        actions = self._actions + self.spec.first_action
        raw_obs, reward, terminated, truncated, _ = self._envs.step(actions)
        obs = self._canonical(raw_obs)
        if not all_finite(reward) or np.abs(reward).max() > FLOAT32_MAX:
            raise self._fault("reward", reward)
        return self._autoreset_step(obs, reward, terminated, truncated)

    def _canonical(self, raw_obs: NDArray[Any]) -> NDArray[Any]:
        obs = np.ascontiguousarray(raw_obs, dtype=self.spec.obs_dtype)
        if self.spec.first_obs_value:
            return obs - self.spec.first_obs_value
        if self._is_float and not all_finite(obs):
            raise self._fault("observation", obs)
        return obs

    def _fault(self, what: str, values: NDArray[Any]) -> EnvironmentFault:
        good = (np.abs(values) <= FLOAT32_MAX).reshape(self.num_envs, -1).all(axis=1)
        return EnvironmentFault(
            f"env {int(np.argmin(good))} of '{self.spec.env_id}' gave a NaN or Inf {what}, and its "
            "vector entry point cannot reset it alone; use --vectorize sync, which can"
        )

    def state_dict(self) -> StateDict | None:
        state = save_vector_env(self._envs)
        return None if state is None else {"pool": state, "is_over": self._is_over.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        load_vector_env(self._envs, state["pool"])
        self._is_over = np.array(state["is_over"], dtype=np.bool_)

    def close(self) -> None:
        self._envs.close()


def _make(config: Config, num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    if ":" not in config.env and config.env not in gymnasium.registry:
        raise unknown_env(config.env)
    if not has_vector_entry_point(config.env):
        raise ConfigError(
            f"environment '{config.env}' has no vector entry point of its own; "
            "use --vectorize sync or async"
        )
    if config.frame_stack > 1:
        raise ConfigError(
            f"frame_stack {config.frame_stack} is not supported by --vectorize native; use sync"
        )
    kwargs = env_kwargs(config)
    if config.max_episode_steps:
        kwargs["max_episode_steps"] = config.max_episode_steps
    try:
        return gymnasium.make_vec(
            config.env, num_envs, vectorization_mode="vector_entry_point", **kwargs
        )
    except Exception as error:
        raise ConfigError(
            f"the vector entry point of '{config.env}' failed with arguments {kwargs or 'none'}: "
            f"{one_line(error)}; use --vectorize sync"
        ) from error
