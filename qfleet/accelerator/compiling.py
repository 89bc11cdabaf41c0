"""Functions that may be compiled: the same call, through torch.compile when switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Compilable:
    """A function of tensors, with a switch. Compilation happens at the first call behind it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain, self._compiled = function, None
        self.on = False

    def __call__(self, *arguments: Any) -> Any:
        if not self.on:
            return self._plain(*arguments)
        if self._compiled is None:
            # Shapes never change within a run, and code for one shape is the quickest.
            self._compiled = torch.compile(self._plain, dynamic=False)
        return self._compiled(*arguments)


def switch(functions: Iterable[Compilable], on: bool) -> None:
    for function in functions:
        function.on = on
