"""``--engine auto``: what is chosen for a machine, why, and that trying happens once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.engines import auto
from qfleet.engines.auto import settle
from qfleet.engines.measured_cache import cache_path
from qfleet.telemetry.faults import FaultLog
from support.messages import holds

CUDA = torch.device("cuda")
SMALL = Config(net_arch=(8,), batch_size=8, buffer_size=4096)
ASYNC = SMALL.replace(envs=4, vectorize="async")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores, no accelerator and nothing remembered, wherever the tests run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen cores beside a made-up GPU, for whatever is not told to learn on the CPU."""

    class Module:
        @staticmethod
        def get_device_name(_: torch.device) -> str:
            return "Made-up 9000"

    def learner_device(config: Config) -> torch.device:
        return torch.device("cpu") if config.device == "cpu" else CUDA

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(auto, "_learner_device", learner_device)
    monkeypatch.setattr(torch, "get_device_module", lambda _: Module)


class Trial:
    """Stands in for trying an engine: rates by its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, serial: float, pipeline: float) -> None:
        self._rates = {"serial": serial, "pipeline": pipeline}
        self.tried: list[str] = []
        monkeypatch.setattr(auto, "_trial_rate", self)

    def __call__(self, config: Config, faults: FaultLog) -> float:
        self.tried.append(config.engine)
        faults("env_crash", config.engine)
        return self._rates[config.engine]


def shape(config: Config) -> tuple[str, int, int, int]:
    return config.engine, config.envs, config.env_groups, config.block_rows


# --- engines asked for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"engine": "serial", "envs": 4}, ("serial", 4, 1, 0)),
        ({"engine": "serial", "envs": 0}, ("serial", 8, 1, 0)),
        ({"engine": "serial", "envs": 4, "block_rows": 3}, ("serial", 4, 1, 3)),
        ({"engine": "pipeline", "envs": 4}, ("pipeline", 4, 1, 0)),
        # Envs in processes: blocks of 64 env steps.
        ({"engine": "pipeline", "envs": 4, "vectorize": "async"}, ("pipeline", 4, 1, 16)),
        ({"engine": "pipeline", "envs": 1, "vectorize": "async"}, ("pipeline", 1, 1, 64)),
        # Nor does who waits for slow ones hold the interpreter.
        ({"engine": "pipeline", "envs": 4, "step_latency_s": 0.1}, ("pipeline", 4, 1, 16)),
        (
            {"engine": "pipeline", "envs": 4, "vectorize": "async", "train_freq": 256},
            ("pipeline", 4, 1, 16),
        ),
        (
            {"engine": "pipeline", "envs": 6, "vectorize": "async", "env_groups": 3},
            ("pipeline", 6, 3, 11),
        ),
        (
            {"engine": "pipeline", "envs": 4, "vectorize": "async", "lockstep": True},
            ("pipeline", 4, 1, 0),
        ),
        # Everything on one device, here the CPU: blocks as on serial.
        ({"engine": "device", "envs": 4}, ("device", 4, 1, 0)),
        ({"engine": "device", "envs": 0}, ("device", 64, 1, 0)),
        ({"engine": "device", "envs": 0, "buffer_size": 640}, ("device", 10, 1, 0)),
    ],
)
def test_an_engine_asked_for_is_taken_and_its_shape_filled_in(
    fields: dict[str, Any], expected: tuple[str, int, int, int]
) -> None:
    config, sentence = settle(SMALL.replace(**fields))
    assert shape(config) == expected
    assert sentence is None
    assert settle(config) == (config, None)


def test_only_what_was_open_is_filled_in() -> None:
    asked = SMALL.replace(engine="pipeline", envs=4, vectorize="async")
    config, _ = settle(asked)
    assert config.replace(env_groups=0, block_rows=0) == asked


# --- auto without an accelerator --------------------------------------------------------------


def test_envs_in_this_process_run_on_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch, 1, 100)
    config, sentence = settle(SMALL.replace(envs=1))
    assert shape(config) == ("serial", 1, 1, 0)
    assert sentence is not None
    assert holds(sentence, "serial", "1 env", "interpreter")
    assert trial.tried == []


def test_one_core_has_nothing_to_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch, 1, 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1)))
    config, sentence = settle(ASYNC)
    assert config.engine == "serial"
    assert sentence is not None
    assert holds(sentence, "serial", "4 envs", "core")
    assert trial.tried == []


@pytest.mark.parametrize(
    ("pipeline", "expected", "told"),
    [
        (150.0, ("pipeline", 4, 1, 16), "pipeline"),
        (104.0, ("serial", 4, 1, 0), "serial"),
        (60.0, ("serial", 4, 1, 0), "serial"),
    ],
)
def test_envs_in_the_background_are_tried_once_and_remembered(
    pipeline: float,
    expected: tuple[str, int, int, int],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = Trial(monkeypatch, 100.0, pipeline)
    reported, faults = list[str](), FaultLog()
    for _ in range(2):
        config, sentence = settle(ASYNC, reported.append, faults)
        assert shape(config) == expected
        assert sentence is not None
        assert sentence.startswith(f"engine {told}")
        assert holds(sentence, "4 envs", f"{pipeline / 100:.2f}")
    assert trial.tried == ["serial", "pipeline"]
    assert len(reported) == 2
    assert all(map(holds, reported, trial.tried))
    assert faults.counts == {"env_crash": 2}
    assert cache_path().exists()
    settle(ASYNC.replace(seed=3, steps=5000, learning_rate=0.5))  # nothing that costs time
    assert len(trial.tried) == 2
    settle(ASYNC.replace(batch_size=16))
    assert len(trial.tried) == 4


def test_atari_steps_in_the_background_too(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch, 100.0, 200.0)
    config, _ = settle(resolve("ALE/Pong-v5", fields={"envs": 0})[0])
    assert shape(config)[:3] == ("pipeline", 8, 1)
    assert trial.tried == ["serial", "pipeline"]


def test_a_real_trial_finds_two_rates_and_gives_torchs_settings_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "TRIAL_S", 0.05)
    monkeypatch.setattr("qfleet.engines.placement.MEASURE_S", 0.01)
    tried: dict[str, float] = {}
    real = auto._trial_rate

    def watched(config: Config, faults: FaultLog) -> float:
        tried[config.engine] = real(config, faults)
        return tried[config.engine]

    monkeypatch.setattr(auto, "_trial_rate", watched)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    config, sentence = settle(ASYNC.replace(envs=2, threads=1))
    assert torch.get_num_threads() == 3
    torch.set_num_threads(threads)
    assert set(tried) == {"serial", "pipeline"}
    assert min(tried.values()) > 0
    gain = tried["pipeline"] / tried["serial"]
    assert config.engine == ("pipeline" if gain > auto.WORTHWHILE else "serial")
    assert sentence is not None
    assert f"{gain:.2f}×" in sentence


# --- auto with one ----------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("fields", "expected", "told"),
    [
        # 8 envs a core; 128 × ¼ updates a row, of which two make 64.
        ({"envs": 0}, ("pipeline", 128, 4, 2), "128 envs in 4 groups"),
        ({"envs": 16}, ("pipeline", 16, 4, 4), "16 envs in 4 groups"),
        ({"envs": 2}, ("pipeline", 2, 2, 4), "2 envs in 2 groups"),
        ({"envs": 16, "train_freq": 96}, ("pipeline", 16, 4, 6), "16 envs in 4 groups"),
        ({"envs": 16, "block_rows": 1, "env_groups": 1}, ("pipeline", 16, 1, 1), "16 envs"),
        ({"envs": 16, "lockstep": True}, ("pipeline", 16, 1, 0), "16 envs"),
    ],
)
def test_an_accelerator_learns_while_the_cores_step(
    fields: dict[str, Any],
    expected: tuple[str, int, int, int],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = Trial(monkeypatch, 100, 1)
    plain = {"train_freq": 4, "gradient_steps": 1}
    config, sentence = settle(resolve("ALE/Pong-v5", fields={**plain, **fields})[0])
    assert shape(config) == expected
    assert sentence is not None
    assert holds(sentence, "pipeline", told, "Made-up 9000")
    assert trial.tried == []


def test_a_device_without_streams_stays_on_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_learner_device", lambda _: torch.device("mps"))
    trial = Trial(monkeypatch, 1, 100)
    config, sentence = settle(resolve("ALE/Pong-v5", fields={"envs": 4})[0])
    assert shape(config) == ("serial", 4, 1, 0)
    assert sentence is not None
    assert holds(sentence, "serial", "4 envs", "pipeline", "mps")
    assert trial.tried == []


@pytest.mark.usefixtures("gpu")
def test_serial_asked_for_on_an_accelerator_keeps_its_shape() -> None:
    asked = resolve("ALE/Pong-v5", fields={"engine": "serial", "envs": 0})[0]
    assert shape(settle(asked)[0]) == ("serial", 8, 1, 0)


@pytest.mark.usefixtures("gpu")
def test_envs_in_this_process_are_one_group_on_an_accelerator() -> None:
    config, _ = settle(SMALL.replace(envs=0))
    assert shape(config) == ("pipeline", 8, 1, 4)


@pytest.mark.usefixtures("gpu")
def test_a_learner_told_to_stay_on_the_cpu_is_tried_there(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(monkeypatch, 100, 200)
    config, _ = settle(ASYNC.replace(device="cpu"))
    assert shape(config) == ("pipeline", 4, 1, 16)
    assert trial.tried == ["serial", "pipeline"]


@pytest.mark.parametrize(
    ("env", "device", "expected"),
    [
        ("ALE/Pong-v5", "auto", "cuda"),
        ("CartPole-v1", "auto", "cpu"),
        ("CartPole-v1", "cpu", "cpu"),
    ],
)
def test_where_a_run_would_learn(
    env: str, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: CUDA)
    assert auto._learner_device(Config(env=env, device=device)).type == expected


# --- the device engine ------------------------------------------------------------------------

GAME = SMALL.replace(env="MinAtar/Breakout-v1", envs=16)


@pytest.mark.usefixtures("gpu")
def test_tensor_envs_step_on_the_accelerator() -> None:
    config, sentence = settle(GAME)
    assert shape(config) == ("device", 16, 1, 16)  # 64 updates a block
    assert sentence is not None
    assert holds(sentence, "device", "16 envs", "Made-up 9000")
    assert settle(config) == (config, None)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"envs": 0, "buffer_size": 10**6}, ("device", 128, 1, 2)),
        ({"envs": 1, "train_freq": 64}, ("device", 1, 1, 64)),
        ({"envs": 4, "train_freq": 64}, ("device", 4, 1, 32)),
        ({"envs": 4, "block_rows": 5}, ("device", 4, 1, 5)),
    ],
)
def test_blocks_of_the_device_engine_bring_enough_updates(
    fields: dict[str, Any], expected: tuple[str, int, int, int]
) -> None:
    assert shape(settle(GAME.replace(engine="device", **fields))[0]) == expected


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "fields",
    [
        {"device": "cpu"},
        {"env": "CartPole-v1"},  # Gymnasium's own, unless the engine is asked for
        {"lockstep": True},
        {"env_groups": 2},
        {"replay_dir": "somewhere"},
        {"replay_compression": "lz4"},
        {"replay_device": "cpu"},
        {"inference_device": "cpu"},
        {"step_latency_s": 0.1},
    ],
)
def test_what_the_device_engine_does_not_have_is_left_to_others(fields: dict[str, Any]) -> None:
    assert settle(GAME.replace(**fields))[0].engine != "device"


def test_without_an_accelerator_tensor_envs_run_on_serial() -> None:
    assert settle(GAME)[0].engine == "serial"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_without_replay_the_device_engine_takes_whole_rollouts(device: str) -> None:
    fields = {"engine": "device", "device": device, "train_freq": 64, "batch_size": 64}
    asked = resolve("CartPole-v1", "pqn", "none", fields={**fields, "gradient_steps": 2})[0]
    config, _ = settle(asked.replace(envs=4))
    assert (config.envs, config.block_rows) == (4, 0)
    config, _ = settle(asked.replace(envs=0, steps=100_000))
    assert (config.envs, config.block_rows) == (32, 0)


def test_batches_that_grow_are_for_serial() -> None:
    config, why = settle(ASYNC.replace(batch_plateau_factor=2.0, lr_plateau_patience=3))
    assert config.engine == "serial"
    assert "plateau" in (why or "")


def test_a_dataset_needs_no_environment() -> None:
    given = SMALL.replace(env="Nowhere-v0", data="somewhere", engine="parameter-server")
    assert settle(given) == (given, None)
