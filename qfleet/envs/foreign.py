"""Environments of other libraries and interfaces: each is refused with the name of its adapter."""

from __future__ import annotations

import inspect
from typing import Any

from qfleet.core.errors import UnsupportedEnvError

OLD_GYM = (
    "an environment of the former package gym; convert it: shimmy.GymV26CompatibilityV0(env=env)"
)
OLD_API = (
    "written for old Gym (reset() without seed, or step() with four values); return what "
    "gymnasium.Env asks for, or convert it: shimmy.GymV21CompatibilityV0(env=env)"
)
PETTING_ZOO = (
    "a PettingZoo environment, which has several agents, and qfleet trains one; wrap it as a "
    "gymnasium.Env that plays the other agents (SuperSuit adapts observations and actions)"
)


def foreign_kind(env: Any) -> str | None:
    """Return what an object is if it is an environment, but not one of Gymnasium."""
    packages = {kind.__module__.partition(".")[0] for kind in type(env).__mro__}
    if "pettingzoo" in packages or hasattr(env, "possible_agents"):
        return PETTING_ZOO
    return OLD_GYM if "gym" in packages else None


def check_interface(env_id: str, env: Any, error: BaseException | None = None) -> None:
    """Raise UnsupportedEnvError if ``reset`` takes no seed or ``error`` is of a four-value step."""
    parameters = inspect.signature(type(env.unwrapped).reset).parameters
    takes_seed = "seed" in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    if not takes_seed or "(expected 5, got 4)" in str(error):
        raise UnsupportedEnvError(f"environment '{env_id}' is {OLD_API}") from error
