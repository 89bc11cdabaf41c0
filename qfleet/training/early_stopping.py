"""Early stopping and lower learning rates on a plateau, from the mean returns of evaluations."""

from __future__ import annotations

from qfleet.config.config import Config
from qfleet.core.types import StateDict


class EarlyStopping:
    def __init__(self, config: Config) -> None:
        self._config = config
        self.best_return: float | None = None
        self._since_best = 0
        self._since_lower_rate = 0

    def add(self, mean_return: float) -> tuple[str | None, bool]:
        """Return why the run should stop, if it should, and whether to lower the learning rate."""
        config = self._config
        if self.best_return is None or mean_return > self.best_return:
            self.best_return = mean_return
            self._since_best = self._since_lower_rate = 0
        else:
            self._since_best += 1
            self._since_lower_rate += 1
        lower_rate = 0 < config.lr_plateau_patience <= self._since_lower_rate
        if lower_rate:
            self._since_lower_rate = 0
        stop = None
        if config.target_return is not None and mean_return >= config.target_return:
            stop = "target_return"
        elif 0 < config.patience <= self._since_best:
            stop = "patience"
        return stop, lower_rate

    def state_dict(self) -> StateDict:
        return {
            "best_return": self.best_return,
            "since_best": self._since_best,
            "since_lower_rate": self._since_lower_rate,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.best_return = state["best_return"]
        self._since_best = state["since_best"]
        self._since_lower_rate = state["since_lower_rate"]
