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


class Part(NamedTuple):
    """A part of an observation. All fields are JSON values."""

    path: list[Any]
    """Keys that lead to the part."""
    kind: str
    """Name of the space's class."""
    shape: list[int]
    is_bytes: bool = False
    counts: list[int] = []  # noqa: RUF012 (never changed)
    """Numbers of values of discrete entries, which begin at ``low``."""
    low: list[float] = []  # noqa: RUF012
    high: list[float] = []  # noqa: RUF012
    """Bounds of entries, which scale them if they become channels of an image."""
    scale: int = 1
    """Factor of the values of an image."""

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path)) or self.kind

    @property
    def is_image(self) -> bool:
        has_sides = len(self.shape) in (2, 3) and sorted(self.shape)[-2] >= LEAST_PIXELS
        return self.is_bytes and has_sides

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width. The shorter of the first and last axis has the channels."""
        first, middle, last = [1, *self.shape][-3:]
        return (first, middle, last) if first <= last else (last, first, middle)

    @property
    def size(self) -> int:
        """Number of entries of the vector."""
        return sum(self.counts) or math.prod(self.shape)

    def read(self, obs: Any) -> NDArray[Any]:
        value = np.asarray(functools.reduce(lambda inner, key: inner[key], self.path, obs))
        if self.is_bytes and value.dtype == np.int64 and value.size:  # lists of JSON
            is_pixels = value.min() >= 0 and value.max() <= 255
            return value.astype(np.uint8) if is_pixels else value
        return value

    def vector(self, value: NDArray[Any]) -> NDArray[np.float32]:
        """Return the value as a float32 vector: discrete entries one-hot, bytes in [0, 1]."""
        if list(value.shape) != self.shape:
            raise ValueError(f"{self.name} must have shape {self.shape}, got {list(value.shape)}")
        flat = value.ravel()
        if not self.counts:
            with np.errstate(over="ignore"):
                return np.asarray(flat / 255 if self.is_bytes else flat, np.float32)
        places = (flat - np.asarray(self.low)).astype(np.int64)
        is_whole = (flat == np.floor(flat)).all()
        if not is_whole or (places < 0).any() or (places >= self.counts).any():
            raise ValueError(f"{self.name} must be in {self.kind} {self.counts}, got {value}")
        hot = np.zeros(self.size, np.float32)
        hot[places + np.cumsum([0, *self.counts[:-1]])] = 1.0
        return hot

    def planes(self, value: NDArray[Any], height: int, width: int) -> NDArray[np.uint8]:
        """Return the value as channels ``[C, H, W]`` of an image: numbers as constant planes."""
        if self.is_image:
            if list(value.shape) != self.shape or value.dtype != np.uint8:
                got = f"{list(value.shape)} {value.dtype}"
                raise ValueError(f"{self.name} must be {self.shape} uint8, got {got}")
            value = value.reshape([1, *value.shape][-3:])
            if self.scale > 1:
                value = np.minimum(value, 255 // self.scale) * np.uint8(self.scale)
            return value if value.shape == self.image_shape else np.moveaxis(value, -1, 0)
        levels = self.vector(value).astype(np.float64)
        if not np.isfinite(levels).all():
            raise ValueError(f"{self.name} must be finite, got {value}")
        if self.high:
            low, span = np.asarray(self.low), np.subtract(self.high, self.low)
            bounded = np.isfinite(span) & (span > 0)
            scaled = (levels - np.where(bounded, low, 0)) / np.where(bounded, span, 1)
            levels = np.where(bounded, scaled, np.tanh(levels) / 2 + 0.5)
        plane = np.rint(255 * np.clip(levels, 0, 1)).astype(np.uint8)
        return np.broadcast_to(plane[:, None, None], (self.size, height, width))


class ObservationConverter:
    """Converts the parts of an observation to one array: an image, or else a float32 vector.

    If a part is an image, all numbers become constant channels of it: bounded ones scaled to 0 …
    255, others by tanh. Parts without numbers (Text, Graph, Sequence) are dropped.
    """

    def __init__(self, parts: list[Part]) -> None:
        """Raise ValueError if these parts cannot be converted."""
        if not any(part.is_image for part in parts):  # nothing is scaled: bounds do not matter
            parts = [p._replace(low=p.low if p.counts else [], high=[]) for p in parts]
        self._all = parts
        self.parts = [part for part in parts if part.kind in _NUMERIC]
        images = [part.image_shape for part in self.parts if part.is_image]
        sizes = sorted({shape[1:] for shape in images})
        numbers = sum(part.size for part in self.parts if not part.is_image)
        if not self.parts or len(sizes) > 1 or (images and numbers > MOST_CHANNELS):
            raise ValueError(
                "supported are numbers and images of one size, and beside an image at most "
                f"{MOST_CHANNELS} numbers; it has {numbers} and images of {sizes or 'no size'}"
            )
        self.dtype = "uint8" if images else "float32"
        self.shape: tuple[int, ...] = (numbers + sum(shape[0] for shape in images), *sum(sizes, ()))

    def to_json(self) -> str:
        return json.dumps(self._all)

    def __call__(self, obs: Any) -> NDArray[Any]:
        return self._join([part.read(obs) for part in self.parts])

    def batch(self, obs: Any) -> NDArray[Any]:
        """Convert an observation whose parts have equal leading axes: none, a batch, a stack."""
        values = [part.read(obs) for part in self.parts]
        lead = values[0].shape[: values[0].ndim - len(self.parts[0].shape)]
        for part, value in zip(self.parts, values, strict=True):
            if value.shape != (*lead, *part.shape):
                wanted = [*lead, *part.shape]
                raise ValueError(f"{part.name} must have shape {wanted}, got {list(value.shape)}")
        rows = [self._join([value[at] for value in values]) for at in np.ndindex(*lead)]
        return np.array(rows, self.dtype).reshape(*lead, *self.shape)

    def _join(self, values: list[NDArray[Any]]) -> NDArray[Any]:
        pairs = zip(self.parts, map(np.asarray, values), strict=True)
        if self.dtype == "float32":
            return np.concatenate([part.vector(value) for part, value in pairs])
        return np.concatenate([part.planes(value, *self.shape[1:]) for part, value in pairs])

    def describe(self) -> str:
        """Return one line: what became of the parts."""
        kind = "image, channels first," if self.dtype == "uint8" else "vector"
        size, names = "×".join(map(str, self.shape)), ", ".join(p.name for p in self.parts)
        lost = [f"; {p.name} ({p.kind}) dropped" for p in self._all if p not in self.parts]
        return f"observation: one {kind} of {size} from {names}{''.join(lost)}"


def _parts(space: spaces.Space[Any], path: list[Any]) -> list[Part]:
    """Return the parts of a space in order; those that are no numbers have only a kind."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        inner = space.spaces
        named = inner.items() if isinstance(inner, dict) else enumerate(inner)
        return [part for key, one in named for part in _parts(one, [*path, key])]
    own = (kind for kind in type(space).__mro__ if kind.__module__.startswith("gymnasium.spaces"))
    part = Part(path, next(own).__name__, [int(size) for size in space.shape or ()])
    if isinstance(space, (Discrete, MultiDiscrete)):
        counts = space.n if isinstance(space, Discrete) else space.nvec
        part = part._replace(counts=_numbers(counts, int), low=_numbers(space.start, int))
    elif isinstance(space, Box) and space.dtype != np.uint8:
        part = part._replace(low=_numbers(space.low, float), high=_numbers(space.high, float))
    return [part._replace(is_bytes=isinstance(space, Box) and space.dtype == np.uint8)]


