"""Counting the operations that make the host wait for a result."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ASKS_THE_HOST = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}


class Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations whose result the host must wait for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: list[str] = []

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in ASKS_THE_HOST:
            self.asked.append(name)
        return function(*args, **(kwargs or {}))
