"""Triton kernels for clipping and RAdam on K flat vectors of weights, ``[K, P]``, at once."""

import triton
import triton.language as tl


@triton.jit
def squares(grad, sums, length, stride, BLOCK: tl.constexpr):
    """Compute the sum of squares of one block of one agent's gradient."""
    agent, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad + agent.to(tl.int64) * stride + at, mask=at < length, other=0.0)
    tl.store(sums + agent * tl.num_programs(1) + block, tl.sum(g * g, 0))


@triton.jit
def _power(base: tl.constexpr, exponent):
    one = exponent * 0.0 + base
    return tl.exp(exponent * tl.log(one))


@triton.jit
def radam_numbers(
    sums, steps, learning_rate, numbers, norms, skipped, blocks, max_norm,
    BETA1: tl.constexpr, BETA2: tl.constexpr, TRUSTED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute each agent's gradient norm and the step's coefficients; count the step if finite.

    This is in double precision: in single precision, 1 − β₂ᵗ of the first steps has only three
    correct digits. ``numbers`` is ``[K, 3]``: factor of the gradient (0: skip the step), step size,
    rectification (0: too few steps for the second moment).
    """
    agent = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    total = tl.sum(tl.load(sums + agent * blocks + at, mask=at < blocks, other=0.0), 0)
    norm = tl.sqrt(total)
    good = norm < float("inf")
    tl.store(norms + agent, norm)
    tl.store(skipped + agent, tl.where(good, 0.0, 1.0))
    t = tl.load(steps + agent) + tl.where(good, 1.0, 0.0).to(tl.float64)
    tl.store(steps + agent, t)
    forgotten = _power(BETA2, t)
    longest: tl.constexpr = 2.0 / (1.0 - BETA2) - 1.0
    length = longest - 2.0 * t * forgotten / (1.0 - forgotten)
    shape = (length - 4.0) * (length - 2.0) * longest
    shape = shape / ((longest - 4.0) * (longest - 2.0) * length)
    rectified = tl.sqrt(tl.maximum(shape, 0.0) * (1.0 - forgotten))
    rectified = tl.where(length > TRUSTED, rectified, 0.0)
    size = tl.load(learning_rate + agent).to(tl.float64)
    size = size / (1.0 - _power(BETA1, t))
    scale = tl.minimum(max_norm / (norm + 1e-6), 1.0)
    out = numbers + agent * 3
    tl.store(out, tl.where(good, scale, 0.0))
    tl.store(out + 1, size.to(tl.float32))
    tl.store(out + 2, rectified.to(tl.float32))


@triton.jit
def radam(
    weights, grad, first, second, numbers, length, stride, eps,
    BETA1: tl.constexpr, BETA2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one agent's weights; skip it if the agent's gradient is not finite."""
    agent, block = tl.program_id(0), tl.program_id(1)
    scale = tl.load(numbers + agent * 3)
    if scale > 0.0:
        size, rectified = tl.load(numbers + agent * 3 + 1), tl.load(numbers + agent * 3 + 2)
        offset = block * BLOCK + tl.arange(0, BLOCK)
        known = offset < length
        at = agent.to(tl.int64) * stride + offset
        g = tl.load(grad + at, mask=known, other=0.0) * scale
        m = tl.load(first + at, mask=known, other=0.0)
        m = m + (1.0 - BETA1) * (g - m)
        v = BETA2 * tl.load(second + at, mask=known, other=0.0) + (1.0 - BETA2) * g * g
        factor = tl.where(rectified > 0.0, rectified / (tl.sqrt(v) + eps), 1.0)
        w = tl.load(weights + at, mask=known, other=0.0)
        tl.store(weights + at, w - size * m * factor, mask=known)
        tl.store(first + at, m, mask=known)
        tl.store(second + at, v, mask=known)
