"""Conversion of spaces: from an environment's own spaces to one array and one number.

In: observations of Dict, Tuple, MultiBinary or MultiDiscrete spaces, and actions of MultiDiscrete,
MultiBinary or Box spaces. Out: observations of one Box and actions of one Discrete space. A
conversion is data (JSON in ``EnvSpec``), so that a saved policy converts without its environment.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError, UnsupportedEnvError, one_line
from qfleet.core.types import EnvSpec
from qfleet.envs.spaces import AnyEnv

MOST_ACTIONS = 1024
"""Largest number of combinations of a MultiDiscrete, MultiBinary or discretised Box action."""
MOST_CHANNELS = 64
"""Largest number of values that become channels of an image: each fills a plane of bytes."""
LEAST_PIXELS = 5
"""The smallest side of an image, as for the networks of ``auto``."""
_MOST_VALUES = 2**26


class Part(NamedTuple):
    """A part of an observation: where it is and what it holds. All fields are JSON values."""

    path: list[Any]
    """Keys that lead to the part."""
    kind: str
    """Name of the space's class."""
    shape: list[int]
    is_bytes: bool = False
    counts: list[int] | None = None
    """Numbers of values of discrete entries."""
    start: list[int] | None = None
    """First values of discrete entries."""
    low: list[float] | None = None
    high: list[float] | None = None
    """Bounds of the entries of a Box, which scale them if they become channels of an image."""
    scale: int = 1
    """Factor of an image's values."""

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path)) or self.kind

    @property
    def is_image(self) -> bool:
        is_flat = len(self.shape) in (2, 3) and sorted(self.shape)[-2] >= LEAST_PIXELS
        return self.kind == "Box" and self.is_bytes and is_flat

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width. The shorter of the first and last axis has the channels."""
        first, middle, last = [1, *self.shape][-3:]
        return (first, middle, last) if first <= last else (last, first, middle)

    @property
    def size(self) -> int:
        """Number of entries of the vector."""
        return math.prod(self.shape) if self.counts is None else sum(self.counts)

    def read(self, obs: Any) -> NDArray[Any]:
        return np.asarray(functools.reduce(lambda inner, key: inner[key], self.path, obs))

    def vector(self, value: NDArray[Any]) -> NDArray[np.float32]:
        """Return the value as a float32 vector: discrete entries one-hot, bytes in [0, 1]."""
        self._check(value)
        flat = value.ravel()
        if self.counts is None:
            with np.errstate(over="ignore"):
                return np.asarray(flat / 255 if self.is_bytes else flat, np.float32)
        places = flat - np.asarray(self.start)
        if (places < 0).any() or (places >= self.counts).any():
            raise ValueError(f"{self.name} must be in {self.kind} {self.counts}, got {value}")
        hot = np.zeros(self.size, np.float32)
        hot[places + [0, *itertools.accumulate(self.counts[:-1])]] = 1.0
        return hot

    def planes(self, value: NDArray[Any], height: int, width: int) -> NDArray[np.uint8]:
        """Return the value as channels ``[C, H, W]`` of an image: numbers as constant planes."""
        if self.is_image:
            self._check(value)
            value = value[None] if value.ndim == 2 else value
            if self.scale > 1:
                value = np.minimum(value, 255 // self.scale) * np.uint8(self.scale)
            return value if value.shape == self.image_shape else np.moveaxis(value, -1, 0)
        levels = self.vector(value).astype(np.float64)
        if not np.isfinite(levels).all():
            raise ValueError(f"{self.name} must be finite, got {value}")
        if self.low is not None and not self.is_bytes:
            low, high = np.asarray(self.low), np.asarray(self.high)
            bounded = np.isfinite(high - low) & (high > low)
            low, high = np.where(bounded, low, 0), np.where(bounded, high, 1)
            levels = np.where(bounded, (levels - low) / (high - low), np.tanh(levels) / 2 + 0.5)
        plane = np.rint(255 * np.clip(levels, 0, 1)).astype(np.uint8)
        return np.broadcast_to(plane[:, None, None], (self.size, height, width))

    def _check(self, value: NDArray[Any]) -> None:
        if list(value.shape) != self.shape or (self.is_image and value.dtype != np.uint8):
            dtype = " uint8" if self.is_image else ""
            raise ValueError(f"{self.name} must be {self.shape}{dtype}, got {list(value.shape)}")


class ObservationConverter:
    """Converts the parts of an observation to one array: an image, or else a float32 vector.

    If a part is an image, all numbers become constant channels of it: bounded ones scaled to 0 …
    255, others by tanh. Parts without numbers (Text, Graph, Sequence) are dropped.
    """

    def __init__(self, parts: list[Part]) -> None:
        """Raise ValueError if these parts cannot be converted."""
        self.all_parts = parts
        self.parts = [part for part in parts if part.kind in _NUMERIC]
        if not self.parts:
            raise ValueError("it has neither numbers nor an image")
        images = [part for part in self.parts if part.is_image]
        self.planes = sum(part.size for part in self.parts if not part.is_image)
        self.shape: tuple[int, ...] = (self.planes,)
        self.dtype = "uint8" if images else "float32"
        if images:
            sizes = {part.image_shape[1:] for part in images}
            if len(sizes) > 1:
                raise ValueError(f"it has images of different sizes: {sorted(sizes)}")
            if self.planes > MOST_CHANNELS:
                raise ValueError(
                    f"it has {self.planes} numbers beside an image, and at most {MOST_CHANNELS} "
                    "can become channels of it"
                )
            channels = self.planes + sum(part.image_shape[0] for part in images)
            self.shape = (channels, *images[0].image_shape[1:])

    @classmethod
    def of(cls, space: spaces.Space[Any], image_max: int = 255) -> ObservationConverter:
        """``image_max``: the largest value of images, which becomes (almost) 255."""
        parts = _parts(space, [])
        return cls([p._replace(scale=255 // image_max) if p.is_image else p for p in parts])

    @classmethod
    def stored(cls, text: str) -> ObservationConverter:
        """Return the converter of ``to_json`` after a check: the text may be anyone's data."""
        parts = [Part(*fields) for fields in json.loads(text)]
        for part in parts:
            entries = [len(x) for x in (part.counts, part.start, part.low, part.high) if x]
            count = math.prod(part.shape)
            sizes = (count, part.size, part.scale)
            if not 0 <= min(sizes) <= max(sizes) < _MOST_VALUES or {*entries} - {count}:
                raise ValueError(f"part {part.name} is malformed")
        return cls(parts)

    def to_json(self) -> str:
        return json.dumps(self.all_parts)

    def __call__(self, obs: Any) -> NDArray[Any]:
        return self._join([part.read(obs) for part in self.parts])

    def batch(self, obs: Any) -> tuple[NDArray[Any], bool]:
        """Convert one observation, or one whose parts are ``[B, …]``; return whether it was one."""
        values = [part.read(obs) for part in self.parts]
        if list(values[0].shape) == self.parts[0].shape:
            return self._join(values)[None], True
        rows = [self._join(list(row)) for row in zip(*values, strict=True)]
        return np.array(rows, self.dtype).reshape(-1, *self.shape), False

    def _join(self, values: list[NDArray[Any]]) -> NDArray[Any]:
        pairs = list(zip(self.parts, values, strict=True))
        if self.dtype == "float32":
            return np.concatenate([part.vector(value) for part, value in pairs])
        return np.concatenate([part.planes(value, *self.shape[1:]) for part, value in pairs])

    def describe(self) -> str:
        """Return one line: what became of the parts."""
        size, names = "×".join(map(str, self.shape)), ", ".join(p.name for p in self.parts)
        kind = "an image" if self.dtype == "uint8" else "a vector"
        rest = f", {self.planes} channels of it constant" if len(self.shape) > 1 else ""
        lost = [f"{p.name} ({p.kind})" for p in self.all_parts if p not in self.parts]
        return f"observation: {kind} of {size} from {names}{rest}" + (
            f"; {', '.join(lost)} dropped" if lost else ""
        )


