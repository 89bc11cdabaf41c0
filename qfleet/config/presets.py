"""Resolve the user's settings to one Config.

Sources in increasing priority: the preset (given by name, or the one that suits the environment), a
configuration file, the algorithm given by name, single fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from qfleet.config import recipes
from qfleet.config.algorithms import ALIASES, algorithm_switches
from qfleet.config.config import Config, check_fields
from qfleet.core.errors import UnknownNameError

PRESETS: dict[str, Callable[[], Config]] = {
    "cartpole": recipes.cartpole,
    "cartpole-pqn": recipes.cartpole_pqn,
    "cartpole-apex": recipes.cartpole_apex,
    "cartpole-parameter-server": recipes.cartpole_parameter_server,
    "cartpole-easgd": recipes.cartpole_easgd,
    "cartpole-n-step-q": recipes.cartpole_n_step_q,
    "cartpole-a3c": recipes.cartpole_a3c,
    "cartpole-sb3-zoo": recipes.cartpole_sb3_zoo,
    "cartpole-cleanrl": recipes.cartpole_cleanrl,
    "acrobot": recipes.acrobot,
    "mountaincar": recipes.mountaincar,
    "lunarlander": recipes.lunarlander,
    "atari-dqn": recipes.atari_dqn,
    "pong": recipes.pong,
    "minatar-dqn": recipes.minatar_dqn,
    "minatar-pqn": recipes.minatar_pqn,
    "atari-dqn-nature": recipes.atari_dqn_nature,
    "atari-c51": recipes.atari_c51,
    "atari-rainbow": recipes.atari_rainbow,
    "atari-pqn": recipes.atari_pqn,
    "atari-apex": recipes.atari_apex,
}

_SUITS = [
    (r"CartPole-v\d", "cartpole"),
    (r"Acrobot-v\d", "acrobot"),
    (r"MountainCar-v\d", "mountaincar"),
    (r"LunarLander-v\d", "lunarlander"),
    (r"ALE/.+|\w+NoFrameskip-v4", "atari-dqn"),
    (r"MinAtar/.+", "minatar-dqn"),
]
_SUITS_ROW = {
    ("cartpole", "pqn"): "cartpole-pqn",
    ("cartpole", "n-step-q"): "cartpole-n-step-q",
    ("cartpole", "a3c"): "cartpole-a3c",
    ("minatar-dqn", "pqn"): "minatar-pqn",
    ("atari-dqn", "pqn"): "atari-pqn",
    ("atari-dqn", "rainbow"): "atari-rainbow",
}
"""(Usual preset, algorithm) → preset, for algorithms that need other settings."""

_SUITS_ENGINE = {
    ("cartpole", "actors"): "cartpole-apex",
    ("cartpole", "parameter-server"): "cartpole-parameter-server",
    ("atari-dqn", "actors"): "atari-apex",
}
"""(Usual preset, engine) → preset, where no algorithm was given."""
_SUITS_UPDATE = {("cartpole-parameter-server", "easgd"): "cartpole-easgd"}
"""(Engine's preset, update) → preset."""
_ENGINES_OF_ROWS = ("parameter-server",)
"""Engines whose presets set no field of an algorithm: they suit other algorithms too."""


def preset_for(
    env: str, algo: str | None, engine: str | None = None, update: str | None = None
) -> str | None:
    """Return the name of the preset that suits an environment, or None."""
    for pattern, name in _SUITS:
        if re.fullmatch(pattern, env):
            row = (algo or "").lower()
            if (own := _SUITS_ROW.get((name, ALIASES.get(row, row)))) is not None:
                return own
            if engine is not None and (algo is None or engine in _ENGINES_OF_ROWS):
                name = _SUITS_ENGINE.get((name, engine), name)
            return _SUITS_UPDATE.get((name, update or ""), name)
    return None


def resolve(
    env: str | None = None,
    algo: str | None = None,
    preset: str | None = None,
    file_fields: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    engine: str | None = None,
    update: str | None = None,
) -> tuple[Config, str | None]:
    """Return the configuration, not yet validated, and the name of the preset that was used.

    ``engine`` and ``update`` only select the preset; ``fields`` may hold them instead.
    """
    file_fields, fields = dict(file_fields or {}), dict(fields or {})
    check_fields({**file_fields, **fields})
    env = env or file_fields.get("env")
    asked = algo or file_fields.get("algo")
    if preset is None and env is not None and not file_fields:
        engine, update = fields.get("engine", engine), fields.get("update", update)
        preset = preset_for(env, asked, engine, update)
    if preset in (None, "none"):
        config = Config()
    elif preset in PRESETS:
        config = PRESETS[preset]()
    else:
        raise UnknownNameError("preset", preset, PRESETS)
    if "algo" in file_fields:
        config = with_algorithm(config, file_fields.pop("algo"))
    config = config.replace(**file_fields)
    if algo is not None:
        config = with_algorithm(config, algo)
    return config.replace(**fields, **({} if env is None else {"env": env})), preset


def with_algorithm(config: Config, name: str) -> Config:
    """Return the configuration with another algorithm; fields of the old one become defaults."""
    name, switches = algorithm_switches(name)
    if name == config.algo:
        return config
    defaults = Config()
    _, old = algorithm_switches(config.algo)
    cleared = {switch: getattr(defaults, switch) for switch in old}
    return config.replace(**{**cleared, **switches, "algo": name})
