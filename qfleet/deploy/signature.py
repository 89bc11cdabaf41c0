"""The signature of a model, and the checks of what a client sends: any value in, arrays out."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import CheckpointError, ConfigError, one_line
from qfleet.core.types import EnvSpec
from qfleet.envs.adapters import ObservationConverter, Part, stored_converters
from qfleet.storage.spec_json import spec_from_json, spec_to_json


@dataclass(frozen=True)
class Signature:
    """What a model takes and returns; exported files hold it as JSON."""

    env: str
    algo: str
    obs_shape: tuple[int, ...]
    """Shape of one observation, with its frame stack and without masks."""
    obs_dtype: str
    """``float32``, ``uint8`` or ``int64``."""
    num_actions: int
    takes_masks: bool
    actions: list[Any]
    """The environment's own action of each index: numbers, or nested lists of them."""
    action_dtype: str = "int64"
    frame_stack: int = 1
    first_obs_value: int = 0
    num_obs_values: int = 0
    """Discrete observations: the smallest one, and how many there are; 0: they are arrays."""
    raw_obs: str = ""
    """How Dict, Tuple … observations become one array (``EnvSpec.raw_obs``); empty: they are."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Signature:
        """Return a signature after a check of every field: a file may be anyone's."""
        try:
            values = json.loads(text)
            found = cls(**values | {"obs_shape": tuple(values["obs_shape"])})
            stored_converters(spec_from_json(spec_to_json(found.spec)))
            table = np.array(found.actions, found.action_dtype)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the stored signature is malformed: {one_line(error)}") from None
        has_valid_types = isinstance(found.algo, str) and isinstance(found.takes_masks, bool)
        if not has_valid_types or table.dtype.kind not in "iuf" or len(table) != found.num_actions:
            raise CheckpointError(f"the stored signature is malformed: {text[:300]!r}")
        return found

    @property
    def spec(self) -> EnvSpec:
        """The observations and actions, without masks."""
        return EnvSpec(
            self.env, self.obs_shape, self.obs_dtype, self.num_actions, self.frame_stack,
            num_obs_values=self.num_obs_values, first_obs_value=self.first_obs_value,
            raw_obs=self.raw_obs,
        )  # fmt: skip


def check_observations(signature: Signature, value: Any) -> tuple[NDArray[Any], bool]:
    """Return a batch ``[B, *obs_shape]``, and whether ``value`` is one observation without B.

    Raise ConfigError if ``value`` is neither an observation nor a batch of them.
    Of Dict, Tuple … spaces, ``value`` is the environment's own structure, its parts ``[…]`` or
    ``[B, …]``.
    """
    shape, wanted = signature.obs_shape, np.dtype(signature.obs_dtype)
    try:
        if signature.raw_obs:
            converter = _converter(signature.raw_obs)
            for part in converter.parts:
                _refuse_text(functools.reduce(lambda inner, key: inner[key], part.path, value))
            value = converter.batch(value)
        _refuse_text(value)
        given = np.asarray(value)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise ConfigError(f"observation is no array: {one_line(error)[:200]}") from None
    if given.dtype.kind not in ("iuf" if wanted.kind == "f" else "iu"):
        raise ConfigError(f"observation must hold {wanted}, got {given.dtype}")
    is_single = given.shape == shape
    if is_single:
        given = given[None]
    if given.shape[1:] != shape or given.ndim == 0 or len(given) == 0:
        raise ConfigError(
            f"observation must have shape {shape} or [B, *{shape}], got {given.shape}"
        )
    if wanted.kind == "f":
        if given.dtype == wanted:  # errstate takes longer than the rest of the check
            batch = np.ascontiguousarray(given)
        else:
            with np.errstate(over="ignore"):
                batch = np.ascontiguousarray(given, wanted)
        if not np.isfinite(batch).all():
            raise ConfigError("observation must be finite, got NaN or Inf")
        return batch, is_single
    low, count = signature.first_obs_value, signature.num_obs_values
    if wanted == np.uint8:
        low, count = 0, 256
    if not low <= given.min() <= given.max() < low + count:
        got = f"{given.min()} … {given.max()}"
        raise ConfigError(f"observation must be in {low} … {low + count - 1}, got {got}")
    return np.ascontiguousarray(given, wanted), is_single


def check_action_masks(signature: Signature, value: Any, count: int) -> NDArray[np.bool_] | None:
    """Return masks ``[count, actions]``, of which each has a legal action; else ConfigError.

    ``value``: None (all are legal), or ``[actions]`` for all observations, or one per observation.
    """
    if value is None:
        return None
    if not signature.takes_masks:
        raise ConfigError("this policy was trained without action masks; leave them out")
    shape = (count, signature.num_actions)
    try:
        _refuse_text(value)
        given = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RecursionError):  # or rows of different lengths
        given = np.empty(0)
    is_usable = given.dtype.kind in "biuf" and given.shape in (shape, shape[1:])
    if not is_usable or not (given != 0).any(axis=-1).all():
        raise ConfigError(
            f"action_masks must be numbers of shape {shape[1:]} or {shape} with a legal action each"
        )
    return np.ascontiguousarray(np.broadcast_to(given != 0, shape))


def _refuse_text(value: Any) -> None:
    """Raise ValueError if a list holds text: numpy would make all entries as long as the longest.

    A body of 250 KB became an array of 20 GB.
    """
    if isinstance(value, str):
        raise ValueError("it holds text")
    if isinstance(value, list) and not set(map(type, value)) <= {int, float, bool}:
        for entry in value:
            _refuse_text(entry)


@functools.lru_cache(maxsize=16)
def _converter(raw_obs: str) -> ObservationConverter:
    return ObservationConverter([Part(*fields) for fields in json.loads(raw_obs)])