def _parts(space: spaces.Space[Any], path: list[Any]) -> list[Part]:
    """Return the parts of a space in order; those that are no numbers have only a kind."""
    own = (kind for kind in type(space).__mro__ if kind.__module__.startswith("gymnasium.spaces"))
    kind, shape = next(own).__name__, [int(size) for size in space.shape or ()]
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        inner = space.spaces
        named = inner.items() if isinstance(inner, dict) else enumerate(inner)
        return [part for key, one in named for part in _parts(one, [*path, key])]
    if isinstance(space, (Discrete, MultiDiscrete)):
        counts = np.ravel(space.n if isinstance(space, Discrete) else space.nvec).tolist()
        return [Part(path, kind, shape, False, counts, np.ravel(space.start).tolist())]
    if isinstance(space, Box) and space.dtype != np.uint8:
        low, high = (np.ravel(bound).astype(float).tolist() for bound in (space.low, space.high))
        return [Part(path, kind, shape, low=low, high=high)]
    return [Part(path, kind, shape, is_bytes=isinstance(space, Box))]


_NUMERIC = ("Box", "Discrete", "MultiBinary", "MultiDiscrete")


class ActionConverter:
    """Converts numbers from 0 to the combinations of values of an action's entries."""

    def __init__(self, axes: list[list[float]], shape: list[int], dtype: str) -> None:
        """``axes``: the values of each entry. Raise ValueError for too many combinations."""
        self.count = math.prod(len(values) for values in axes)
        if not 1 <= self.count <= MOST_ACTIONS:
            raise ValueError(f"{self.count} combinations are more than {MOST_ACTIONS}")
        self._given = (axes, shape, dtype)
        self.table = np.array(list(itertools.product(*axes)), dtype).reshape(-1, *shape)

    @classmethod
    def of(cls, space: spaces.Space[Any], points: int) -> ActionConverter:
        """``points`` per dimension of a Box. Raise ValueError if there is no conversion."""
        shape = [int(size) for size in space.shape or ()]
        axes: list[list[float]]
        if isinstance(space, MultiDiscrete):
            starts = np.ravel(space.start).tolist()
            pairs = zip(starts, space.nvec.ravel().tolist(), strict=True)
            axes = [list(range(start, start + n)) for start, n in pairs]
        elif isinstance(space, MultiBinary):
            axes = [[0, 1]] * math.prod(shape)
        elif not isinstance(space, Box):
            raise ValueError("supported are Discrete, MultiDiscrete, MultiBinary and Box")
        elif not space.is_bounded():
            raise ValueError("a grid needs bounds, which this Box does not have")
        elif points < 2:
            raise ValueError(
                "--discretize-actions 5 gives each dimension 5 values, and their combinations are "
                "Discrete actions"
            )
        else:
            grid = np.linspace(space.low.ravel(), space.high.ravel(), points, axis=1)
            is_float = np.issubdtype(space.dtype, np.floating)
            axes = (grid if is_float else np.rint(grid)).tolist()
        return cls(axes, shape, np.dtype(space.dtype).name)

    @classmethod
    def stored(cls, text: str) -> ActionConverter:
        return cls(*json.loads(text))

    def to_json(self) -> str:
        return json.dumps(self._given)

    def describe(self) -> str:
        counts = "×".join(str(len(values)) for values in self._given[0])
        return f"actions: {self.count} combinations ({counts})"


