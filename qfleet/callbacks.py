"""Hooks into a run, for notebooks and programs that train as a part of something larger."""

# ruff: noqa: ARG002 (the arguments are for those who override)
from __future__ import annotations

from typing import TYPE_CHECKING

from qfleet.evaluation import Evaluation
from qfleet.result import Result

if TYPE_CHECKING:
    from qfleet.run import Run


class Callback:
    """Override what you need; ``False`` from any of the first three ends the run."""

    def on_start(self, run: Run) -> bool | None:
        return None

    def on_log(self, run: Run, scalars: dict[str, float | None]) -> bool | None:
        return None

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> bool | None:
        return None

    def on_end(self, run: Run, result: Result) -> bool | None:
        return None
