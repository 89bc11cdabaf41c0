"""What defines a run: its configuration as differences from a preset, and the command that repeats
it.

In: the fields of ``config.json``. Out: names, values and words for the page.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from qfleet.config.config import Config, check_fields
from qfleet.config.presets import preset_for, resolve
from qfleet.config.recipes import PRESETS
from qfleet.core.errors import UserError
from qfleet.core.urls import public_value


class Recipe(NamedTuple):
    """A configuration, described by the preset that it differs from the least."""

    preset: str
    differences: dict[str, tuple[Any, Any]]
    """Field → value of the run, and of the preset for the run's env, algorithm and steps."""
    command: str


def describe(fields: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe; None if the fields are those of another version of qfleet."""
    try:
        config = Config(**check_fields(dict(fields)))
        suiting = preset_for(config.env, config.algo, config.engine, config.update)
    except (UserError, TypeError, ValueError):
        return None
    # config.json does not name the preset. Of equally near ones the suiting one comes first.
    names = dict.fromkeys(("none",) if config.data else (suiting, *PRESETS, "none"))
    options = {name: _differences(config, name) for name in names}
    preset = min(names, key=lambda name: len(options[name]))
    words = ["qfleet", "train", config.env, "--preset", preset]
    if "steps" not in options[preset]:
        words += ["--steps", str(config.steps)]
    if resolve(preset=preset)[0].algo != config.algo:
        words += ["--algo", config.algo]
    for name, (value, _) in options[preset].items():
        words += _words(name, value)
    return Recipe(preset, options[preset], shlex.join(words))


def _differences(config: Config, preset: str) -> dict[str, tuple[Any, Any]]:
    base, _ = resolve(config.env, config.algo, preset, steps=config.steps)
    ours, theirs = dataclasses.asdict(config), dataclasses.asdict(base)
    return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}


def _words(name: str, value: Any) -> list[str]:
    """Return the words of the command line that set a field."""
    option = name.replace("_", "-")
    value = public_value(value)
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, tuple):
        return [f"--{option}", *map(str, value)]
    return [f"--{option}", str(value)]
