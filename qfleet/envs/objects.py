"""Environments and networks given as Python objects: from an object to fields of a Config."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import gymnasium
from torch.nn import Module

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, UnsupportedEnvError, one_line
from qfleet.core.plugins import name_object
from qfleet.envs.closing import close_env
from qfleet.envs.foreign import foreign_kind
from qfleet.envs.spaces import AnyEnv


def env_fields(env: Any) -> dict[str, Any]:
    """Return the fields of an id, an environment, or a class or function that makes one."""
    if isinstance(env, str):
        return {"env": env}
    while type(env).__module__ == "stable_baselines3.common.monitor":
        env = env.env  # it records returns, as every run does
    if isinstance(env, gymnasium.Env):
        return _spec_fields(env)
    # Stable-Baselines3's vector environments have the same attribute.
    if isinstance(number := getattr(env, "num_envs", None), int):
        raise ConfigError(
            f"env is a vector environment ({type(env).__name__}); give the id or class of a single "
            f"one, and envs={number}"
        )
    if callable(env):
        return {"env": name_object(env)}
    if kind := foreign_kind(env):
        raise UnsupportedEnvError(f"env {type(env).__name__} is {kind}")
    raise ConfigError(
        f"env must be an id, a gymnasium.Env, its class or a function that makes one, got {env!r}"
    )


def name_network(network: Any) -> str:
    """Return the name of a network that is given by name or as a class."""
    if isinstance(network, Module):
        raise ConfigError(
            f"network is an instance of {type(network).__name__}; give the class, which is called "
            "with the shape of an observation"
        )
    return network if isinstance(network, str) else name_object(network)


def named_fields(env: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Config for ``env`` and ``fields``, which may hold Python objects."""
    named = {**({} if env is None else env_fields(env)), **fields}
    if isinstance(named.get("init_from"), Path):
        named["init_from"] = str(named["init_from"])
    if "network" in named:
        named["network"] = name_network(named["network"])
    if "wrappers" in named:
        given = named["wrappers"]
        given = given if isinstance(given, (list, tuple)) else [given]
        named["wrappers"] = tuple(w if isinstance(w, str) else name_object(w) for w in given)
    if not isinstance(named.get("eval_env", ""), str):
        other = env_fields(named["eval_env"])
        if "max_episode_steps" in other:
            raise ConfigError("eval_env has its own time limit; give a function that makes it")
        more = Config(eval_env_kwargs=named.get("eval_env_kwargs", "{}"))
        kwargs = json.loads(other.get("env_kwargs", "{}")) | more.json_object("eval_env_kwargs")
        imports = (*other.get("imports", ()), *named.get("imports", ()))
        named |= {"eval_env": other["env"], "eval_env_kwargs": kwargs, "imports": imports}
    return named


def _spec_fields(env: AnyEnv) -> dict[str, Any]:
    """Return the fields of an environment that ``gymnasium.make`` made."""
    spec = env.spec
    if spec is None:
        raise ConfigError(
            f"env cannot be rebuilt: this {type(env.unwrapped).__name__} was not made by "
            "gymnasium.make; give its class, and its arguments as env_kwargs={…}"
        )
    registered = gymnasium.registry.get(spec.id)
    has_no_limit = spec.max_episode_steps is None
    lifts_limit = registered is not None and has_no_limit and registered.max_episode_steps
    if registered is not None and not spec.additional_wrappers and not lifts_limit:
        plain = registered.kwargs.items()
        changed = {
            k: v for k, v in spec.kwargs.items() if k != "render_mode" and (k, v) not in plain
        }
        is_other_limit = spec.max_episode_steps != registered.max_episode_steps
        limit = {"max_episode_steps": spec.max_episode_steps or 0} if is_other_limit else {}
        module = spec.entry_point.partition(":")[0] if isinstance(spec.entry_point, str) else ""
        package = module.partition(".")[0]
        known = package in ("", "__main__", "gymnasium", "ale_py")  # needs no import
        imports = {} if known else {"imports": (package,)}
        try:
            return {"env": spec.id, "env_kwargs": json.dumps(changed), **limit, **imports}
        except TypeError:
            pass  # arguments that JSON cannot express: rebuilt in this process only
    rebuild = functools.partial(gymnasium.make, spec, disable_env_checker=True)
    try:
        close_env(rebuild())
    except Exception as error:
        raise ConfigError(
            f"env cannot be rebuilt from its spec: {one_line(error)}; give a function that makes it"
        ) from None
    return {"env": name_object(rebuild, re.sub(r"\W", "_", spec.id))}
