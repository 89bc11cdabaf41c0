"""What a run does on a plateau: it lowers the learning rate, and draws larger batches."""

from __future__ import annotations

from qfleet.agent.learner import BURST_SAMPLES
from qfleet.core.types import StateDict
from qfleet.engines.parts import LoopParts
from qfleet.training.run_state import RunState

MOST_SAMPLES = BURST_SAMPLES
"""Largest batch: as many samples as are drawn at once."""


class Plateau:
    _batch: tuple[int, int, int] = (0, 0, 0)
    """Size of the larger batches, and the limiter's ``since``; 0: not yet."""

    def reached(self, run: RunState) -> None:
        """Lower the learning rate and grow the batch, as configured."""
        config, parts = run.config, run.parts
        if config.lr_plateau_factor < 1:
            parts.model.lr_scale *= config.lr_plateau_factor
            run.progress.message(f"plateau: learning rate scaled to {parts.model.lr_scale:g}")
        if config.batch_plateau_factor == 1:
            return
        assert isinstance(parts, LoopParts)
        size = min(MOST_SAMPLES, round(parts.learner.batch_size * config.batch_plateau_factor))
        if size <= parts.learner.batch_size:
            return
        self._set_batch(run, size)
        self._batch = (size, *parts.limiter.since)
        run.progress.message(f"plateau: batch_size is now {size}")

    def _set_batch(self, run: RunState, size: int) -> None:
        parts = run.parts
        assert isinstance(parts, LoopParts)
        learner = parts.learner
        learner.batch_size = size
        # A burst is not to draw more samples at once than before.
        learner.burst_updates = max(1, min(learner.burst_updates, BURST_SAMPLES // size))
        if run.config.data:  # every transition is still drawn once per epoch
            parts.limiter.set_train_freq(size)

    def state_dict(self, run: RunState) -> StateDict:
        # Without the option there is none, as in checkpoints of older versions.
        return {"batch": list(self._batch)} if run.config.batch_plateau_factor > 1 else {}

    def load_state_dict(self, run: RunState, state: StateDict) -> None:
        size, *since = self._batch = tuple(state.get("batch", self._batch))
        if size:
            assert isinstance(run.parts, LoopParts)
            self._set_batch(run, size)
            run.parts.limiter.since = (since[0], since[1])
