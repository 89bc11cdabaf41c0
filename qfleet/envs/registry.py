"""From ``Config.env`` to an Atari game, a Gymnasium environment or a user's class.

In: a configuration. Out: a ROM name, or a single environment with canonical spaces. A wrong name or
wrong arguments raise a typed error here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete
from gymnasium.wrappers import FrameStackObservation, TimeLimit

from qfleet.config.config import Config
from qfleet.core.errors import (
    ConfigError,
    EnvironmentFault,
    UnknownNameError,
    UnsupportedEnvError,
    UserError,
    one_line,
)
from qfleet.core.plugins import add_current_folder, load_object
from qfleet.core.signals import FOREIGN_ERRORS, raise_if_signal
from qfleet.core.types import EnvSpec
from qfleet.envs.adapters import Converted, convert
from qfleet.envs.closing import close_env, closed_on_error
from qfleet.envs.foreign import OLD_GYM, check_interface, foreign_kind
from qfleet.envs.masks import MaskedObservations, gives_masks
from qfleet.envs.spaces import AnyEnv, Canonical, canonical, describe

_LEGACY_ATARI = re.compile(r"(?P<game>[A-Za-z0-9]+?)(?P<suffix>NoFrameskip|Deterministic)?-v[04]")


def import_modules(config: Config) -> None:
    """Import the modules of ``config.imports``, which may register environments."""
    if config.imports:
        add_current_folder()
    for name in config.imports:
        try:
            importlib.import_module(name)
        except FOREIGN_ERRORS as error:
            raise_if_signal(error)
            raise ConfigError(
                f"imports: cannot import '{name}': {one_line(error)}; install it or correct it"
            ) from error


def env_kwargs(config: Config, kind: str = "", known: Sequence[str] = ()) -> dict[str, Any]:
    """Return ``config.env_kwargs``; raise UnknownNameError for names not in ``known``, if given."""
    kwargs: dict[str, Any] = json.loads(config.env_kwargs)
    for name in kwargs:
        if known and name not in known:
            raise UnknownNameError(f"{kind} env_kwargs entry", name, known)
    return kwargs


def refused_kwargs(config: Config, error: Exception) -> ConfigError:
    """Return the error of an environment that was created with wrong ``env_kwargs``."""
    return ConfigError(
        f"environment '{config.env}' cannot take env_kwargs {config.env_kwargs}: {one_line(error)}"
    )


@functools.cache
def _atari_ids() -> dict[str, str]:
    """Return ROM name → id of the single-player games."""
    # The import registers the games. It is here because it takes a fifth of a second.
    import ale_py  # noqa: F401

    return {
        spec.kwargs["game"]: spec.id
        for spec in gymnasium.registry.values()
        if spec.id.startswith("ALE/")
    }


def ale_game(env_id: str) -> str | None:
    """Return the ROM name of an Atari id, or None if it is not an Atari id.

    Accepted are ``ALE/Pong-v5``, ``PongNoFrameskip-v4``, ``Pong-v4`` and ``pong``. An Atari id of
    an unknown game raises UnknownNameError. The configuration, not the variant of the id,
    determines frame skip and sticky actions.
    """
    registered = gymnasium.registry.get(env_id)
    if registered is not None and not str(registered.entry_point).startswith("ale_py"):
        return None
    if env_id.startswith("ALE/"):
        return _rom(env_id.removeprefix("ALE/").removesuffix("-v5"), env_id, is_required=True)
    if legacy := _LEGACY_ATARI.fullmatch(env_id):
        return _rom(legacy["game"], env_id, is_required=legacy["suffix"] is not None)
    if re.fullmatch(r"[a-z0-9_]+", env_id):
        return env_id if env_id in _atari_ids() else None
    return None


def _rom(name: str, env_id: str, *, is_required: bool) -> str | None:
    for rom in _atari_ids():
        if rom.replace("_", "") == name.replace("_", "").lower():
            return rom
    if is_required:
        raise UnknownNameError("Atari game", env_id, close_names(env_id))
    return None


def close_names(env_id: str) -> list[str]:
    """Return the registered ids most similar to this one, ignoring case; none if all differ."""
    _atari_ids()
    known = {name.lower(): name for name in gymnasium.registry}
    close = difflib.get_close_matches(env_id.lower(), known, n=3, cutoff=0.7)
    return [known[name] for name in close]


def unknown_env(env_id: str) -> UnknownNameError:
    """Return the error of an id that nothing has registered."""
    package = package_of(env_id)
    if package:
        return UnknownNameError(
            "environment", env_id, (), f"the installed package {package} has it: {package}:{env_id}"
        )
    advice = "PACKAGE:ID imports the package that registers an id"
    return UnknownNameError("environment", env_id, close_names(env_id), advice)


def package_of(env_id: str) -> str | None:
    """Return the installed package whose source has this id, without importing any package.

    Only packages that require Gymnasium are read. Those that announce their ids to Gymnasium need
    no import: their ids are registered already.
    """
    quoted = (f'"{env_id}"', f"'{env_id}'")
    for distribution in importlib.metadata.distributions():
        required = distribution.requires or []
        if not any(re.match(r"gymnasium\b", name) for name in required):
            continue
        for file in distribution.files or []:
            path = Path(str(file.locate()))
            if path.suffix == ".py" and path.is_file():
                text = path.read_text(errors="replace")
                if any(name in text for name in quoted):
                    return file.parts[0].removesuffix(".py")
    return None


def check_env(config: Config) -> None:
    """Raise an error if nothing is known under the name of an environment; make none."""
    import_modules(config)
    if ":" in config.env:
        load_object(config.env, "environment")
    elif not config.env.startswith("MinAtar/") and ale_game(config.env) is None:
        try:
            gymnasium.spec(config.env)
        except gymnasium.error.Error:
            raise unknown_env(config.env) from None
    if config.eval_env:
        check_env(config.replace(env=config.eval_env, eval_env=""))


def has_vector_entry_point(env_id: str) -> bool:
    registered = gymnasium.registry.get(env_id)
    return (
        registered is not None
        and registered.vector_entry_point is not None
        and not registered.additional_wrappers
    )


def make_single(
    config: Config, render_mode: str | None = None, masked: bool | None = None
) -> AnyEnv:
    """Make one non-Atari environment with its wrappers, converted spaces and frame stack.

    ``masked``: whether its observations shall hold masks; None: if it gives them.
    """
    import_modules(config)
    if ale_game(config.env) is not None:
        raise ConfigError(f"Atari game '{config.env}' has no single environment; use make_envs")
    masked = uses_masks(config) if masked is None else masked
    env = _wrapped(config, render_mode)
    with closed_on_error(env):
        return _fitted(config, env, masked)


def _fitted(config: Config, env: AnyEnv, masked: bool) -> AnyEnv:
    env = convert(config, env)
    spec = describe(config.env, env.observation_space, env.action_space)
    is_stacked = config.frame_stack > 1
    if is_stacked and isinstance(env.observation_space, Discrete):
        raise ConfigError(
            f"frame_stack {config.frame_stack} cannot stack the discrete observations of "
            f"'{config.env}'; set it to 0"
        )
    env = canonical(env, spec, copy=is_stacked)
    if masked:
        env = MaskedObservations(env, spec)
    if is_stacked:
        # Pad with zeros, not with the first frame: a memory rebuilds stacks by zeroing the frames
        # before it.
        env = FrameStackObservation(env, config.frame_stack, padding_type="zero")
    return env


_MASKS: dict[tuple[Any, ...], tuple[bool, list[Any]]] = {}
"""Name, arguments and wrappers of an environment → whether it gives masks, and its classes."""


def look_for_masks(config: Config) -> bool | None:
    """Return whether an environment gives masks; None if it fails, which a guard will report.

    This is an environment of its own, so that no other one has a reset too many.
    """
    env = _wrapped(config, None)
    try:
        return gives_masks(env)
    except FOREIGN_ERRORS as error:
        raise_if_signal(error)
        return None
    finally:
        close_env(env)


def uses_masks(config: Config, look: Callable[[Config], bool | None] = look_for_masks) -> bool:
    """Return whether an environment is to be used with masks; ``look`` for them only once."""
    kinds = {config.env: "environment"} | dict.fromkeys(config.wrappers, "wrapper")
    # By identity too: a notebook may define a class again.
    classes = [load_object(path, kind) for path, kind in kinds.items() if ":" in path]
    key = (config.env, config.env_kwargs, config.wrappers, *map(id, classes))
    if config.action_masks and key not in _MASKS:
        found = look(config)
        if found is None:
            return False
        _MASKS[key] = found, classes
    return config.action_masks and _MASKS[key][0]


def single_spec(config: Config, env: AnyEnv) -> EnvSpec:
    """Return the spec of an environment that ``make_single`` made."""
    frame_stack = max(config.frame_stack, 1)
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    masked = next((layer for layer in layers if isinstance(layer, MaskedObservations)), None)
    space = env.observation_space if masked is None else masked.env.observation_space
    spec = describe(config.env, space, env.action_space, frame_stack=frame_stack)
    if masked is not None:
        stack = (frame_stack,) if frame_stack > 1 else ()
        spec = dataclasses.replace(spec, obs_shape=(*stack, *spec.obs_shape)).with_masks()
    found = dict[str, Any]()
    for layer in layers:
        if isinstance(layer, Canonical):
            found |= {"first_action": layer.first_action, "first_obs_value": layer.first_value}
        elif isinstance(layer, Converted):
            found |= layer.as_json()
    return dataclasses.replace(spec, **found)


def _wrapped(config: Config, render_mode: str | None) -> AnyEnv:
    """Make the environment and apply the user's wrappers, the first of them innermost."""
    env = _make_raw(config, render_mode)
    with closed_on_error(env):
        check_interface(config.env, env)
        for path in config.wrappers:
            wrapper = load_object(path, "wrapper")
            try:
                wrapped = wrapper(env)
                assert isinstance(wrapped, gymnasium.Env), f"it made a {type(wrapped).__name__}"
            except FOREIGN_ERRORS as error:
                raise_if_signal(error)
                raise ConfigError(
                    f"wrapper '{path}' must make a gymnasium.Env of '{config.env}': "
                    f"{one_line(error)}"
                ) from error
            env = wrapped
    return env


