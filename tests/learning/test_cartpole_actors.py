"""Two actors and one learner solve CartPole with their preset, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfleet.config.presets import resolve
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from support.clusters import needs_ray


@pytest.mark.slow
@needs_ray
def test_two_actors_reach_475(tmp_path: Path) -> None:
    config, preset = resolve("CartPole-v1", engine="actors")
    assert preset == "cartpole-apex"
    assert config.workers == 2
    config = config.replace(target_return=475.0, eval_freq=2500, tensorboard=False)
    result = Run(config, tmp_path / "run", RunOptions()).go()
    assert result.stopped_by == "target_return", result
    assert result.faults == {}
    assert result.fleet is not None
    assert min(result.fleet["env_steps_each"]) > 0
