"""Values and names as people write them: ``1e6``, ``1M``, ``64,64``, ``lr``, ``total_timesteps``.

The command line, configuration files and ``qfleet.train`` read them alike, with these functions.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from qfleet.core.errors import ConfigError

ALIASES = {
    "lr": "learning_rate",
    "total_timesteps": "steps",
    "n_timesteps": "steps",
    "timesteps": "steps",
    "num_envs": "envs",
    "n_envs": "envs",
    "env_id": "env",
    "train_frequency": "train_freq",
    "target_network_frequency": "target_update_interval",
    "start_e": "exploration_initial_eps",
    "end_e": "exploration_final_eps",
    "n_step": "n_steps",
    "import": "imports",
    "wrapper": "wrappers",
}
"""Names of Stable-Baselines3, CleanRL and other libraries → fields of Config."""

_POWERS = {"": 0, "k": 3, "m": 6, "g": 9, "b": 9}
_WHOLE = re.compile(r"([+-]?[\d_]*\.?[\d_]+(?:e[+-]?\d{1,2})?)([kmgb]?)", re.ASCII | re.IGNORECASE)
"""At most two digits of an exponent: a larger one would make a number that fills the memory."""


def parse_whole(text: str) -> int:
    """Parse ``1000``, ``1_000``, ``1e6``, ``50k`` or ``1.5M``; raise ValueError unless whole."""
    try:
        return int(text)
    except ValueError:
        found = _WHOLE.fullmatch(text.strip())
        digits = found[1].replace("_", "") if found else ""
        if found is None or len(digits) > 40 or not any(c.isdecimal() for c in digits):
            raise ValueError(f"{text!r} is not a whole number such as 1000, 1e6 or 50k") from None
        number = Decimal(digits).scaleb(_POWERS[found[2].lower()])
        if number != int(number):
            raise ValueError(f"{text!r} is not a whole number") from None
        return int(number)


def convert(value: Any, kind: Any) -> Any:
    """Return a text or a whole float as a value of the type ``kind``; others are not changed.

    A value that does not fit is returned as it is: the check of types reports it.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kind = next(option for option in arguments if option is not type(None))
    try:
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if kind is int and isinstance(value, str):
            return parse_whole(value)
        if kind is float and isinstance(value, str):
            return float(value)
        if kind is bool and isinstance(value, str):
            return {"true": True, "false": False}.get(value.strip().lower(), value)
    except ValueError:
        return value
    if origin is tuple and isinstance(value, str):
        value = [word.strip() for word in value.split(",")] if value.strip() else []
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(convert(entry, arguments[0]) for entry in value)
    return value


def rename(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values under the fields' own names; raise if a field is given twice."""
    given: dict[str, str] = {}
    for name in map(str, values):
        own = ALIASES.get(name, name)
        if own in given:
            raise ConfigError(f"{given[own]} and {name} are the same setting; give one of them")
        given[own] = name
    return dict(zip(given, values.values(), strict=True))