def _make_raw(config: Config, render_mode: str | None) -> AnyEnv:
    kwargs = env_kwargs(config)
    if render_mode is not None:
        kwargs["render_mode"] = render_mode
    try:
        if ":" in config.env:
            return _make_from_class(config, kwargs)
        limit = config.max_episode_steps or None
        return gymnasium.make(
            config.env, max_episode_steps=limit, disable_env_checker=True, **kwargs
        )
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv):
        raise unknown_env(config.env) from None
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"environment '{config.env}' needs a package: {error}") from error
    except TypeError as error:
        if render_mode is not None and "render_mode" in str(error):
            raise ConfigError(
                f"environment '{config.env}' takes no render_mode, so no video can be recorded"
            ) from error
        if "argument" in str(error):
            raise refused_kwargs(config, error) from error
        raise _start_fault(config, error) from error
    except UserError:
        raise
    except FOREIGN_ERRORS as error:
        raise_if_signal(error)
        if "Gym is incompatible" in str(error):
            raise UnsupportedEnvError(f"environment '{config.env}' is {OLD_GYM}") from error
        raise _start_fault(config, error) from error


def _start_fault(config: Config, error: BaseException) -> EnvironmentFault:
    return EnvironmentFault(f"environment '{config.env}' failed to start: {one_line(error)}")


def _make_from_class(config: Config, kwargs: dict[str, Any]) -> AnyEnv:
    env = load_object(config.env, "environment")(**kwargs)
    if not isinstance(env, gymnasium.Env):
        if kind := foreign_kind(env):
            raise UnsupportedEnvError(f"environment '{config.env}' is {kind}")
        raise ConfigError(
            f"environment '{config.env}' made a {type(env).__name__}; it must be a gymnasium.Env"
        )
    return TimeLimit(env, config.max_episode_steps) if config.max_episode_steps else env
