"""Stub: the real module also turns environment objects into configuration fields."""

from __future__ import annotations

from typing import Any

from qfleet.core.errors import ConfigError


def env_fields(env: Any) -> dict[str, Any]:
    """Return the Config fields of an environment given as an id."""
    if not isinstance(env, str):
        raise ConfigError(f"env must be an id, got {type(env).__name__}")
    return {"env": env}
