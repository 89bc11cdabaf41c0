"""The interfaces by which users' code and a run's own hooks take part in it."""

# ruff: noqa: ARG002 (the arguments are for subclasses)
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from qfleet.agent.evaluation import Evaluation
from qfleet.core.errors import ConfigError
from qfleet.core.types import StateDict
from qfleet.training.result import Result


class Callback:
    """Methods that a run calls; ``run`` is the ``qfleet.Run``. Override what you need.

    A run ends if any of the first four returns False.
    """

    def on_start(self, run: Any) -> bool | None:
        """Called before the first step."""
        return None

    def on_step(self, run: Any) -> bool | None:
        """Called between turns of collecting and learning, when no update is owed."""
        return None

    def on_log(self, run: Any, scalars: dict[str, float | None]) -> bool | None:
        """Called after every log interval, with everything that was logged."""
        return None

    def on_evaluation(self, run: Any, evaluation: Evaluation) -> bool | None:
        """Called after every evaluation."""
        return None

    def on_end(self, run: Any, result: Result) -> bool | None:
        """Called after the last checkpoint; the returned value is ignored."""
        return None


StepFunction: TypeAlias = Callable[[Any], bool | None]
Callbacks: TypeAlias = Callback | StepFunction | Sequence[Callback | StepFunction] | None


def as_callbacks(given: Callbacks) -> list[Callback]:
    """Return the callbacks as a list; a function becomes the ``on_step`` of one."""
    many = given if isinstance(given, Sequence) else [] if given is None else [given]
    return [one if isinstance(one, Callback) else _StepCallback(one) for one in many]


PEERS = {
    "CheckpointCallback": "checkpoint_freq",
    "EvalCallback": "eval_freq and n_eval_episodes",
    "ProgressBarCallback": "progress",
    "StopTrainingOnNoModelImprovement": "patience",
    "StopTrainingOnRewardThreshold": "target_return",
}
"""Callbacks of Stable-Baselines3 → fields that do the same."""


class _StepCallback(Callback):
    def __init__(self, function: StepFunction) -> None:
        try:
            inspect.signature(function).bind("run")
        except ValueError:
            pass  # a builtin without a signature
        except TypeError as error:  # Stable-Baselines3's functions take locals and globals
            name = getattr(function, "__name__", type(function).__name__)
            why = str(error) if callable(function) else "it cannot be called"
            why = f"set {PEERS[name]} instead" if name in PEERS else why
            raise ConfigError(
                f"callback must be a qfleet.Callback or a function of the run, got {name}: {why}"
            ) from None
        self.on_step = function  # type: ignore[assignment]


class Hook(Callback):
    """A callback of the run itself, with a last call and a state."""

    def on_finish(self, run: Any) -> None:
        """Called once the engine has stopped, before the result is written."""

    def state_dict(self, run: Any) -> StateDict:
        """Return fields of a checkpoint's section ``run``."""
        return {}

    def load_state_dict(self, run: Any, state: StateDict) -> None:
        """Restore from a checkpoint's section ``run``."""
