"""What ``result.json`` says about processors, accelerators, energy and money."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.telemetry import usage
from qfleet.training.run import Run
from support.configs import tiny_config, tiny_fields
from support.messages import says

CONFIG = tiny_config(engine="serial", steps=300, learning_starts=50, device="cpu")


def read_result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_a_run_says_what_it_used(tmp_path: Path) -> None:
    config = CONFIG.replace(price_per_cpu_hour=3600.0)
    result = Run(config, tmp_path, qfleet.RunOptions()).go()
    assert result.processor_s is not None
    assert result.processor_s > 0
    assert result.device_s is None
    assert result.cost is not None
    # A price of 1 per second.
    assert result.cost["total"] == pytest.approx(result.processor_s)
    stored = read_result(tmp_path)
    assert {"processor_s", "device_s", "joules", "cost"} <= stored.keys()
    assert stored["hardware"]["cores"] >= 1
    assert stored["hardware"]["accelerator"] == "none (CPU only)"
    assert len(stored["eval_returns"]) == config.n_eval_episodes
    assert sum(stored["eval_returns"]) / config.n_eval_episodes == pytest.approx(
        stored["eval_return_mean"]
    )


def test_without_a_price_there_is_no_cost(tmp_path: Path) -> None:
    assert Run(CONFIG, tmp_path, qfleet.RunOptions()).go().cost is None


@pytest.mark.parametrize(("earlier_s", "least_s"), [(1000.0, 1000.0), (0.0, 0.0)])
def test_a_resumed_run_adds_to_what_it_used_before(
    earlier_s: float, least_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "powercap" / "intel-rapl:0"
    counter.mkdir(parents=True)
    for name, text in {"name": "package-0", "energy_uj": "7", "max_energy_range_uj": "9"}.items():
        (counter / name).write_text(f"{text}\n")
    monkeypatch.setattr(usage, "POWERCAP", counter.parent)
    tmp_path = tmp_path / "run"
    Run(CONFIG, tmp_path, qfleet.RunOptions(stop_after=100)).go()
    checkpoint = load_checkpoint(tmp_path / "checkpoints")
    assert checkpoint.parts["run"]["usage"]["processor_s"] > 0
    checkpoint.parts["run"]["usage"] = {"processor_s": earlier_s, "device_s": None, "joules": 5.0}
    result = Run(CONFIG, tmp_path, qfleet.RunOptions(), checkpoint=checkpoint).go()
    assert result.processor_s is not None
    assert least_s < result.processor_s < least_s + 900
    assert result.joules == 5.0  # the counter stands still


@pytest.mark.parametrize("stored", [{}, {"processor_s": "x", "device_s": None, "joules": None}])
def test_a_malformed_usage_is_refused(stored: dict[str, Any], tmp_path: Path) -> None:
    Run(CONFIG, tmp_path, qfleet.RunOptions(stop_after=100)).go()
    checkpoint = load_checkpoint(tmp_path / "checkpoints")
    checkpoint.parts["run"]["usage"] = stored
    with pytest.raises(CheckpointError, match=says("usage")):
        Run(CONFIG, tmp_path, qfleet.RunOptions(), checkpoint=checkpoint)


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price: float, tmp_path: Path) -> None:
    fields = tiny_fields(engine="serial", price_per_gpu_hour=price)
    with pytest.raises(ConfigError, match=says("price_per_gpu_hour", "≥ 0")):
        qfleet.train("CartPole-v1", **fields, run_dir=tmp_path / "run")
