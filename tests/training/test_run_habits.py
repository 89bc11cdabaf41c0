"""Habits of a run that a hostile user found wanting once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qfleet
from qfleet.cli.main import main
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, RunBusyError
from qfleet.engines.registry import build
from qfleet.networks.torsos import NatureCNN
from qfleet.storage.locks import RunLock
from qfleet.telemetry.faults import FaultLog
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from support.configs import tiny_fields
from support.messages import holds, says

TINY = tiny_fields(
    steps=300, learning_starts=50, batch_size=8, buffer_size=200, net_arch=(8,), n_eval_episodes=2
)


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.bin")
    }


def test_a_busy_run_is_refused_before_a_byte_of_it_is_touched(tmp_path: Path) -> None:
    replay = tmp_path / "replay"
    qfleet.train("CartPole-v1", run_dir=tmp_path / "run", replay_dir=str(replay), **TINY)
    for path in replay.glob("*.bin"):  # what the run that is still going has written since
        path.write_bytes(bytes(len(path.read_bytes())))
    before = digests(replay)
    with RunLock(tmp_path / "run"), pytest.raises(RunBusyError, match="in use"):
        qfleet.resume(tmp_path / "run", steps=400, replay_dir=str(replay))
    assert digests(replay) == before
    # Not so once the run is free.
    qfleet.resume(tmp_path / "run", steps=400, replay_dir=str(replay))
    assert digests(replay) != before


def test_a_refused_run_leaves_nothing_of_its_own_and_everything_of_others(tmp_path: Path) -> None:
    folder, replay = tmp_path / "run", tmp_path / "replay"
    folder.mkdir()
    # Another process has just begun here: its lock is all there is.
    with RunLock(folder), pytest.raises(RunBusyError, match="in use"):
        qfleet.train("CartPole-v1", run_dir=folder, **TINY)
    assert (folder / ".lock").exists()
    # Refused for a reason of its own, after its replay memory was made.
    for _ in range(2):
        with pytest.raises(ConfigError, match="nosuchmodule"):
            qfleet.train(
                "CartPole-v1", run_dir=tmp_path / "new", replay_dir=str(replay),
                network="nosuchmodule:Torso", **TINY,
            )  # fmt: skip
        assert not (tmp_path / "new").exists()


def test_two_runs_cannot_share_a_replay_folder(tmp_path: Path) -> None:
    config = Config(
        steps=300, learning_starts=10, buffer_size=200, replay_dir=str(tmp_path / "replay")
    )
    run = Run(config, tmp_path / "first", RunOptions())
    with pytest.raises(RunBusyError, match="replay"):
        Run(config, tmp_path / "second", RunOptions())
    run.close()
    Run(config, tmp_path / "second", RunOptions()).close()


@pytest.mark.parametrize("mkldnn", [True, False])
def test_torch_is_left_as_it_was_found(mkldnn: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(mkldnn)
    qfleet.train("CartPole-v1", run_dir=tmp_path / "run", threads=2, **TINY)
    assert torch.get_num_threads() == 1
    assert torch.backends.mkldnn.enabled is mkldnn


def test_a_policy_speaks_the_environments_own_numbers(tmp_path: Path) -> None:
    trained = qfleet.train(
        "support.odd_envs:Offset", run_dir=tmp_path / "run", learning_rate=1e-2, **TINY
    )
    policy = trained.policy()
    assert policy.act(3) == 8
    assert policy.act([3, 7, 5]).tolist() == [8, 8, 8]
    assert policy.q_values(4).shape == (2,)
    assert policy.q_values([4, 4, 5]).shape == (3, 2)
    for bad in (2, 8, [3, 9]):
        with pytest.raises(ConfigError, match=says("3", "7")):
            policy.act(bad)


def test_a_policy_takes_no_nan(tmp_path: Path) -> None:
    policy = qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **TINY).policy()
    with pytest.raises(ConfigError, match="NaN"):
        policy.act([0.0, np.nan, 0.0, 0.0])
    for arguments in ({"episodes": 0}, {"seed": -1}, {"epsilon": 7.0}):
        with pytest.raises(ConfigError, match="cannot evaluate"):
            policy.evaluate(**arguments)


def test_a_run_made_for_another_device_can_still_be_used(tmp_path: Path) -> None:
    folder = qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **TINY).folder
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "device": "xpu:7"}))
    assert qfleet.load(folder).device.type == "cpu"
    with pytest.raises(ConfigError, match=says("device", "xpu:7")):
        qfleet.resume(folder, steps=400)
    assert qfleet.resume(folder, steps=400, device="cpu").result.env_steps == 400


def test_an_evaluation_gives_way_to_the_wall_clock(tmp_path: Path) -> None:
    fields = {**TINY, "steps": 10**6, "eval_freq": 60, "n_eval_episodes": 1}
    trained = qfleet.train(
        "support.odd_envs:Endless",
        run_dir=tmp_path / "run",
        options=RunOptions(max_wall_s=0.5),
        **fields,
    )
    assert trained.result.stopped_by == "max_wall"
    assert trained.result.eval_return_mean is None


@pytest.mark.parametrize("engine", ["serial", "device"])
def test_an_evaluation_ends_at_its_limit_and_the_run_goes_on(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields: dict[str, Any] = {**TINY, "steps": 200, "eval_freq": 100, "n_eval_episodes": 2}
    trained = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", engine=engine, eval_max_steps=6, **fields
    )
    assert (trained.result.stopped_by, trained.result.eval_return_mean) == ("steps", 3.0)
    lines = capsys.readouterr().err.splitlines()
    assert sum(holds(line, "6 steps", "2 of 2", "--eval-max-steps") for line in lines) == 2


def test_json_output_is_json_whatever_an_environment_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--steps 200 --learning-starts 50 --net-arch 8 --buffer-size 200 --no-tensorboard"
    command = (
        f"train support.odd_envs:Chatty {options} --n-eval-episodes 1 --eval-freq 0 --run-dir r"
    )
    assert main([*command.split(), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["env_steps"] == 200
    assert "chat" in captured.err


def test_a_damaged_checkpoint_is_reported_and_counted_even_if_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**TINY, "checkpoint_freq": 100}
    folder = qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **fields).folder
    damaged = folder / "checkpoints" / "300" / "learner.safetensors"
    contents = damaged.read_bytes()
    damaged.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    result = qfleet.resume(folder, steps=400).result
    assert result.faults["alert"] == 1
    assert "damaged" in capsys.readouterr().err


def test_frames_with_channels_are_stacked_into_an_image(tmp_path: Path) -> None:
    config = Config(env="support.odd_envs:Colour", frame_stack=4, steps=60, learning_starts=20,
                    buffer_size=100, batch_size=4, eval_freq=0, n_eval_episodes=1,
                    tensorboard=False)  # fmt: skip
    parts = build(config, FaultLog())
    assert parts.spec.obs_shape == (4, 40, 40, 3)
    torso = parts.learner.online.torso
    assert isinstance(torso, NatureCNN)
    assert torso.layout.channels == 12
    frames = torch.randint(0, 255, (2, 4, 40, 40, 3), dtype=torch.uint8)
    by_hand = torch.cat([frames[:, k].permute(0, 3, 1, 2) for k in range(4)], dim=1) / 255
    assert torch.equal(torso(frames), torso.convolutions(by_hand))
    parts.close()
    assert qfleet.train(config=config, run_dir=tmp_path / "run").result.updates == 10


@pytest.mark.slow
def test_compiling_switches_the_hand_written_shortcuts_off() -> None:
    from qfleet.core.types import EnvSpec
    from qfleet.networks.factory import make_network

    spec = EnvSpec("x", (4,), "float32", 2)
    for compiled in (False, True):
        network = make_network(
            Config(compile="on" if compiled else "off"), spec, torch.device("cpu"), 0
        )
        assert network.is_plain_mlp is not compiled


@pytest.mark.slow
def test_an_atari_video_is_in_colour_and_shows_the_game_that_is_played(tmp_path: Path) -> None:
    from PIL import Image

    from qfleet.envs.atari import AtariEnvs
    from qfleet.training.video import record_video

    fields = {
        **TINY, "steps": 40, "learning_starts": 16, "buffer_size": 64, "batch_size": 2,
        "max_episode_steps": 30, "n_eval_episodes": 1, "network": "mlp",
    }  # fmt: skip
    trained = qfleet.train("ALE/Breakout-v5", run_dir=tmp_path / "run", **fields)
    out = tmp_path / "film.gif"
    frames, _ = record_video(trained.policy(), out, seed=3, max_frames=12, fps=30)
    with Image.open(out) as picture:
        assert picture.size == (160, 210)
        assert frames == 12
    with pytest.raises(ConfigError, match=says(".gif", ".mp4")):
        record_video(trained.policy(), tmp_path / "film.avi", seed=3, max_frames=2, fps=30)
    # The camera's pool plays the same game as the policy's.
    config = trained.config.replace(max_episode_steps=0)
    pools = [AtariEnvs(config, "breakout", 1, 3, training=False, colour=c) for c in (False, True)]
    for pool in pools:
        pool.reset()
    random = np.random.default_rng(0)
    total = 0.0
    for _ in range(400):
        action = random.integers(4, size=1)
        grey, colour = (pool.step(action) for pool in pools)
        assert grey.reward == colour.reward
        assert grey.terminated == colour.terminated
        total += float(grey.reward[0])
    assert total > 0
    for pool in pools:
        pool.close()


@pytest.mark.parametrize(("eval_freq", "is_drawn"), [(0, False), (150, True)])
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_curve_has_two_points_or_is_not_drawn(
    eval_freq: int, is_drawn: bool, seeds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = "train CartPole-v1 --preset none --steps 300 --log-interval 1000 --no-tensorboard"
    words += f" --eval-freq {eval_freq} --seeds {seeds} --run-dir {folder}"
    assert main(words.split()) == 0
    assert (folder / "plots" / "learning_curve.png").exists() == is_drawn
    told = capsys.readouterr().out
    assert "None" not in told
    assert ("learning_curve.png" in told) == is_drawn


@pytest.mark.parametrize(
    "engine",
    [{}, pytest.param({"engine": "all-reduce", "workers": 2}, marks=pytest.mark.slow)],
    ids=["one process", "ranks"],
)
def test_a_callback_that_fails_leaves_a_checkpoint_and_a_result(
    engine: dict[str, Any], tmp_path: Path
) -> None:
    def fail(run: Run) -> None:
        if run.parts.clock.env_steps >= 100:
            raise ValueError("boom")

    folder, fields = tmp_path / "run", tiny_fields(steps=10_000, checkpoint_freq=10**9) | engine
    with pytest.raises(ValueError, match="boom"):
        qfleet.train("CartPole-v1", run_dir=folder, callbacks=fail, **fields)
    result = json.loads((folder / "result.json").read_text())
    assert result["stopped_by"] == "error: ValueError: boom"
    resumed = qfleet.resume(folder, steps=result["env_steps"] + 50)
    assert isinstance(resumed, qfleet.Trained)
    assert resumed.result.stopped_by == "steps"


def test_only_known_policies_are_loaded(tmp_path: Path) -> None:
    trained = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", **tiny_fields(steps=200, learning_starts=50)
    )
    with pytest.raises(ConfigError, match=says("which", "newest", "last")):
        qfleet.load(trained.folder, which="newest")  # type: ignore[arg-type]
