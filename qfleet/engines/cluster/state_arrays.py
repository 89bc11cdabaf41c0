"""State dicts with all tensors, at any depth, as arrays for messages, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from qfleet.core.types import StateDict


def map_state(state: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return the state with ``change`` applied to every value of this kind."""
    if isinstance(state, dict):
        return {name: map_state(value, kind, change) for name, value in state.items()}
    return change(state) if isinstance(state, kind) else state


def copy_state(state: Any) -> Any:
    return map_state(state, torch.Tensor, torch.Tensor.clone)


def as_arrays(state: StateDict) -> StateDict:
    """Return tensors as arrays: Ray would send the whole storage of a tensor that is a view."""
    return cast(StateDict, map_state(state, torch.Tensor, torch.Tensor.numpy))


def as_tensors(state: StateDict) -> StateDict:
    """Return arrays as tensors, copied."""
    return cast(StateDict, map_state(state, np.ndarray, lambda a: torch.from_numpy(np.array(a))))
