"""Masks of legal actions: environments that give them, with observations that hold them.

A Gymnasium environment gives its mask as ``info["action_mask"]`` of every reset and step, or as the
result of a method ``action_masks()`` (as for sb3-contrib); a tensor environment by a method
``action_masks(state)``. ``EnvSpec.unmasked_shape`` describes the masked observations.
"""

from __future__ import annotations

import reprlib
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from qfleet.core.errors import EnvironmentFault
from qfleet.core.types import EnvSpec
from qfleet.envs.spaces import AnyEnv

KEY, METHOD = "action_mask", "action_masks"


def gives_masks(env: AnyEnv) -> bool:
    """Return whether an environment gives masks; it is reset to look at its info."""
    return has_method(env) or KEY in env.reset()[1]


def has_method(env: AnyEnv) -> bool:
    return env.has_wrapper_attr(METHOD)


class MaskedObservations(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that appends the mask to the flattened observation."""

    def __init__(self, env: AnyEnv, spec: EnvSpec) -> None:
        """``spec``: of the observations without masks."""
        super().__init__(env)
        self._name, self._dtype = f"environment '{spec.env_id}'", np.dtype(spec.obs_dtype)
        self._num_actions = spec.num_actions
        self._method = env.get_wrapper_attr(METHOD) if has_method(env) else None
        width = spec.with_masks().obs_shape
        low, high = (-np.inf, np.inf) if self._dtype.kind == "f" else (0, 255)
        self.observation_space = Box(low, high, width, self._dtype)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        # Nothing is chosen in the last state of an episode.
        is_needed = not (terminated or truncated)
        return self._masked(obs, info, is_needed), reward, terminated, truncated, info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._masked(obs, info, is_needed=True), info

    def _masked(self, obs: Any, info: dict[str, Any], is_needed: bool) -> NDArray[Any]:
        given = info.get(KEY) if self._method is None else self._method()
        try:
            legal = np.ones(self._num_actions) if given is None else np.asarray(given, float) != 0
        except (TypeError, ValueError):  # e.g. a part per entry of a MultiDiscrete action
            legal = np.ones(0)
        if legal.shape != (self._num_actions,) or (given is None and is_needed):
            got = " ".join(reprlib.repr(given).split())
            raise EnvironmentFault(
                f"{self._name} must give a mask with {self._num_actions} entries, one per action, "
                f"got {got}; fix that or use --no-action-masks"
            )
        if not legal.any():
            if is_needed:
                raise EnvironmentFault(
                    f"{self._name} gave a mask without a legal action in an episode that goes on; "
                    "end the episode or use --no-action-masks"
                )
            legal = np.ones(self._num_actions)
        return np.concatenate((np.ravel(obs), legal)).astype(self._dtype)
