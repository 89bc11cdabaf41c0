"""Checks of a loaded state: a file may have been edited, and its checksums with it.

In: a stored value, and the value that a new run has in its place. Out: nothing, or an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from qfleet.core.errors import CheckpointError, one_line
from qfleet.core.types import Episode
from qfleet.storage.segments import Streamed

_GENERATORS = ("noise", "objective", "generator")  # sizes depend on the kind of device
_MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn the errors of a malformed state into CheckpointError; ``what`` begins its message."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except (*_MALFORMED, RuntimeError, OSError) as error:  # RuntimeError: of PyTorch
        if "memory" in str(error) and isinstance(error, RuntimeError):
            raise  # there is too little; the state may be right
        raise CheckpointError(f"{what}: {one_line(error)}") from error


def check_like(
    stored: Any, own: Any, where: str, *, most: int = 2**62, finite: bool = True, free: Any = ()
) -> None:
    """Raise CheckpointError unless ``stored`` has the keys, types, shapes and dtypes of ``own``.

    A list has the length of ``own``; a tuple with one element stands for a list of any length. None
    stands for None or a number. Integers are counters, at most ``most`` and never below those of a
    new run. ``finite``: tensors of floats must be finite. ``free``: keys of this
    dict whose values may be anything.
    """
    own = own.like if isinstance(own, Streamed) else own
    expected, check = "", partial(check_like, most=most, finite=finite)
    if isinstance(own, Tensor):
        is_alike = isinstance(stored, Tensor) and stored.dtype == own.dtype
        is_sized = is_alike and where.rpartition("/")[2] not in _GENERATORS
        if not is_alike or stored.dim() != own.dim() or (is_sized and stored.shape != own.shape):
            expected = f"a tensor of {own.dtype} {list(own.shape)}"
        elif finite and own.is_floating_point() and not bool(stored.isfinite().all()):
            expected = "finite"
    elif isinstance(own, dict):
        if not isinstance(stored, dict) or stored.keys() != own.keys():
            expected = f"a dict with the keys {', '.join(own)}"
        for key in [key for key in own if key not in free] if not expected else ():
            check(stored[key], own[key], f"{where}/{key}")
    elif isinstance(own, (list, tuple)):
        if not isinstance(stored, list) or (isinstance(own, list) and len(stored) != len(own)):
            expected = f"a list like {own}"
        for i, value in enumerate(stored if not expected else ()):
            check(value, own[i] if isinstance(own, list) else own[0], f"{where}[{i}]")
    elif isinstance(own, int):  # or a bool
        if type(stored) is not type(own) or not min(own, 0) <= stored <= most:
            expected = f"{type(own).__name__} from {min(own, 0)} to {most}"
    elif own is None and stored is None:
        pass
    elif type(stored) not in (int, float) or not math.isfinite(stored):
        expected = "a finite number"
    if expected:
        found = f"{stored.dtype} {list(stored.shape)}" if isinstance(stored, Tensor) else stored
        raise CheckpointError(f"{where} must be {expected}, got {str(found)[:60]!r}")


def check_episodes(stored: Any, num_envs: int) -> list[Episode]:
    """Return the finished episodes of ``num_envs`` environments that a state holds."""
    check_like(stored, ([0, 0.0, 0],), "episodes")
    if any(env >= num_envs for env, _, _ in stored):
        raise CheckpointError(f"episodes has an env that is not below {num_envs}")
    return [Episode(*fields) for fields in stored]
