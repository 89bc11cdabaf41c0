"""The exact state of an environment, as JSON values and tensors, for bit-identical resumes.

Supported are the Gymnasium environments and wrappers in the tables below, and every environment
that implements ``ResumableEnv``. The state of others is None, and a resume ends their episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import gymnasium
import numpy as np
import torch
from gymnasium.envs.classic_control.acrobot import AcrobotEnv
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.envs.classic_control.mountain_car import MountainCarEnv
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.envs.toy_text.taxi import TaxiEnv
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import FrameStackObservation, OrderEnforcing, TimeLimit

from qfleet.core.errors import CheckpointError
from qfleet.core.types import StateDict
from qfleet.envs.adapters import Converted
from qfleet.envs.masks import MaskedObservations
from qfleet.envs.spaces import AnyEnv, Canonical


@runtime_checkable
class ResumableEnv(Protocol):
    """The methods that make a user's environment resumable within an episode.

    The state is a dict of JSON values and numpy arrays. ``np_random`` is saved separately.
    ``set_state`` may be called on an environment that was never reset.
    """

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


_ENV_ATTRIBUTES: Mapping[type, tuple[str, ...]] = {
    CartPoleEnv: ("state", "steps_beyond_terminated"),
    AcrobotEnv: ("state",),
    MountainCarEnv: ("state",),
    FrozenLakeEnv: ("s", "lastaction"),
    CliffWalkingEnv: ("s", "lastaction"),
    TaxiEnv: ("s", "lastaction", "fickle_step", "taxi_orientation"),
}
"""The attributes that change from step to step in Gymnasium's own environments."""

_WRAPPER_ATTRIBUTES: Mapping[type, tuple[str, ...]] = {
    TimeLimit: ("_elapsed_steps",),
    OrderEnforcing: ("_has_reset",),
    Canonical: (),
    Converted: (),
    MaskedObservations: (),
    FrameStackObservation: ("obs_queue",),
}

_VECTOR_ATTRIBUTES: Mapping[type, tuple[str, ...]] = {
    CartPoleVectorEnv: ("state", "steps", "prev_done", "low", "high"),
}

_LIST = "list of"
"""Key of a dict that represents a list with arrays in it."""


def save_env(env: AnyEnv) -> StateDict | None:
    """Return the full state of ``env``, or None if its kind is not supported."""
    layers = []
    while isinstance(env, gymnasium.Wrapper):
        names = _WRAPPER_ATTRIBUTES.get(type(env))
        if names is None:
            return None
        layers.append({"type": type(env).__name__, "values": _read(env, names)})
        env = env.env
    if isinstance(env, ResumableEnv):
        try:
            values = _encode(env.get_state())
        except Exception:  # its method of this name is for something else
            return None
    elif type(env) in _ENV_ATTRIBUTES:
        values = _read(env, _ENV_ATTRIBUTES[type(env)])
    else:
        return None
    layers.append({"type": type(env).__name__, "values": values})
    return {"layers": as_dict(layers), "np_random": _encode(env.np_random.bit_generator.state)}


def load_env(env: AnyEnv, state: StateDict) -> None:
    """Load a saved state into an environment of the same kind."""
    layers = list(state["layers"].values())
    while isinstance(env, gymnasium.Wrapper):
        _write(env, _WRAPPER_ATTRIBUTES.get(type(env), ()), _values_of(env, layers))
        env = env.env
    values = _values_of(env, layers)
    if isinstance(env, ResumableEnv):
        env.set_state(_decode(values))
    else:
        _write(env, _ENV_ATTRIBUTES.get(type(env), ()), values)
    env.np_random.bit_generator.state = _decode(state["np_random"])


def save_vector_env(envs: VectorEnv[Any, Any, Any]) -> StateDict | None:
    """Return the full state of a Gymnasium vector environment, or None; see ``save_env``."""
    names = _VECTOR_ATTRIBUTES.get(type(envs))
    if names is None:
        return None
    return {"values": _read(envs, names), "np_random": _encode(_generator(envs).state)}


def load_vector_env(envs: VectorEnv[Any, Any, Any], state: StateDict) -> None:
    _write(envs, _VECTOR_ATTRIBUTES.get(type(envs), ()), state["values"])
    _generator(envs).state = _decode(state["np_random"])


def _generator(envs: VectorEnv[Any, Any, Any]) -> np.random.BitGenerator:
    generator = envs.np_random
    assert isinstance(generator, np.random.Generator)
    return generator.bit_generator


def _values_of(env: AnyEnv, layers: list[StateDict]) -> Any:
    layer = layers.pop(0) if layers else {"type": "nothing"}
    if layer["type"] != type(env).__name__:
        raise CheckpointError(
            f"the saved environment has {layer['type']} where this one has {type(env).__name__}; "
            "resume with the configuration it was saved with"
        )
    return layer["values"]


def _read(target: object, names: tuple[str, ...]) -> StateDict:
    return {name: _encode(getattr(target, name)) for name in names}


def _write(target: object, names: tuple[str, ...], values: StateDict) -> None:
    for name in names:
        value = _decode(values[name])
        if name == "obs_queue":
            # Extend the deque instead of replacing it, which keeps its maxlen.
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _encode(entry) for key, entry in value.items()}
    if not isinstance(value, str) and np.iterable(value):
        entries = [_encode(entry) for entry in value]
        if any(isinstance(entry, (torch.Tensor, dict)) for entry in entries):
            return {_LIST: len(entries), **as_dict(entries)}
        return entries
    return value


def as_dict(entries: list[Any]) -> dict[str, Any]:
    """Return ``{"0": …, "1": …}``, because a checkpoint stores tensors in dicts only."""
    return {str(i): entry for i, entry in enumerate(entries)}


def _decode(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy(force=True).copy()
    if isinstance(value, dict) and _LIST in value:
        return [_decode(value[str(i)]) for i in range(value[_LIST])]
    if isinstance(value, dict):
        return {key: _decode(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_decode(entry) for entry in value]
    return value
