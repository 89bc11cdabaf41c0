"""Vectors on the wire: sizes, rounding, what top-k leaves behind, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError
from qfleet.engines.parameter_server.admission import Async
from qfleet.engines.parameter_server.compression import Cast, Compressor, TopK, bytes_of, unpack
from support.messages import says
from support.server_cases import make_push, make_shard, noise, weights_of

COMPRESSORS: list[Callable[[], Compressor]] = [
    lambda: Cast(torch.float16),
    lambda: Cast(torch.bfloat16),
    lambda: TopK(0.1),
    lambda: TopK(1.0),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_halves_the_bytes_and_rounds(dtype: torch.dtype) -> None:
    vector = noise(100, 0)
    packed = Cast(dtype).pack(vector)
    assert bytes_of(packed) == 200
    assert bytes_of(vector) == 400
    assert unpack(packed).dtype == torch.float32
    assert torch.equal(unpack(packed), vector.to(dtype).float())


@pytest.mark.parametrize("compressor", [TopK(1.0), Cast(torch.float32)], ids=["top-k", "cast"])
def test_at_100_percent_it_is_none_bit_for_bit(compressor: Compressor) -> None:
    for step in range(3):
        vector = noise(50, step)
        vector[0] = -0.0
        packed = compressor.pack(vector)
        assert bytes_of(packed) == vector.nbytes
        assert torch.equal(unpack(packed).view(torch.int32), vector.view(torch.int32))


def test_what_is_packed_does_not_change_with_the_senders_buffer() -> None:
    for make in (*COMPRESSORS, lambda: Cast(torch.float32)):
        vector = noise(20, 0)
        packed = make().pack(vector)
        before = unpack(packed).clone()
        vector.zero_()
        assert torch.equal(unpack(packed), before)


def test_top_k_by_hand() -> None:
    compressor = TopK(0.5)
    packed = compressor.pack(torch.tensor([1.0, -4.0, 2.0, 0.5]))
    assert unpack(packed).tolist() == [0.0, -4.0, 2.0, 0.0]
    assert bytes_of(packed) == 2 * (4 + 4)
    assert compressor.kept is not None
    assert compressor.kept.tolist() == [1.0, 0.0, 0.0, 0.5]
    # What was left is added to the next: 3, 1, 1, −1.5.
    assert unpack(compressor.pack(torch.tensor([2.0, 1.0, 1.0, -2.0]))).tolist() == [
        3.0,
        0,
        0,
        -1.5,
    ]
    assert compressor.kept.tolist() == [0.0, 1.0, 1.0, 0.0]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.floats(0.01, 1.0),
    st.integers(0, 1000),
)
def test_error_feedback_conserves_mass(size: int, steps: int, share: float, seed: int) -> None:
    """Whole numbers, so that sums are exact: sent + kept = given, entry by entry."""
    compressor = TopK(share)
    random = torch.Generator().manual_seed(seed)
    given_sum, sent = torch.zeros(size), torch.zeros(size)
    count = math.ceil(share * size)
    for _ in range(steps):
        gradient = torch.randint(-9, 10, (size,), generator=random).float()
        packed = compressor.pack(gradient)
        assert bytes_of(packed) == count * (4 if count == size else 4 + 4)
        given_sum += gradient
        sent += unpack(packed)
    kept = torch.zeros(size) if compressor.kept is None else compressor.kept
    assert torch.equal(sent + kept, given_sum)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("make", COMPRESSORS)
@pytest.mark.parametrize("count", [1, 30])
def test_what_is_not_finite_reaches_the_shard(
    make: Callable[[], Compressor], bad: float, count: int
) -> None:
    vector = noise(30, 0)
    vector[:count] = bad
    shard = make_shard(Async(), torch.zeros(30), workers=1)
    packed = make().pack(vector)
    reply = shard.push(make_push(0, 0, [0.0])._replace(gradient=packed))
    assert reply.reason == "not-finite"
    assert weights_of(shard).abs().sum() == 0


def test_a_bad_gradient_leaves_what_is_kept_alone() -> None:
    compressor = TopK(0.25)
    compressor.pack(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    compressor.pack(torch.tensor([math.nan, math.inf, 0.0, 0.0]))
    assert compressor.kept is not None
    assert compressor.kept.tolist() == [1.0, 2.0, 3.0, 0.0]
    assert unpack(compressor.pack(torch.zeros(4))).tolist() == [0.0, 0.0, 3.0, 0.0]


def test_numbers_beyond_half_precision_are_refused_not_bent() -> None:
    shard = make_shard(Async(), torch.zeros(2), workers=1)
    packed = Cast(torch.float16).pack(torch.tensor([1.0, 1e6]))
    assert shard.push(make_push(0, 0, [0.0])._replace(gradient=packed)).reason == "not-finite"


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    config = Config(engine="parameter-server", gradient_compression="top-k", top_k_share=share)
    with pytest.raises(ConfigError, match=says("top_k_share", repr(share))):
        validate(config)
