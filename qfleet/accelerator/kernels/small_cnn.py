"""Triton kernels for the small network of MinAtar with layer normalisation, for K agents at once.

    boards [C, 10, 10] → 16 kernels of 3×3 → LayerNorm over channels → ReLU
                       → dense 128 → LayerNorm → ReLU → Q-values

torch.compile makes some forty kernels of one update of this network, each with a few µs of latency
and next to no arithmetic. Here there are four: the tiles are chosen so that only the values that
one kernel passes to the next are written to global memory. Every sum has a fixed order: there are
no atomics, and the same samples give the same bits.

Features are position-major, ``[row, column, channel]``, as the network itself flattens them: the
sixteen channels that are normalised together are adjacent, and the features of one row of positions
are contiguous in memory, also in the dense layer's weights.
"""

import triton
import triton.language as tl

CHANNELS = tl.constexpr(16)
SIDE = tl.constexpr(8)
"""Side of the convolution's output for a board of 10×10."""
WIDTH = tl.constexpr(128)
"""Width of the dense layer; also the features of one row of positions, SIDE × CHANNELS."""
FEATURES = tl.constexpr(1024)
TILE = tl.constexpr(16)
"""Samples per program: the smallest tile that matrix units support."""
EPS = tl.constexpr(1e-6)


