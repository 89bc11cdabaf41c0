"""Inference on an accelerator: newest frames in, actions out; frame stacks stay on the device.

The newest frames of a group of environments lie in contiguous pinned host memory and are copied
asynchronously, on a stream with a higher priority than the learner's. One recorded graph then
pushes them onto the group's stacks, runs the network and takes the best action, or draws one from
an actor-critic's policy. If the replay memory is on the device, the frames stay there for it, so
that every frame crosses the bus once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.accelerator.graphs import record
from qfleet.accelerator.stream_timer import StreamTimer
from qfleet.accelerator.streams import stream_of
from qfleet.agent.inference import Inference
from qfleet.algorithms.exploration import sample_actions
from qfleet.core.types import Block, EnvSpec
from qfleet.networks.qnetwork import QNetwork

PACKED_BYTES = 8 + 4 + 1
"""Bytes of a row's action, reward and flags."""
TIMED_EVERY = 32
"""One in this many calls is timed."""


class Traffic:
    """Copies between host and device."""

    def __init__(self) -> None:
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self.copies = 0
        self.bandwidth_bytes_per_s: float | None = None
        """Bandwidth of a recent copy of frames, by the device's clock."""


class DeviceInference(Inference):
    """An ``Inference`` for a network on an accelerator."""

    def __init__(
        self,
        network: QNetwork,
        spec: EnvSpec,
        group_sizes: list[int],
        device: torch.device,
        seed: int,
        *,
        frames_stay: bool,
        compiled: bool,
    ) -> None:
        """``frames_stay``: blocks are delivered on the device, because the memory is there."""
        self._q_values = Compilable(network.q_values)
        self._q_values.on = compiled
        self._network, self._spec, self._device = network, spec, device
        self._frames_stay = frames_stay
        self._noise, self._seed = torch.Generator(device=device), seed
        self._samples = network.head_kind == "actor-critic"
        self.stream = stream_of(device, urgent=True)
        self.traffic = Traffic()
        self.device_time = StreamTimer(device, TIMED_EVERY)
        dtype = spec.torch_dtype
        stack = (spec.frame_stack,) if spec.frame_stack > 1 else ()
        self._incoming = [
            torch.zeros((n, *spec.frame_shape), dtype=dtype, device=device) for n in group_sizes
        ]
        self._stacks = [
            torch.zeros((n, *stack, *spec.frame_shape), dtype=dtype, device=device)
            for n in group_sizes
        ]
        self._opened = [torch.zeros(n, dtype=torch.bool, device=device) for n in group_sizes]
        self._actions = [torch.zeros(n, dtype=torch.int64, device=device) for n in group_sizes]
        self._host_opened = [torch.zeros(n, dtype=torch.bool).pin_memory() for n in group_sizes]
        self._any_opened = [False] * len(group_sizes)
        self._calls = 0
        self._host_actions = [torch.zeros(n, dtype=torch.int64).pin_memory() for n in group_sizes]
        self._host_frames = self._device_frames = torch.empty(0)
        self._packed = self._device_packed = torch.empty(0)
        self._done = torch.Event(device, blocking=True)
        self._copy_start = torch.Event(device, enable_timing=True)
        self._copy_end = torch.Event(device, enable_timing=True)
        drawn_from = [self._noise] if self._samples else []
        self._graphs = [
            record(lambda group=group: self._forward(group), device, drawn_from, "actor")  # type: ignore[misc]
            for group in range(len(group_sizes))
        ]
        self.forget()

    def forget(self) -> None:
        """Reset stacks, counters and seed after trial runs."""
        for stack in self._stacks:
            stack.zero_()
        self._noise.manual_seed(self._seed)
        torch.accelerator.synchronize(self._device)
        self.traffic = Traffic()
        self.device_time.reset()

    @torch.no_grad()
    def _forward(self, group: int) -> None:
        stack, newest = self._stacks[group], self._incoming[group]
        if self._spec.frame_stack > 1:
            shape = (-1, *(1 for _ in range(stack.dim() - 1)))
            older = stack[:, 1:].masked_fill(self._opened[group].view(shape), 0)
            stack.copy_(torch.cat((older, newest.unsqueeze(1)), dim=1))
        else:
            stack.copy_(newest)
        values = self._q_values(stack)
        if self._samples:
            chance = torch.rand(len(stack), generator=self._noise, device=self._device)
            self._actions[group].copy_(sample_actions(values, chance))
        else:
            self._actions[group].copy_(values.argmax(dim=1))

    def host_frames(self, shape: tuple[int, ...]) -> NDArray[Any]:
        self._host_frames = torch.zeros(shape, dtype=self._spec.torch_dtype).pin_memory()
        if self._frames_stay:
            self._device_frames = torch.zeros(
                shape, dtype=self._spec.torch_dtype, device=self._device
            )
            blocks, rows, envs = shape[:3]
            # Whole words, so that the columns of every block are aligned.
            width = -(-rows * envs * PACKED_BYTES // 8) * 8
            packed = torch.zeros((blocks, width), dtype=torch.uint8)
            self._packed, self._device_packed = packed.pin_memory(), packed.to(self._device)
        frames: NDArray[Any] = self._host_frames.numpy()
        return frames

    def begin_block(self) -> None:
        with self.stream:
            self._network.resample_noise(self._noise)

    def choose(
        self,
        group: int,
        block: int,
        row: int,
        columns: slice,
        _obs: NDArray[Any],
        opened: NDArray[np.bool_],
        needed: bool,
    ) -> NDArray[np.int64] | None:
        """Run the network even if its actions are not ``needed``: stacks need every frame."""
        timed = self._calls % TIMED_EVERY == 0
        self._calls += 1
        with self.stream:
            if timed:
                self._copy_start.record(self.stream)
            self._incoming[group].copy_(self._host_frames[block, row, columns], non_blocking=True)
            if timed:
                self._copy_end.record(self.stream)
            self._send_opened(group, opened)
            with self.device_time:
                self._graphs[group]()
            self._host_actions[group].copy_(self._actions[group], non_blocking=True)
            self._done.record(self.stream)
            if self._frames_stay:  # after the actions, which do not depend on it
                self._device_frames[block, row, columns] = self._incoming[group]
        # Even if no action is needed: the next call overwrites the pinned flags.
        self._done.synchronize()
        self._count(group, timed)
        return self._host_actions[group].numpy().copy() if needed else None

    def _send_opened(self, group: int, opened: NDArray[np.bool_]) -> None:
        """Copy the flags to the device if they changed; mostly no episode opens."""
        any_opened = bool(opened.any())
        if not any_opened and not self._any_opened[group]:
            return
        self._any_opened[group] = any_opened
        self._host_opened[group].numpy()[:] = opened
        self._opened[group].copy_(self._host_opened[group], non_blocking=True)
        self.traffic.bytes_to_device += len(opened)
        self.traffic.copies += 1

    def _count(self, group: int, timed: bool) -> None:
        frames = self._incoming[group]
        frame_bytes = math.prod(frames.shape) * frames.element_size()
        self.traffic.bytes_to_device += frame_bytes
        self.traffic.bytes_to_host += 8 * len(frames)
        self.traffic.copies += 2
        if timed:
            copy_s = self._copy_start.elapsed_time(self._copy_end) / 1e3
            self.traffic.bandwidth_bytes_per_s = frame_bytes / max(copy_s, 1e-9)

    def deliver(self, number: int, block: Block) -> Block:
        """Copy the other columns in one packed copy; the frames are on the device already."""
        if not self._frames_stay:
            return block
        packed, on_device = self._packed[number], self._device_packed[number]
        columns = (block.action, block.reward, block.flags)
        for host, column in zip(_columns(packed, block), columns, strict=True):
            host.copy_(column)
        with self.stream:
            on_device.copy_(packed, non_blocking=True)
        self.traffic.bytes_to_device += packed.numel()
        self.traffic.copies += 1
        action, reward, flags = _columns(on_device, block)
        return Block(
            self._device_frames[number, : block.rows], action, reward, flags, block.version,
            block.probability,
        )  # fmt: skip


def _columns(packed: Tensor, block: Block) -> list[Tensor]:
    """Return views of packed bytes as a block's action, reward and flags."""
    views, start = [], 0
    for column in (block.action, block.reward, block.flags):
        stop = start + column.numel() * column.element_size()
        views.append(packed[start:stop].view(column.dtype).view(column.shape))
        start = stop
    return views
