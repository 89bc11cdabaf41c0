"""From ``Config.env`` to a tensor environment."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.core.plugins import load_object
from qfleet.envs.device.acrobot import Acrobot
from qfleet.envs.device.cartpole import CartPole
from qfleet.envs.device.masked import MaskedTensorEnv
from qfleet.envs.device.minatar.asterix import Asterix
from qfleet.envs.device.minatar.breakout import Breakout
from qfleet.envs.device.minatar.freeway import Freeway
from qfleet.envs.device.minatar.game import Game, MinAtar
from qfleet.envs.device.minatar.seaquest import Seaquest
from qfleet.envs.device.minatar.space_invaders import SpaceInvaders
from qfleet.envs.device.mountaincar import MountainCar
from qfleet.envs.device.protocol import TensorEnv
from qfleet.envs.masks import METHOD
from qfleet.envs.registry import env_kwargs, refused_kwargs

_RAMPING: dict[str, Callable[[bool], Game]] = {
    "Asterix": Asterix,
    "Seaquest": Seaquest,
    "SpaceInvaders": SpaceInvaders,
}
_STEADY: dict[str, Callable[[], Game]] = {"Breakout": Breakout, "Freeway": Freeway}
MINATAR_IDS = tuple(f"MinAtar/{name}-v1" for name in sorted({**_RAMPING, **_STEADY}))

_CLASSICS: dict[str, tuple[Callable[[], TensorEnv], int]] = {
    "CartPole-v0": (CartPole, 200),
    "CartPole-v1": (CartPole, CartPole.max_episode_steps),
    "Acrobot-v1": (Acrobot, Acrobot.max_episode_steps),
    "MountainCar-v0": (MountainCar, MountainCar.max_episode_steps),
}
"""Gymnasium ids with a tensor form, and their time limits. Only the engine ``device`` uses the
tensor form: other engines use Gymnasium's environment."""


def is_tensor_env(env_id: str) -> bool:
    """Return whether this is a MinAtar game or a user's class that derives from ``TensorEnv``."""
    if ":" not in env_id:
        return env_id.startswith("MinAtar/")
    # issubclass does not work with this protocol, so look for it among the base classes.
    return TensorEnv in getattr(load_object(env_id, "environment"), "__mro__", ())


def has_tensor_form(env_id: str) -> bool:
    """Return whether ``make_tensor_env`` can make this environment."""
    return env_id in _CLASSICS or is_tensor_env(env_id)


def make_tensor_env(config: Config) -> TensorEnv:
    if not has_tensor_form(config.env):
        raise ConfigError(
            f"'{config.env}' has no form as tensors, which --engine device needs; "
            f"{', '.join(_CLASSICS)}, MinAtar's games and your own TensorEnv have one "
            "(docs/tensor-envs.md); use another engine"
        )
    if config.env in _CLASSICS:
        env = _make_classic(config)
    else:
        env = _make_own(config) if ":" in config.env else _make_minatar(config)
    if config.max_episode_steps:
        env.max_episode_steps = config.max_episode_steps
    return MaskedTensorEnv(env) if config.action_masks and hasattr(env, METHOD) else env


def _make_classic(config: Config) -> TensorEnv:
    if env_kwargs(config):
        raise ConfigError(f"'{config.env}' takes no env_kwargs as tensors; leave them out")
    make, limit = _CLASSICS[config.env]
    env = make()
    env.spec = dataclasses.replace(env.spec, env_id=config.env)
    env.max_episode_steps = limit
    return env


def _make_own(config: Config) -> TensorEnv:
    try:
        env: TensorEnv = load_object(config.env, "environment")(**env_kwargs(config))
    except Exception as error:
        raise refused_kwargs(config, error) from error
    return env


def _make_minatar(config: Config) -> MinAtar:
    """Make ``MinAtar/<game>-v1`` with the actions that have an effect, ``-v0`` with all six."""
    found = re.fullmatch(r"MinAtar/(?P<game>\w+)-v(?P<version>[01])", config.env)
    if found is None or found["game"] not in {**_RAMPING, **_STEADY}:
        raise UnknownNameError("MinAtar game", config.env, MINATAR_IDS)
    # The names are those of the minatar package's arguments.
    options = env_kwargs(config, "MinAtar", ("sticky_action_prob", "difficulty_ramping"))
    name = found["game"]
    if name in _STEADY and "difficulty_ramping" in options:
        raise ConfigError(f"'{config.env}' has no difficulty_ramping; leave it out")
    sticky, ramps = options.get("sticky_action_prob", 0.1), options.get("difficulty_ramping", True)
    if type(sticky) not in (int, float) or not 0 <= sticky <= 1 or not isinstance(ramps, bool):
        raise ConfigError(
            f"MinAtar game '{config.env}' cannot take env_kwargs {config.env_kwargs}; "
            "sticky_action_prob must be from 0 to 1, difficulty_ramping true or false"
        )
    game: Game = _RAMPING[name](ramps) if name in _RAMPING else _STEADY[name]()
    return MinAtar(game, sticky, all_actions=found["version"] == "0")
