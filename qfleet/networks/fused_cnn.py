"""MinAtar's small network with layer normalisation in Triton kernels, for K agents at once.

In: flat weights ``[K, P]`` and agent-major samples. Out: Q-values, or the flat gradient. The
arithmetic is that of ``networks.torsos.MinAtarCNN`` and of the Huber or squared loss
(tests/test_kernels.py compares them).
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import torch
from torch import Tensor

from qfleet.accelerator.fused_radam import on, why_no_kernels
from qfleet.config.config import Config
from qfleet.core.types import EnvSpec
from qfleet.networks.population import Population
from qfleet.networks.qnetwork import QNetwork
from qfleet.networks.torsos import MinAtarCNN

SIDE, WIDTH, CHANNELS, TILE = 8, 128, 16, 16
HEAD_SAMPLES = 8
"""Samples per program of the head and loss kernels: few, so that many programs run in parallel."""
DENSE_PIECES = 32
MOST_SAMPLES = 2**20
"""Limit of samples: kernels use 32-bit offsets, and a sample has 1024 features."""
BOARD = 10
"""Side of the boards that the kernels support."""


def fits(config: Config, spec: EnvSpec, network: QNetwork) -> bool:
    """Return whether the kernels support this network, on machines that support them."""
    one = network.template if isinstance(network, Population) else network
    torso = one.torso
    return (
        config.precision not in ("bf16", "fp16")
        and config.graphs
        and isinstance(torso, MinAtarCNN)
        and torso.by_position
        and torso.features == WIDTH
        and (spec.obs_dtype, spec.frame_stack) == ("uint8", 1)
        and spec.obs_shape[1:] == (BOARD, BOARD)
        and not torso.layout.channels_last
        and one.head_kind == "q"
        and not (config.dueling or config.noisy)
        and config.batch_size % TILE == 0
        and config.batch_size * config.population <= MOST_SAMPLES
    )


def fuse(config: Config, spec: EnvSpec, network: QNetwork, device: torch.device) -> FusedCNN | None:
    """Return the kernels for this network, or None if they do not support it or the machine."""
    if not fits(config, spec, network) or why_no_kernels(device) is not None:
        return None
    one = network.template if isinstance(network, Population) else network
    agents = network.agents if isinstance(network, Population) else 1
    precision: Literal["tf32", "ieee"] = "ieee" if config.precision == "fp32" else "tf32"
    sizes = [parameter.numel() for parameter in one.parameters()]
    offsets = [0, *itertools.accumulate(sizes)]
    return FusedCNN(
        tuple(offsets[:-1]), agents, spec.obs_shape[0], spec.num_actions, precision, device
    )


def _stride(rows: Tensor) -> int:
    """Return the distance from one agent's weights to the next agent's."""
    return rows.stride(0) if rows.dim() > 1 else 0


class FusedCNN:
    """The fused network: its shape, its parameters' offsets, and the buffers between kernels."""

    def __init__(
        self,
        offsets: tuple[int, ...],
        agents: int,
        boards: int,
        actions: int,
        precision: Literal["tf32", "ieee"],
        device: torch.device,
    ) -> None:
        """Create the network's buffers.

        ``offsets`` are the positions in P of kernel, bias, scale, shift, dense, bias, scale, shift,
        head, bias.
        """
        from qfleet.accelerator.kernels import small_cnn

        self._kernels = small_cnn
        self._at, self._agents = offsets, agents
        self._boards, self._actions, self._precision = boards, actions, precision
        self._taps = max(16, 2 ** math.ceil(math.log2(boards * 9)))
        self._device = device
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """Return a buffer. It is kept between calls: a recorded graph needs a fixed address."""
        key = (name, shape[0])
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, device=self._device)
        return self._buffers[key]

    def takes(self, samples: int) -> bool:
        """Return whether the kernels accept this number of samples of all agents together.

        Each agent's samples must fill whole tiles, and there is an upper limit.
        """
        return samples % (self._agents * TILE) == 0 and samples <= MOST_SAMPLES

    def _convolve(self, weights: Tensor, obs: Tensor, keep: bool) -> Tensor:
        obs, total = obs.contiguous(), obs.shape[0]
        partial = self._buffer("partial", SIDE * total, WIDTH)
        kept: list[Tensor] = [partial, partial, partial]
        if keep:
            kept = [
                self._buffer("features", total, SIDE * SIDE * CHANNELS),
                self._buffer("normed", total, SIDE * SIDE * CHANNELS),
                self._buffer("inverse", total, SIDE * SIDE),
            ]
        launch: Any = self._kernels.convolve
        launch[(total // TILE, SIDE)](
            obs, weights, _stride(weights), *kept, partial, total // self._agents,
            BOARDS=self._boards, TAPS=self._taps, AT=self._at, KEEP=keep,
            PRECISION=self._precision, num_warps=4,
        )  # fmt: skip
        return partial

    def q_values(self, weights: Tensor, obs: Tensor) -> Tensor:
        """Return Q-values ``[samples, actions]``; the next call overwrites them."""
        total = obs.shape[0]
        q = self._buffer("q", total, self._actions)
        launch: Any = self._kernels.values
        with on(self._device):
            partial = self._convolve(weights, obs, keep=False)
            launch[(total // HEAD_SAMPLES,)](
                weights, _stride(weights), partial, q, total // self._agents,
                ACTIONS=self._actions, AT=self._at, ROWS=HEAD_SAMPLES, num_warps=4,
            )  # fmt: skip
        return q

    def gradient(
        self,
        weights: Tensor,
        grad: Tensor,
        obs: Tensor,
        action: Tensor,
        target: Tensor,
        weight: Tensor,
        huber: bool,
    ) -> tuple[Tensor, Tensor]:
        """Write the mean loss's gradient of every agent to ``grad``.

        Returns each sample's prediction, and its error (prediction − target).
        """
        obs, total = obs.contiguous(), obs.shape[0]
        samples = total // self._agents
        kernels: Any = self._kernels
        slope = self._buffer("slope", total, WIDTH)
        prediction, errors = torch.empty((2, total), device=self._device)
        head_programs, conv_programs = total // HEAD_SAMPLES, samples // TILE * SIDE
        head_sums = self._buffer("head_sums", head_programs, (4 + self._actions) * WIDTH)
        conv_sums = self._buffer(
            "conv_sums", self._agents * conv_programs, (self._taps + 3) * CHANNELS
        )
        with on(self._device):
            partial = self._convolve(weights, obs, keep=True)
            kernels.judge[(head_programs,)](
                weights, _stride(weights), partial, action, target, weight, slope, prediction,
                errors, head_sums, samples,
                ACTIONS=self._actions, AT=self._at, ROWS=HEAD_SAMPLES, HUBER=huber, num_warps=2,
            )  # fmt: skip
            kernels.retrace[(self._agents, DENSE_PIECES + conv_programs)](
                obs, weights, _stride(weights), self._buffer("features", total),
                self._buffer("normed", total), self._buffer("inverse", total), slope, grad,
                conv_sums, samples,
                BOARDS=self._boards, TAPS=self._taps, AT=self._at, PRECISION=self._precision,
                num_warps=4, num_stages=1,
            )  # fmt: skip
            kernels.gather_sums[(self._agents, self._taps + 3 + 4 + self._actions)](
                conv_sums, head_sums, grad, _stride(grad), conv_programs,
                head_programs // self._agents, BOARDS=self._boards, TAPS=self._taps,
                ACTIONS=self._actions, AT=self._at, num_warps=4,
            )  # fmt: skip
        return prediction, errors
