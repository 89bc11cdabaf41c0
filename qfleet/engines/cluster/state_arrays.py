"""State dicts for messages between processes: tensors, at any depth, to arrays and back."""

from __future__ import annotations

import numpy as np
import torch

from qfleet.core.types import StateDict


def as_arrays(state: StateDict) -> StateDict:
    """Return tensors as arrays: a view of a tensor would travel with its whole storage."""
    return {
        name: as_arrays(value)
        if isinstance(value, dict)
        else value.numpy()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }


def as_tensors(state: StateDict) -> StateDict:
    """Return arrays as tensors, in memory of their own."""
    return {
        name: as_tensors(value)
        if isinstance(value, dict)
        else torch.from_numpy(np.array(value))
        if isinstance(value, np.ndarray)
        else value
        for name, value in state.items()
    }