def _numbers(values: Any, kind: type[float]) -> list[Any]:
    return [kind(value) for value in np.ravel(values)]


_NUMERIC = ("Box", "Discrete", "MultiBinary", "MultiDiscrete")


class ActionConverter:
    """Converts numbers from 0 to the combinations of values of an action's entries."""

    def __init__(self, axes: list[list[float]], shape: list[int], dtype: str) -> None:
        """``axes``: the values of each entry. Raise ValueError for too many combinations."""
        self.count = math.prod(len(values) for values in axes)
        if not 1 <= self.count <= MOST_ACTIONS or np.dtype(dtype).kind not in "iuf":
            raise ValueError(f"{self.count} combinations are more than {MOST_ACTIONS}")
        self._given = (axes, shape, dtype)
        self.table = np.array(list(itertools.product(*axes)), dtype).reshape(-1, *shape)

    @classmethod
    def of(cls, space: spaces.Space[Any], points: int) -> ActionConverter:
        """``points`` per dimension of a Box. Raise ValueError if there is no conversion."""
        axes: list[list[float]]
        if isinstance(space, MultiDiscrete):
            pairs = zip(_numbers(space.start, int), _numbers(space.nvec, int), strict=True)
            axes = [list(range(start, start + count)) for start, count in pairs]
        elif isinstance(space, MultiBinary):
            axes = [[0, 1]] * math.prod(space.shape)
        elif not isinstance(space, Box) or not space.is_bounded():
            raise ValueError("supported are Discrete, MultiDiscrete, MultiBinary and bounded Box")
        elif points < 2:
            raise ValueError(
                "--discretize-actions 5 gives each dimension 5 values, and their combinations are "
                "Discrete actions"
            )
        else:
            grid = np.linspace(space.low.ravel(), space.high.ravel(), points, axis=1)
            axes = (grid if space.dtype.kind == "f" else np.rint(grid)).tolist()
        return cls(axes, [int(size) for size in space.shape or ()], np.dtype(space.dtype).name)

    def to_json(self) -> str:
        return json.dumps(self._given)

    def describe(self) -> str:
        counts = "×".join(str(len(values)) for values in self._given[0])
        return f"actions: {self.count} combinations ({counts})"


