"""Initial weights without the memory of a whole network: one layer after the other is drawn.

In: the construction of a network on the meta device, where tensors have shapes only. Out: the
values that its tensors would have, one by one, each forgotten as soon as it was used. They are
those of a plain construction with the same seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DRAWING = threading.Lock()
"""Ranks may be threads, and torch has one generator for all of them."""


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations on tensors of the meta device, to carry them out later."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def carry_out(self, seed: int, take: Callable[[int, Tensor], None]) -> None:
        """Call ``take`` with the number of each memory (``memory_of``) and its final contents.

        Random numbers are drawn from ``seed`` in the order of the construction.
        """
        with _DRAWING, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            self._carry_out(take)

    def _carry_out(self, take: Callable[[int, Tensor], None]) -> None:
        last = {memory: i for i, call in enumerate(self._calls) for memory in _memories(call)}
        ends = dict[int, list[int]]()
        for memory, number in last.items():
            ends.setdefault(number, []).append(memory)
        contents = dict[int, Tensor]()
        for number, (func, args, kwargs, result) in enumerate(self._calls):
            # A view of known memory needs no work, unless it was written to.
            if func._schema.is_mutable or memory_of(result) not in contents:
                given = [view_of(contents, a) if isinstance(a, Tensor) else a for a in args]
                options = {n: "cpu" if n == "device" else value for n, value in kwargs.items()}
                made = func(*given, **options)
                if isinstance(result, Tensor):
                    contents.setdefault(memory_of(result), made)
            for memory in ends.get(number, ()):
                take(memory, contents.pop(memory))


def memory_of(tensor: Tensor) -> int:
    """Return the number of a tensor's memory, which a parameter shares with what it was made of."""
    number: int = tensor.untyped_storage()._cdata
    return number


def view_of(contents: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """Return the contents of a tensor of the meta device."""
    shape = tensor.shape, tensor.stride(), tensor.storage_offset()
    return contents[memory_of(tensor)].as_strided(*shape)


def _memories(call: tuple[Any, tuple[Any, ...], dict[str, Any], Any]) -> Iterator[int]:
    _, args, _, result = call
    for tensor in (*args, result):
        if isinstance(tensor, Tensor):
            yield memory_of(tensor)
