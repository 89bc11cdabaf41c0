"""State dicts between processes. In: tensors at any depth. Out: arrays instead, and back."""

from __future__ import annotations

import numpy as np
import torch

from qfleet.core.types import StateDict


def as_arrays(state: StateDict) -> StateDict:
    """Tensors as arrays: a view of a tensor would travel with all that it is a view of."""
    return {
        name: as_arrays(value)
        if isinstance(value, dict)
        else value.numpy()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }


def as_tensors(state: StateDict) -> StateDict:
    """And back, in memory of their own."""
    return {
        name: as_tensors(value)
        if isinstance(value, dict)
        else torch.from_numpy(np.array(value))
        if isinstance(value, np.ndarray)
        else value
        for name, value in state.items()
    }
