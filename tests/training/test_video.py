"""Videos of environments that draw with pygame: SDL's dummy driver is set only where it is needed.

SDL reads its driver from an environment variable. These environments look at the variable, as
highway-env does, and need no pygame.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageSequence

import qfleet
from qfleet.core.errors import EnvironmentFault
from qfleet.training.video import DRIVER, _rendered, _write, record_video
from support.configs import tiny_fields
from support.messages import says
from support.toy_envs import Bandit


class BlackWithDummy(Bandit):
    """Draws black frames with SDL's dummy driver, as highway-env does."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def render(self) -> NDArray[np.uint8]:
        return np.full((8, 8, 3), 0 if os.environ.get(DRIVER) == "dummy" else 255, np.uint8)


class NeedsDummy(BlackWithDummy):
    """Cannot draw without a screen, unless SDL's dummy driver is set."""

    def render(self) -> NDArray[np.uint8]:
        self.look_for_a_screen()
        return np.full((8, 8, 3), 200, np.uint8)

    def look_for_a_screen(self) -> None:
        if os.environ.get(DRIVER) != "dummy":
            raise RuntimeError("No available video device")


class NeedsDummyFromTheStart(NeedsDummy):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        if render_mode is not None:
            self.look_for_a_screen()


class NeverDraws(BlackWithDummy):
    def render(self) -> NDArray[np.uint8]:
        raise RuntimeError("no picture")


class MovingBar(BlackWithDummy):
    """Draws into the same array at every step."""

    picture = np.zeros((8, 8, 3), np.uint8)

    def render(self) -> NDArray[np.uint8]:
        self.picture[:] = np.roll(np.eye(8, dtype=np.uint8), self.picture[0, 0, 0], 0)[..., None]
        self.picture[0, 0, 0] = (self.picture[0, 0, 0] + 1) % 8
        return self.picture


class Crashes(BlackWithDummy):
    def step(self, action: Any) -> Any:
        raise RuntimeError("sim crashed")


class Undrawn(BlackWithDummy):
    """Has only Gymnasium's own ``render``."""

    def render(self) -> NDArray[np.uint8]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DRIVER, raising=False)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> qfleet.Policy:
    """A policy of the environment whose spaces all others share."""
    folder = tmp_path_factory.mktemp("video") / "run"
    fields = tiny_fields(steps=40, learning_starts=20, buffer_size=50, batch_size=4)
    return qfleet.train("support.toy_envs:Bandit", run_dir=folder, **fields).policy()


def video(policy: qfleet.Policy, env: type[Any], out: Path) -> int:
    """Return the brightest value in a video of two frames."""
    policy.config = policy.config.replace(env=f"{env.__module__}:{env.__name__}")
    assert record_video(policy, out, seed=0, max_frames=2, fps=10)[0] == 2
    with Image.open(out) as picture:
        return int(np.asarray(picture.convert("RGB")).max())


@pytest.mark.parametrize(
    ("env", "brightness"),
    [(BlackWithDummy, 255), (NeedsDummy, 200), (NeedsDummyFromTheStart, 200)],
)
def test_the_dummy_driver_is_set_only_where_rendering_fails_without_it(
    env: type[Any], brightness: int, policy: qfleet.Policy, tmp_path: Path
) -> None:
    assert video(policy, env, tmp_path / "video.gif") == brightness
    assert DRIVER not in os.environ  # the next video starts without it


def test_a_driver_that_the_user_has_set_stays(
    policy: qfleet.Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with the dummy driver this environment is black."""
    monkeypatch.setenv(DRIVER, "dummy")
    assert video(policy, BlackWithDummy, tmp_path / "video.gif") == 0
    monkeypatch.setenv(DRIVER, "x11")
    with pytest.raises(RuntimeError, match="No available video device"):
        video(policy, NeedsDummy, tmp_path / "video.gif")
    assert os.environ[DRIVER] == "x11"


def test_an_environment_without_a_renderer_is_named_in_one_line(
    policy: qfleet.Policy, tmp_path: Path
) -> None:
    with pytest.raises(qfleet.ConfigError, match=says("no image", "rgb_array")):
        video(policy, Undrawn, tmp_path / "video.gif")


def test_an_environment_that_fails_with_both_drivers_is_reported(
    policy: qfleet.Policy, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="no picture"):
        video(policy, NeverDraws, tmp_path / "video.gif")
    assert DRIVER not in os.environ


def test_frames_are_copies_and_a_gif_lasts_as_long_as_asked_for(
    policy: qfleet.Policy, tmp_path: Path
) -> None:
    frames = [np.full((8, 8, 3), 6 * n, np.uint8) for n in range(40)]
    for fps in (30, 50):
        _write(frames, tmp_path / "plain.gif", fps)
        with Image.open(tmp_path / "plain.gif") as picture:
            durations = [frame.info["duration"] for frame in ImageSequence.Iterator(picture)]
        assert sum(durations) == pytest.approx(1000 * 40 / fps, abs=10)
    env = MovingBar("rgb_array")
    first = _rendered(env)
    before = first.copy()
    _rendered(env)
    assert (first == before).all()
    with pytest.raises(qfleet.ConfigError, match=says("50", "--fps", ".mp4")):
        record_video(policy, tmp_path / "fast.gif", seed=0, max_frames=2, fps=60)


def test_an_environment_that_fails_in_a_step_is_named_in_one_line(
    policy: qfleet.Policy, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFault, match=says("Crashes", "sim crashed")):
        video(policy, Crashes, tmp_path / "one.gif")
