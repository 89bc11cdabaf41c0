"""What each stage could do alone: measured where stages work side by side, and in the result."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest

import qfleet
from qfleet.agent.device_actor import TensorActor
from qfleet.engines import pipeline, registry
from qfleet.engines.device import StagesHook
from qfleet.engines.parts import Parts
from qfleet.engines.pipeline import PipelineHook
from qfleet.engines.recording import Prepared
from qfleet.engines.registry import build
from qfleet.engines.stage_rates import Stages
from qfleet.engines.tuning import Tuning
from qfleet.telemetry.faults import FaultLog
from qfleet.training.api import Trained
from support.configs import tiny_config
from support.messages import holds

SMALL = tiny_config(
    envs=2,
    steps=200,
    learning_starts=20,
    net_arch=(8,),
    batch_size=8,
    buffer_size=500,
    max_episode_steps=30,
)
STAGES = ("env_only", "inference_only", "learner_only", "end_to_end")


@pytest.fixture(autouse=True)
def briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("qfleet.engines.stage_rates.MEASURE_S", 0.02)
    monkeypatch.setattr("qfleet.engines.placement.MEASURE_S", 0.02)


def train(folder: Path, stage_rates: bool = True, **fields: Any) -> tuple[Trained, dict[str, Any]]:
    options = qfleet.RunOptions(stage_rates=stage_rates)
    trained = qfleet.train(config=SMALL.replace(**fields), run_dir=folder, options=options)
    return trained, json.loads((folder / "result.json").read_text())


def measured_by(parts: Parts, end_to_end: float) -> Stages:
    (stages,) = filter(None, [hook.measure(end_to_end) for hook in parts.hooks])
    return stages


@pytest.mark.parametrize(
    "fields",
    [{"vectorize": "async"}, {"vectorize": "sync", "lockstep": True}],
    ids=["async", "lockstep"],
)
def test_a_pipeline_run_says_what_each_stage_could_do(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    trained, written = train(tmp_path / "run", engine="pipeline", **fields)
    rates = trained.result.rates
    assert rates is not None
    assert written["rates"] == rates
    assert set(rates) == {*STAGES, "share_of_slowest", "bottleneck"}
    figures = {stage: rates[stage] for stage in STAGES}
    for figure in figures.values():
        assert isinstance(figure, float)
        assert math.isfinite(figure)
        assert figure > 0
    slowest = min(figures[stage] for stage in STAGES[:3])  # type: ignore[type-var]
    assert rates["share_of_slowest"] == pytest.approx(figures["end_to_end"] / slowest)  # type: ignore[operator]
    assert rates["bottleneck"] in ("env", "inference", "learner", "overhead")


@pytest.mark.parametrize(
    "fields",
    [{"engine": "serial"}, {"engine": "pipeline", "vectorize": "sync"}, {"engine": "device"}],
    ids=["serial", "pipeline in one thread", "device on a CPU"],
)
def test_stages_that_take_turns_in_one_thread_have_no_rates(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    trained, written = train(tmp_path / "run", **fields)
    assert trained.result.rates is None
    assert written["rates"] is None


def test_nothing_is_measured_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PipelineHook, "measure", lambda *_: pytest.fail("measured"))
    fields = {"engine": "pipeline", "vectorize": "sync", "lockstep": True}
    assert train(tmp_path / "run", stage_rates=False, **fields)[0].result.rates is None


def test_the_learners_rate_is_in_env_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SMALL.replace(engine="pipeline", lockstep=True, train_freq=8, gradient_steps=2)
    parts = build(config, FaultLog())
    try:
        registry.run(parts, lambda: parts.clock.env_steps < 200)
        spent_s = parts.timers[0].seconds
        spent_s["learn"], spent_s["copy"] = 1.5, 0.5
        monkeypatch.setattr(pipeline, "inference_rate", lambda *_: 55.0)
        rates = measured_by(parts, end_to_end=7.0).rates
    finally:
        parts.close()
    assert parts.clock.updates == 44
    # 44 updates in 2 s; four env steps for each.
    assert rates.learner_only == pytest.approx(44 / 2 * 4)
    assert rates.inference_only == 55.0
    assert rates.end_to_end == 7.0


def test_a_rate_measured_at_the_start_is_believed() -> None:
    parts = build(SMALL.replace(engine="pipeline", lockstep=True), FaultLog())
    try:
        hook = parts.find(PipelineHook)
        assert hook is not None
        updates_per_step = parts.config.updates_per_env_step
        hook.prepared = Prepared(cast(Tuning, None), 1 / (123.0 * updates_per_step), "")
        rates = measured_by(parts, end_to_end=1.0).rates
    finally:
        parts.close()
    assert rates.learner_only == pytest.approx(123.0)


def test_a_run_that_never_learnt_has_no_learners_rate() -> None:
    config = SMALL.replace(engine="pipeline", lockstep=True, learning_starts=150)
    parts = build(config, FaultLog())
    try:
        registry.run(parts, lambda: parts.clock.env_steps < 40)
        rates = measured_by(parts, end_to_end=1.0).rates
    finally:
        parts.close()
    assert rates.learner_only is None
    assert rates.env_only is not None
    assert rates.env_only > 0


def test_what_a_device_cannot_tell_apart_is_timed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on an accelerator, where the host's clock says nothing."""
    parts = build(SMALL.replace(engine="device"), FaultLog())
    try:
        assert parts.find(StagesHook) is None
        actor = cast(TensorActor, parts.collector)
        monkeypatch.setattr(actor, "rate", lambda: 900.0)
        measured = StagesHook(parts.config, parts.device, actor, 100.0).measure(end_to_end=81.0)
    finally:
        parts.close()
    assert (measured.rates.env_only, measured.rates.inference_only) == (900.0, None)
    assert holds(measured.diagnosis.sentence, "Learning", "device's")
