"""State dicts that cross to another process and come back."""

from __future__ import annotations

import pickle

import numpy as np
import torch

from qfleet.engines.cluster.state_arrays import as_arrays, as_tensors

STATE = {
    "weights": torch.arange(3.0),
    "nested": {"step": torch.tensor(7), "deeper": {"flags": torch.tensor([True, False])}},
    "count": 5,
    "names": ["a", "b"],
    "nothing": None,
}


def test_tensors_at_any_depth_come_back_as_they_were() -> None:
    there = as_arrays(STATE)
    nested = there["nested"]
    for array in (there["weights"], nested["step"], nested["deeper"]["flags"]):
        assert type(array) is np.ndarray
    assert (there["count"], there["names"], there["nothing"]) == (5, ["a", "b"], None)
    back = as_tensors(pickle.loads(pickle.dumps(there)))
    step, flags = back["nested"]["step"], back["nested"]["deeper"]["flags"]
    assert torch.equal(back["weights"], torch.arange(3.0))
    assert (step.shape, step.dtype, int(step)) == ((), torch.int64, 7)
    assert (flags.dtype, flags.tolist()) == (torch.bool, [True, False])
    assert (back["count"], back["names"], back["nothing"]) == (5, ["a", "b"], None)


def test_a_part_travels_without_the_whole() -> None:
    part = as_arrays({"part": torch.zeros(10**6)[:10]})
    assert len(pickle.dumps(part)) < 10**4


def test_what_comes_back_is_in_memory_of_its_own() -> None:
    """A cluster's arrays are read by others too, and cannot be written to."""
    array = np.zeros(3)
    array.setflags(write=False)
    back = as_tensors({"inner": {"array": array}})["inner"]["array"]
    back.fill_(1.0)
    assert array.tolist() == [0.0, 0.0, 0.0]
