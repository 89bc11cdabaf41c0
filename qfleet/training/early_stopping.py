"""Early stopping and lower learning rates on a plateau of a metric, of which more is better."""

from __future__ import annotations

import math

from qfleet.config.config import Config
from qfleet.core.types import StateDict


class EarlyStopping:
    def __init__(self, config: Config) -> None:
        self._config = config
        self.best: float | None = None
        self._since_best = 0
        self._since_lower_rate = 0

    def add(self, value: float, counts: int = 1) -> tuple[bool, bool, bool]:
        """Return whether the value is the best, whether to stop, and to lower the learning rate.

        ``counts``: evaluations or epochs since the last value. NaN and infinity are never the best.
        """
        config = self._config
        best = -math.inf if self.best is None else self.best
        is_best = math.isfinite(value) and value > best
        if is_best:
            self.best = value
            self._since_best = self._since_lower_rate = 0
        else:
            self._since_best += counts
            self._since_lower_rate += counts
        lower_rate = 0 < config.lr_plateau_patience <= self._since_lower_rate
        if lower_rate:
            self._since_lower_rate = 0
        return is_best, 0 < config.patience <= self._since_best, lower_rate

    def state_dict(self) -> StateDict:
        return {
            "best_return": self.best,
            "since_best": self._since_best,
            "since_lower_rate": self._since_lower_rate,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.best = state["best_return"]
        self._since_best = state["since_best"]
        self._since_lower_rate = state["since_lower_rate"]
