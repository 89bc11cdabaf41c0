"""States in messages between ranks: nested dicts of tensors, ``Segments`` and JSON values.

A message is a JSON text, in which every tensor is replaced by its type and shape, and then the
tensors. Each piece of ``Segments`` is a message of its own, so that the sender need not hold all of
them, uncompressed, at once. Nothing is unpickled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qfleet.storage.segments import Segments

_TENSOR, _SEGMENTS = "tensor of", "segments of"


def send_state(state: Any, rank: int) -> None:
    tensors: list[Tensor | Segments] = []
    text = json.dumps(_describe(state, tensors)).encode()
    dist.send(torch.tensor([len(text)]), rank)
    dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), rank)
    for tensor in tensors:
        if isinstance(tensor, Segments):
            for piece in tensor.tensors:
                send_state(piece, rank)
        elif tensor.numel():
            dist.send(_bytes_of(tensor.cpu().contiguous()), rank)


def receive_state(rank: int) -> Any:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, rank)
    text = torch.zeros(int(length), dtype=torch.uint8)
    dist.recv(text, rank)
    return _receive(json.loads(text.numpy().tobytes()), rank)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _describe(state: Any, tensors: list[Tensor | Segments]) -> Any:
    """Return the state with descriptions in place of its tensors, which are added to the list."""
    if isinstance(state, Tensor):
        tensors.append(state)
        return {_TENSOR: str(state.dtype).removeprefix("torch."), "shape": list(state.shape)}
    if isinstance(state, Segments):
        tensors.append(state)
        return {_SEGMENTS: state.versions}
    if isinstance(state, dict):
        return {name: _describe(value, tensors) for name, value in state.items()}
    return state


def _receive(described: Any, rank: int) -> Any:
    if not isinstance(described, dict):
        return described
    if _TENSOR in described:
        tensor = torch.empty(described["shape"], dtype=getattr(torch, described[_TENSOR]))
        if tensor.numel():
            dist.recv(_bytes_of(tensor), rank)
        return tensor
    if _SEGMENTS in described:
        versions = described[_SEGMENTS]
        return Segments([receive_state(rank) for _ in versions], versions)
    return {name: _receive(value, rank) for name, value in described.items()}
