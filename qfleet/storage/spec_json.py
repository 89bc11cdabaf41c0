"""An environment's spec as JSON values, which policies and checkpoints store."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from qfleet.core.errors import CheckpointError, one_line
from qfleet.core.types import EnvSpec


def spec_to_json(spec: EnvSpec) -> dict[str, Any]:
    """Return all fields as JSON values; a user's spec may hold numpy's integers."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(spec), default=int))
    return values


def spec_from_json(values: Any) -> EnvSpec:
    """Return the spec of ``spec_to_json`` after a check of every field: it may be anyone's data."""
    try:
        names = ("obs_shape", "unmasked_shape")
        found = {name: tuple(values[name]) for name in names if values.get(name) is not None}
        spec = EnvSpec(**values | found)
    except (AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"the stored spec is malformed: {one_line(error)}") from None
    shapes = (*spec.obs_shape, *spec.unmasked.obs_shape)
    sizes = (*shapes, spec.num_actions, spec.frame_stack, spec.frame_skip)
    numbers = (*sizes, spec.num_obs_values, spec.first_obs_value, spec.first_action)
    if (
        not all(isinstance(text, str) for text in (spec.env_id, spec.raw_obs, spec.raw_actions))
        or spec.obs_dtype not in ("uint8", "float32", "int64")
        or any(type(number) is not int or abs(number) >= 2**62 for number in numbers)
        or min(*sizes, spec.num_obs_values + 1) < 1
        or (spec.is_masked and spec.unmasked.with_masks() != spec)
    ):
        raise CheckpointError(f"the stored spec is malformed: {str(values)[:300]!r}")
    return spec
