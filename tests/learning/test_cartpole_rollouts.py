"""The rows that learn from short rollouts solve CartPole with the presets that suit them."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["a3c", "n-step-q"])
def test_an_evaluation_of_20_episodes_reaches_475(algo: str, tmp_path: Path) -> None:
    """On one of two seeds at least: another BLAS rounds otherwise, and then seeds mean nothing."""
    best = []
    for seed in range(2):
        fields = {
            "seed": seed,
            "n_eval_episodes": 20,
            "target_return": 475.0,  # the run ends there
            "engine": "serial",
            "tensorboard": False,
            "threads": 1,
        }
        config, preset = resolve("CartPole-v1", algo, fields=fields)
        assert preset == f"cartpole-{algo}"
        result = Run(validate(config), tmp_path / str(seed), RunOptions()).go()
        assert result.faults == {}
        best.append(result.best_eval_return)
        if result.stopped_by == "target_return":
            break
    assert max(value for value in best if value is not None) >= 475, best
