"""Functions that can be switched to torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

PLAINER: dict[str, Any] = {"triton.persistent_reductions": False, "max_fusion_size": 16}
"""Inductor options for a second attempt, with smaller and simpler kernels: a step of MinAtar's
Asterix became one kernel that Triton could not finish compiling."""


class Compilable:
    """A function of tensors that is compiled at its first call after ``on`` was set to True.

    ``is_sized``: the sizes of its tensors grow with the number of updates in a burst.
    """

    def __init__(self, function: Callable[..., Any], is_sized: bool = False) -> None:
        self._plain = function
        self._compiled: Callable[..., Any] | None = None
        self.is_sized, self.on = is_sized, False
        self.failure: str | None = None
        """Why the function cannot be compiled here; it then runs uncompiled. None if it can."""

    def __call__(self, *arguments: Any) -> Any:
        if not self.on or self.failure is not None:
            return self._plain(*arguments)
        if self._compiled is not None:
            return self._compiled(*arguments)
        failures = []
        for options in (None, PLAINER):
            try:
                # Shapes never change within a run, and code for a fixed shape is the fastest.
                compiled = torch.compile(self._plain, dynamic=False, options=options)
                result = compiled(*arguments)
            except Exception as error:  # compilers raise many types, all before the function runs
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                failures.append(f"{type(error).__name__}: {lines[0] if lines else '?'}")
                continue
            self._compiled = compiled
            return result
        self.failure = failures[0]
        return self._plain(*arguments)

    @property
    def name(self) -> str:
        return self._plain.__qualname__


def switch(functions: Iterable[Compilable], on: bool) -> None:
    for function in functions:
        function.on = on