class ConvertedObservations(gymnasium.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: AnyEnv, converter: ObservationConverter) -> None:
        super().__init__(env)
        self.converter = converter
        low, high = (0.0, 255.0) if converter.dtype == "uint8" else (-np.inf, np.inf)
        dtype: type[Any] = np.dtype(converter.dtype).type
        self.observation_space = Box(low, high, converter.shape, dtype)

    def observation(self, observation: Any) -> Any:
        return self.converter(observation)


class ConvertedActions(gymnasium.ActionWrapper[Any, Any, Any]):
    def __init__(self, env: AnyEnv, converter: ActionConverter) -> None:
        super().__init__(env)
        self.converter = converter
        self.action_space = Discrete(converter.count)

    def action(self, action: Any) -> Any:
        return self.converter.table[action].copy()


def convert(config: Config, env: AnyEnv) -> AnyEnv:
    """Return ``env`` with one Box or Discrete observation and one Discrete action.

    Raise UnsupportedEnvError if that is not possible.
    """
    seen, acted, points = env.observation_space, env.action_space, config.discretize_actions
    what, space = "observation", seen
    is_plain = isinstance(seen, Discrete) or (isinstance(seen, Box) and seen.shape)
    try:
        if not is_plain or config.image_max < 255:
            env = ConvertedObservations(env, ObservationConverter.of(seen, config.image_max))
        what, space = "action", acted
        if points and not isinstance(acted, Box):
            raise ValueError(f"discretize_actions {points} is for Box actions; leave it out")
        if not isinstance(acted, Discrete):
            env = ConvertedActions(env, ActionConverter.of(acted, points))
    except ValueError as error:
        raise UnsupportedEnvError(
            f"environment '{config.env}' has {what} space {space}: {error}"
        ) from None
    return env


def stored_converters(
    spec: EnvSpec,
) -> tuple[ObservationConverter | None, ActionConverter | None]:
    """Return the converters of a spec, or raise CheckpointError if they do not fit it."""
    obs = actions = None
    try:
        if spec.raw_obs:
            obs = ObservationConverter.stored(spec.raw_obs)
            assert (obs.shape, obs.dtype) == (spec.frame_shape, spec.obs_dtype)
        if spec.raw_actions:
            actions = ActionConverter.stored(spec.raw_actions)
            assert actions.count == spec.num_actions
    except (ValueError, TypeError, AssertionError, KeyError, RecursionError) as error:
        raise CheckpointError(f"the stored spaces are malformed: {one_line(error)}") from None
    return obs, actions


def describe_conversions(spec: EnvSpec) -> list[str]:
    """Return one line per conversion of the environment's spaces."""
    return [one.describe() for one in stored_converters(spec) if one is not None]