@triton.jit
def _patches(obs, first, row, BOARDS: tl.constexpr, TAPS: tl.constexpr):
    """Return the inputs ``[TILE·SIDE, TAPS]`` of the convolution for one row of TILE samples."""
    m = tl.arange(0, TILE * SIDE)
    tap = tl.arange(0, TAPS)
    board, within = tap // 9, tap % 9
    corner = (first + m // SIDE) * (BOARDS * 100) + row * 10 + m % SIDE
    offset = board * 100 + (within // 3) * 10 + within % 3
    known = (tap < BOARDS * 9)[None, :] & (m >= 0)[:, None]
    seen = tl.load(obs + corner[:, None] + offset[None, :], mask=known, other=0)
    return seen.to(tl.float32) / 255.0


@triton.jit
def convolve(
    obs, weights, stride, features, normed, inverse, partial, samples,
    BOARDS: tl.constexpr, TAPS: tl.constexpr, AT: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute convolution, normalisation, ReLU, and this row's part of the dense layer's sum.

    A program handles TILE samples and one row of positions. ``partial`` is
    ``[SIDE, all samples, WIDTH]``.
    """
    first, row = tl.program_id(0) * TILE, tl.program_id(1)
    own = weights + (first // samples).to(tl.int64) * stride
    channel, tap = tl.arange(0, CHANNELS), tl.arange(0, TAPS)
    x = _patches(obs, first, row, BOARDS, TAPS)
    kernel = tl.load(
        own + AT[0] + channel[None, :] * (BOARDS * 9) + tap[:, None],
        mask=(tap < BOARDS * 9)[:, None] & (channel >= 0)[None, :], other=0.0,
    )  # fmt: skip
    y = tl.dot(x, kernel, input_precision=PRECISION) + tl.load(own + AT[1] + channel)[None, :]
    y = y - (tl.sum(y, 1) / CHANNELS)[:, None]
    rstd = 1.0 / tl.sqrt(tl.sum(y * y, 1) / CHANNELS + EPS)
    y = y * rstd[:, None]
    scale, shift = tl.load(own + AT[2] + channel), tl.load(own + AT[3] + channel)
    active = tl.maximum(y * scale[None, :] + shift[None, :], 0.0)
    m, f, sample = tl.arange(0, TILE * SIDE), tl.arange(0, WIDTH), first + tl.arange(0, TILE)
    active = tl.reshape(active, (TILE, WIDTH))
    at = sample[:, None] * FEATURES + row * WIDTH + f[None, :]
    if KEEP:
        tl.store(features + at, active)
        tl.store(normed + at, tl.reshape(y, (TILE, WIDTH)))
        tl.store(inverse + (first + m // SIDE) * (SIDE * SIDE) + row * SIDE + m % SIDE, rstd)
    dense = tl.load(own + AT[4] + f[:, None] * FEATURES + row * WIDTH + f[None, :])
    share = tl.dot(active, tl.trans(dense), input_precision=PRECISION)
    everyone = tl.num_programs(0) * TILE
    tl.store(partial + (row * everyone + sample[:, None]) * WIDTH + f[None, :], share)


@triton.jit
def _hidden(own, partial, sample, everyone, AT: tl.constexpr):
    """Return these samples' hidden units: normalised, scaled, after ReLU; and 1/std."""
    unit = tl.arange(0, WIDTH)
    z = tl.load(partial + sample[:, None] * WIDTH + unit[None, :])
    for row in tl.static_range(1, SIDE):
        z += tl.load(partial + (row * everyone + sample[:, None]) * WIDTH + unit[None, :])
    z += tl.load(own + AT[5] + unit)[None, :]
    z = z - (tl.sum(z, 1) / WIDTH)[:, None]
    rstd = 1.0 / tl.sqrt(tl.sum(z * z, 1) / WIDTH + EPS)
    z = z * rstd[:, None]
    scale, shift = tl.load(own + AT[6] + unit), tl.load(own + AT[7] + unit)
    return z, tl.maximum(z * scale[None, :] + shift[None, :], 0.0), rstd


@triton.jit
def values(
    weights, stride, partial, q, samples,
    ACTIONS: tl.constexpr, AT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute Q-values ``[all samples, ACTIONS]`` from the output of ``convolve``."""
    first = tl.program_id(0) * ROWS
    own = weights + (first // samples).to(tl.int64) * stride
    sample, unit = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    _, active, _ = _hidden(own, partial, sample, tl.num_programs(0) * ROWS, AT)
    for action in tl.static_range(ACTIONS):
        head = tl.load(own + AT[8] + unit * ACTIONS + action)
        value = tl.sum(active * head[None, :], 1) + tl.load(own + AT[9] + action)
        tl.store(q + sample * ACTIONS + action, value)


@triton.jit
def judge(
    weights, stride, partial, action, target, weight, slope, prediction, errors, sums, samples,
    ACTIONS: tl.constexpr, AT: tl.constexpr, ROWS: tl.constexpr, HUBER: tl.constexpr,
):  # fmt: skip
    """Compute Q-values, the loss's gradient, and the backward pass to the dense layer's output.

    ``slope`` is the gradient of the dense layer's output; ``sums``,
    ``[programs, (3 + ACTIONS)·WIDTH + WIDTH]``, holds these samples' part of the gradient of bias,
    scale, shift and head.
    """
    first = tl.program_id(0) * ROWS
    own = weights + (first // samples).to(tl.int64) * stride
    sample, unit = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    z, active, rstd = _hidden(own, partial, sample, tl.num_programs(0) * ROWS, AT)
    taken = tl.load(action + sample)
    predicted = tl.zeros((ROWS,), dtype=tl.float32)
    head_taken = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for a in tl.static_range(ACTIONS):
        head = tl.load(own + AT[8] + unit * ACTIONS + a)
        value = tl.sum(active * head[None, :], 1) + tl.load(own + AT[9] + a)
        predicted = tl.where(taken == a, value, predicted)
        head_taken = tl.where((taken == a)[:, None], head[None, :], head_taken)
    tl.store(prediction + sample, predicted)
    error = predicted - tl.load(target + sample)
    tl.store(errors + sample, error)
    if HUBER:
        error = tl.minimum(tl.maximum(error, -1.0), 1.0)
    error = error * tl.load(weight + sample) / samples
    out = sums + tl.program_id(0) * ((4 + ACTIONS) * WIDTH)
    for a in tl.static_range(ACTIONS):
        one = tl.where(taken == a, error, 0.0)
        tl.store(out + (3 + a) * WIDTH + unit, tl.sum(active * one[:, None], 0))
        tl.store(out + (3 + ACTIONS) * WIDTH + a, tl.sum(one, 0))
    d = tl.where(active > 0.0, error[:, None] * head_taken, 0.0)
    tl.store(out + WIDTH + unit, tl.sum(d * z, 0))
    tl.store(out + 2 * WIDTH + unit, tl.sum(d, 0))
    d = d * tl.load(own + AT[6] + unit)[None, :]
    d = d - (tl.sum(d, 1) / WIDTH)[:, None] - z * (tl.sum(d * z, 1) / WIDTH)[:, None]
    d = d * rstd[:, None]
    tl.store(out + unit, tl.sum(d, 0))
    tl.store(slope + sample[:, None] * WIDTH + unit[None, :], d)


@triton.jit
def _dense_gradient(features, slope, into, first, samples, piece, AT: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """Compute a tile of the dense layer's gradient, 64 units × 64 features, over all samples."""
    f, unit = (piece // 2) * 64 + tl.arange(0, 64), (piece % 2) * 64 + tl.arange(0, 64)
    total = tl.zeros((64, 64), dtype=tl.float32)
    for start in range(0, samples, 64):
        sample = start + tl.arange(0, 64)
        known = (sample < samples)[:, None]
        at = (first + sample)[:, None]
        seen = tl.load(features + at * FEATURES + f[None, :], mask=known, other=0.0)
        back = tl.load(slope + at * WIDTH + unit[None, :], mask=known, other=0.0)
        total = tl.dot(tl.trans(back), seen, total, input_precision=PRECISION)
    tl.store(into + AT[4] + unit[:, None] * FEATURES + f[None, :], total)


@triton.jit
def _convolution_gradient(
    obs, own, features, normed, inverse, slope, out, first, row,
    BOARDS: tl.constexpr, TAPS: tl.constexpr, AT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the part of the convolution's gradient of TILE samples at one row of positions."""
    f, channel, m = tl.arange(0, WIDTH), tl.arange(0, CHANNELS), tl.arange(0, TILE * SIDE)
    tap, sample = tl.arange(0, TAPS), first + tl.arange(0, TILE)
    back = tl.load(slope + sample[:, None] * WIDTH + f[None, :])
    dense = tl.load(own + AT[4] + f[:, None] * FEATURES + row * WIDTH + f[None, :])
    d = tl.dot(back, dense, input_precision=PRECISION)
    at = sample[:, None] * FEATURES + row * WIDTH + f[None, :]
    d = tl.where(tl.load(features + at) > 0.0, d, 0.0)
    d = tl.reshape(d, (TILE * SIDE, CHANNELS))
    y = tl.reshape(tl.load(normed + at), (TILE * SIDE, CHANNELS))
    tl.store(out + (TAPS + 1) * CHANNELS + channel, tl.sum(d * y, 0))
    tl.store(out + (TAPS + 2) * CHANNELS + channel, tl.sum(d, 0))
    d = d * tl.load(own + AT[2] + channel)[None, :]
    d = d - (tl.sum(d, 1) / CHANNELS)[:, None] - y * (tl.sum(d * y, 1) / CHANNELS)[:, None]
    rstd = tl.load(inverse + (first + m // SIDE) * (SIDE * SIDE) + row * SIDE + m % SIDE)
    d = d * rstd[:, None]
    tl.store(out + TAPS * CHANNELS + channel, tl.sum(d, 0))
    x = _patches(obs, first, row, BOARDS, TAPS)
    kernel = tl.dot(tl.trans(x), d, input_precision=PRECISION)
    tl.store(out + tap[:, None] * CHANNELS + channel[None, :], kernel)


@triton.jit
def retrace(
    obs, weights, stride, features, normed, inverse, slope, grad, sums, samples,
    BOARDS: tl.constexpr, TAPS: tl.constexpr, AT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the dense layer, and partial sums of the convolution's gradient.

    Grid axis 0 is the agent. Axis 1: the first 32 programs each compute a tile of the dense layer's
    gradient over all samples; the others propagate TILE samples and one row of positions back
    through the layers. ``sums`` is ``[programs of the second kind, (TAPS + 3)·CHANNELS]``.
    """
    agent, piece = tl.program_id(0), tl.program_id(1)
    first = agent * samples
    if piece < 32:
        into = grad + agent.to(tl.int64) * stride
        _dense_gradient(features, slope, into, first, samples, piece, AT, PRECISION)
    else:
        tile = piece - 32
        own = weights + agent.to(tl.int64) * stride
        out = sums + (agent * (tl.num_programs(1) - 32) + tile) * ((TAPS + 3) * CHANNELS)
        _convolution_gradient(
            obs, own, features, normed, inverse, slope, out,
            first + (tile // SIDE) * TILE, tile % SIDE, BOARDS, TAPS, AT, PRECISION,
        )  # fmt: skip


@triton.jit
def _add_lines(sums, count, width, known, LINE: tl.constexpr):
    """Return the sum of ``count`` vectors of LINE numbers whose starts are ``width`` apart."""
    unit, each = tl.arange(0, LINE), tl.arange(0, 16)
    total = tl.zeros((LINE,), dtype=tl.float32)
    for start in range(0, count, 16):
        place = start + each
        found = tl.load(
            sums + place[:, None] * width + unit[None, :],
            mask=(place < count)[:, None] & (unit < known)[None, :], other=0.0,
        )  # fmt: skip
        total += tl.sum(found, 0)
    return total


@triton.jit
def _gather_convolution(sums, into, count, line, BOARDS: tl.constexpr, TAPS: tl.constexpr,
                        AT: tl.constexpr):  # fmt: skip
    channel = tl.arange(0, CHANNELS)
    total = _add_lines(sums + line * CHANNELS, count, (TAPS + 3) * CHANNELS, CHANNELS, CHANNELS)
    if line < BOARDS * 9:
        tl.store(into + AT[0] + channel * (BOARDS * 9) + line, total)
    if line >= TAPS:
        # bias, scale and shift are adjacent in the flat weights
        tl.store(into + AT[1] + (line - TAPS) * CHANNELS + channel, total)


@triton.jit
def _gather_head(sums, into, count, line, ACTIONS: tl.constexpr, AT: tl.constexpr):
    unit = tl.arange(0, WIDTH)
    known = tl.where(line == 3 + ACTIONS, ACTIONS, WIDTH)
    total = _add_lines(sums + line * WIDTH, count, (4 + ACTIONS) * WIDTH, known, WIDTH)
    if line < 3:
        # bias, scale and shift of the dense layer are adjacent in the flat weights
        tl.store(into + AT[5] + line * WIDTH + unit, total)
    elif line < 3 + ACTIONS:
        tl.store(into + AT[8] + unit * ACTIONS + (line - 3), total)
    else:
        tl.store(into + AT[9] + unit, total, mask=unit < ACTIONS)


@triton.jit
def gather_sums(
    conv_sums, head_sums, grad, stride, conv_count, head_count,
    BOARDS: tl.constexpr, TAPS: tl.constexpr, ACTIONS: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of ``retrace`` and ``judge`` into the gradient.

    Grid axis 0 is the agent; axis 1 is the taps and the three vectors of the convolution, then
    those of the dense layer and the head.
    """
    agent, line = tl.program_id(0), tl.program_id(1)
    into = grad + agent.to(tl.int64) * stride
    if line < TAPS + 3:
        own = conv_sums + agent * conv_count * ((TAPS + 3) * CHANNELS)
        _gather_convolution(own, into, conv_count, line, BOARDS, TAPS, AT)
    else:
        own = head_sums + agent * head_count * ((4 + ACTIONS) * WIDTH)
        _gather_head(own, into, head_count, line - (TAPS + 3), ACTIONS, AT)
