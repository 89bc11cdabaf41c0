"""Slices of the flat vector, and clipping over all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qfleet.core.errors import ConfigError
from qfleet.engines.parameter_server.clipping import clip
from qfleet.engines.parameter_server.layout import cut
from support.messages import says


def test_seven_over_three() -> None:
    assert cut(7, 3) == [slice(0, 3), slice(3, 5), slice(5, 7)]


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 300), st.data())
def test_slices_are_even_and_together_the_whole(size: int, data: st.DataObject) -> None:
    slices = cut(size, data.draw(st.integers(1, size)))
    lengths = [part.stop - part.start for part in slices]
    assert max(lengths) - min(lengths) <= 1
    vector = torch.arange(size)
    assert torch.equal(torch.cat([vector[part] for part in slices]), vector)


@pytest.mark.parametrize("shards", [0, 6])
def test_a_shard_without_weights_is_refused(shards: int) -> None:
    with pytest.raises(ConfigError, match=says("1", "5", "shards")):
        cut(5, shards)


@pytest.mark.parametrize(("limit", "scale"), [(1.0, 0.2), (5.0, 1.0), (0.0, 1.0)])
def test_clipping_is_by_the_norm_of_the_whole(limit: float, scale: float) -> None:
    gradient = torch.tensor([3.0, 4.0])
    assert clip(gradient, limit) == 5.0
    torch.testing.assert_close(gradient, torch.tensor([3.0, 4.0]) * scale)


def test_clipping_is_torchs() -> None:
    gradient = torch.randn(31, generator=torch.Generator().manual_seed(0)) * 100
    parameter = nn.Parameter(torch.zeros(31))
    parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_([parameter], 2.0)
    clip(gradient, 2.0)
    torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_what_is_bad_in_one_part_is_bad_in_every_part(bad: float, limit: float) -> None:
    gradient = torch.tensor([1.0, bad, 2.0])
    assert not math.isfinite(clip(gradient, limit))
    assert gradient.isnan().all()
