"""Resolve the user's settings to one Config.

Sources in increasing priority: the preset (given by name, or the one that suits the environment), a
configuration file, the algorithm given by name, single fields. What a preset counts in env steps
follows ``steps`` if that is a single field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from qfleet.config.algorithms import ALIASES, algorithm_switches
from qfleet.config.config import Config, check_fields, split_env
from qfleet.config.recipes import PRESETS
from qfleet.core.errors import UnknownNameError

_SUITS = (
    (r"CartPole-v\d pqn .*", "cartpole-pqn"),
    (r"CartPole-v\d n-step-q .*", "cartpole-n-step-q"),
    (r"CartPole-v\d a3c .*", "cartpole-a3c"),
    (r"CartPole-v\d \S+ parameter-server easgd", "cartpole-easgd"),
    (r"CartPole-v\d \S+ parameter-server .*", "cartpole-parameter-server"),
    (r"CartPole-v\d None actors .*", "cartpole-apex"),
    (r"CartPole-v\d .*", "cartpole"),
    (r"Acrobot-v\d .*", "acrobot"),
    (r"MountainCar-v\d .*", "mountaincar"),
    (r"LunarLander-v\d .*", "lunarlander"),
    (r"(ALE/\S+|\w+NoFrameskip-v4) pqn .*", "atari-pqn"),
    (r"(ALE/\S+|\w+NoFrameskip-v4) rainbow .*", "atari-rainbow"),
    (r"(ALE/\S+|\w+NoFrameskip-v4) None actors .*", "atari-apex"),
    (r"(ALE/\S+|\w+NoFrameskip-v4) .*", "atari-dqn"),
    (r"MinAtar/\S+ (pqn .*|None (?!actors).*)", "minatar-pqn"),
    (r"MinAtar/\S+ .*", "minatar-dqn"),
    (r"(FrozenLake|Taxi|CliffWalking)\S* .*", "toy-text"),
    (r"(MiniGrid|BabyAI)-\S+ .*", "minigrid"),
    (r"(highway|highway-fast|merge|roundabout|intersection|exit)-v\d .*", "highway"),
    (r".*", "general"),
)
"""Pattern of "ENV ALGO ENGINE UPDATE" → preset; the first match wins. What is not given is None.

The preset of an engine is used with other algorithms only if it sets no field of an algorithm.
"""


MOST_GROWTH = 10
"""Factor up to which ``learning_starts`` and ``target_update_interval`` grow with a longer run."""
LEAST_TARGETS = 20
"""Updates of the target network that a shorter run still has. Its interval shrinks no more than for
these: a run of 8,000 steps of the preset `cartpole` diverged with an interval of 40 instead of 250,
on three of three seeds."""


def preset_for(
    env: str, algo: str | None, engine: str | None = None, update: str | None = None
) -> str:
    """Return the name of the preset that suits an environment."""
    row = algo and ALIASES.get(algo.lower(), algo.lower())
    given = f"{split_env(env)[1]} {row} {engine} {update}"
    return next(name for pattern, name in _SUITS if re.fullmatch(pattern, given))


def preset_config(name: str) -> Config:
    """Return the configuration of a preset."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    _, base, fields = PRESETS[name]
    return _with_fields(preset_config(base) if base else Config(), fields)


def resolve(
    env: str | None = None,
    algo: str | None = None,
    preset: str | None = None,
    file_fields: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    engine: str | None = None,
    update: str | None = None,
    steps: int | None = None,
) -> tuple[Config, str | None]:
    """Return the configuration, not yet validated, and the name of the preset that was used.

    ``engine`` and ``update`` only select the preset, and ``steps`` only scales it; ``fields`` may
    hold them instead.
    """
    file_fields, fields = check_fields(file_fields or {}), check_fields(fields or {})
    has_file = bool(file_fields)
    # Not applied if another one is given: the module of ``module:id`` would stay in ``imports``.
    env = env or file_fields.get("env")
    file_fields.pop("env", None)
    if preset is None and env is not None and not has_file:
        preset = preset_for(env, algo, fields.get("engine", engine), fields.get("update", update))
    config = Config() if preset is None or preset == "none" else preset_config(preset)
    config = _with_fields(config, file_fields)
    if algo is not None:
        config = with_algorithm(config, algo)
    steps = fields.get("steps", steps) or 0
    if steps > 0 and preset not in (None, "none") and not has_file:
        config = _scaled(config, steps, grows=preset == "general")
    return config.replace(**fields, **({} if env is None else {"env": env})), preset


def _scaled(config: Config, steps: int, grows: bool) -> Config:
    """Return the configuration with another number of steps, and what is counted in steps scaled.

    A published recipe is scaled for shorter runs only: a longer one keeps its values.
    """
    factor = steps / config.steps
    factor = factor if grows else min(factor, 1.0)
    slow = min(factor, MOST_GROWTH)
    interval = _at_least_one(config.target_update_interval, max(slow, 1.0))
    scaled = config.replace(
        steps=steps,
        learning_starts=int(config.learning_starts * slow),
        target_update_interval=min(interval, max(1, steps // LEAST_TARGETS)),
        eval_freq=_at_least_one(config.eval_freq, factor),
    )
    # A rollout that is longer than the run is halved until it fits, if its parts can be.
    while not scaled.replay and scaled.train_freq > steps and scaled.gradient_steps % 2 == 0:
        half = scaled.train_freq // 2
        if scaled.train_freq % 2 or half % max(scaled.envs, 1) or half < 2 * scaled.envs:
            break
        scaled = scaled.replace(train_freq=half, gradient_steps=scaled.gradient_steps // 2)
    return scaled


def _at_least_one(interval: int, factor: float) -> int:
    """Return a scaled interval; 0, which has a meaning of its own, stays 0."""
    return max(1, int(interval * factor)) if interval else 0


def _with_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """Return the configuration with other fields; an algorithm also sets the fields of its row."""
    if "algo" in fields:
        config = with_algorithm(config, fields["algo"])
    return config.replace(**{**fields, "algo": config.algo})


def with_algorithm(config: Config, name: str) -> Config:
    """Return the configuration with another algorithm; fields of the old one become defaults."""
    name, switches = algorithm_switches(name)
    if name == config.algo:
        return config
    defaults = Config()
    _, old = algorithm_switches(config.algo)
    cleared = {switch: getattr(defaults, switch) for switch in old}
    return config.replace(**{**cleared, **switches, "algo": name})