class Converted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment with converted observations, actions, or both."""

    def __init__(
        self, env: AnyEnv, obs: ObservationConverter | None, actions: ActionConverter | None
    ) -> None:
        super().__init__(env)
        self._obs, self._actions = obs, actions
        if obs is not None:
            low, high = (0, 255) if obs.dtype == "uint8" else (-np.inf, np.inf)
            dtype: type[Any] = np.dtype(obs.dtype).type
            self.observation_space = Box(low, high, obs.shape, dtype)
        if actions is not None:
            self.action_space = Discrete(actions.count)

    def step(self, action: Any) -> Any:
        action = action if self._actions is None else self._actions.table[action].copy()
        obs, *rest = self.env.step(action)
        return obs if self._obs is None else self._obs(obs), *rest

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs if self._obs is None else self._obs(obs), info

    def as_json(self) -> dict[str, str]:
        """Return the conversions as fields of ``EnvSpec``."""
        both = {"raw_obs": self._obs, "raw_actions": self._actions}
        return {name: one.to_json() for name, one in both.items() if one is not None}


def convert(config: Config, env: AnyEnv) -> AnyEnv:
    """Return ``env`` with one Box or Discrete observation and one Discrete action.

    Raise UnsupportedEnvError if that is not possible.
    """
    for name in ("observation_space", "action_space"):
        if getattr(env, name, None) is None:
            raise UnsupportedEnvError(
                f"environment '{config.env}' has no {name}; set it in the __init__ of its class"
            )
    seen, acted, points = env.observation_space, env.action_space, config.discretize_actions
    obs = actions = None
    what, space = "observation", seen
    try:
        if 0 in (seen.shape or ()):
            raise ValueError("it holds no values; give it at least one")
        is_plain = isinstance(seen, Discrete) or (isinstance(seen, Box) and bool(seen.shape))
        if not is_plain or config.image_max < 255:
            scale = 255 // config.image_max
            parts = [p._replace(scale=scale) if p.is_image else p for p in _parts(seen, [])]
            obs = ObservationConverter(parts)
        what, space = "action", acted
        if points and not isinstance(acted, Box):
            raise ValueError(f"discretize_actions {points} is for Box actions; leave it out")
        if not isinstance(acted, Discrete):
            actions = ActionConverter.of(acted, points)
    except ValueError as error:
        raise UnsupportedEnvError(
            f"environment '{config.env}' has {what} space {space}: {error}"
        ) from None
    return env if obs is None and actions is None else Converted(env, obs, actions)


def stored_converters(
    spec: EnvSpec,
) -> tuple[ObservationConverter | None, ActionConverter | None]:
    """Return the converters of a spec, or raise CheckpointError: it may be anyone's data."""
    obs = actions = None
    try:
        if spec.raw_obs:
            obs = ObservationConverter([Part(*fields) for fields in json.loads(spec.raw_obs)])
        if spec.raw_actions:
            actions = ActionConverter(*json.loads(spec.raw_actions))
        frame = spec.unmasked.frame_shape
        fits_obs = obs is None or (obs.shape, obs.dtype) == (frame, spec.obs_dtype)
        if not fits_obs or (actions is not None and actions.count != spec.num_actions):
            raise ValueError("they do not fit the spec")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"the stored spaces are malformed: {one_line(error)}") from None
    return obs, actions


def describe_conversions(spec: EnvSpec) -> list[str]:
    """Return one line per conversion of the environment's spaces."""
    return [one.describe() for one in stored_converters(spec) if one is not None]
