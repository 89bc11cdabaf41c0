"""A film of the greedy policy: run in, frames out, written as GIF or MP4.

Atari's C++ pool shows the policy grey 84×84 stacks. A second pool with the same seed and the same
actions, but in colour and full size, plays the same game for the camera.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from qfleet.agent.policy import Policy
from qfleet.core.errors import ConfigError
from qfleet.envs.atari import AtariEnvs
from qfleet.envs.device.names import is_tensor_env, make_tensor_env
from qfleet.envs.device.vector import TensorEnvs
from qfleet.envs.registry import ale_game, make_single

Frame = NDArray[np.uint8]
SUFFIXES = (".gif", ".mp4")
BOARD_PIXELS = 32
"""Side of a cell of a board."""


def record_video(
    policy: Policy, out: Path, seed: int, max_frames: int, fps: int
) -> tuple[int, float]:
    """Write one episode (at most ``max_frames`` long); returns its frames and its return."""
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"cannot write '{out}'; a film ends in {' or '.join(SUFFIXES)}")
    # Pictures are drawn in memory: without a screen, SDL must not look for one.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    total = 0.0
    frames: list[Frame] = []
    play = _play
    if ale_game(policy.config.env):
        play = _play_atari
    elif is_tensor_env(policy.config.env):
        play = _play_board
    try:
        for frame, reward in play(policy, seed):
            frames.append(frame)
            total += reward
            if len(frames) >= max_frames:
                break
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"'{policy.config.env}' cannot draw itself ({error}); try `pip install qfleet[render]`"
        ) from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(frames, out, fps)
    except OSError as error:
        raise ConfigError(f"cannot write '{out}': {error.strerror or error}") from None
    return len(frames), total


def _play(policy: Policy, seed: int) -> Iterator[tuple[Frame, float]]:
    env = make_single(policy.config, render_mode="rgb_array")
    try:
        obs, _ = env.reset(seed=seed)
        yield _rendered(env.render()), 0.0
        done = False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(
                int(policy.greedy(np.asarray(obs)[None])[0])
            )
            done = terminated or truncated
            yield _rendered(env.render()), float(reward)
    finally:
        env.close()


def _rendered(frame: Any) -> Frame:
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise ConfigError("this environment renders no picture in render_mode rgb_array")
    return frame.astype(np.uint8, copy=False)


def _play_atari(policy: Policy, seed: int) -> Iterator[tuple[Frame, float]]:
    game = ale_game(policy.config.env)
    assert game is not None
    player = AtariEnvs(policy.config, game, 1, seed, training=False)
    camera = AtariEnvs(policy.config, game, 1, seed, training=False, colour=True)
    try:
        obs, picture = player.reset(), camera.reset()
        yield picture[0, -1].copy(), 0.0
        while True:
            action = policy.greedy(obs)
            step, shot = player.step(action), camera.step(action)
            obs = step.obs
            yield shot.obs[0, -1].copy(), float(step.reward[0])
            if step.terminated[0] or step.truncated[0]:
                return
    finally:
        player.close()
        camera.close()


def _play_board(policy: Policy, seed: int) -> Iterator[tuple[Frame, float]]:
    envs = TensorEnvs(make_tensor_env(policy.config), 1, seed)
    if envs.spec.obs_dtype != "uint8" or len(envs.spec.obs_shape) != 3:
        raise ConfigError(f"'{policy.config.env}' shows numbers, not a board: there is no picture")
    obs = envs.reset()
    yield _painted(obs[0]), 0.0
    while True:
        step = envs.step(policy.greedy(obs))
        obs = step.obs
        yield _painted(obs[0]), float(step.reward[0])
        if step.terminated[0] or step.truncated[0]:
            return


def _painted(board: NDArray[np.uint8]) -> Frame:
    """A board ``[C, 10, 10]`` in colours, one per channel; the last channel lies on top."""
    import matplotlib

    colours = matplotlib.colormaps["tab10"](np.arange(len(board)))[:, :3]
    picture = np.zeros((*board.shape[1:], 3), dtype=np.uint8)
    for channel, colour in enumerate(colours):
        picture[board[channel] > 0] = (255 * colour).astype(np.uint8)
    return picture.repeat(BOARD_PIXELS, axis=0).repeat(BOARD_PIXELS, axis=1)


def _write(frames: list[Frame], out: Path, fps: int) -> None:
    if out.suffix == ".gif":
        from PIL import Image

        images = [Image.fromarray(frame) for frame in frames]
        images[0].save(out, save_all=True, append_images=images[1:], duration=1000 // fps, loop=0)
        return
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401 (imageio finds it by itself, but not before writing)
    except ImportError:
        raise ConfigError(
            f"'{out}' needs a package that is not installed: `pip install qfleet[render]`, "
            "or write a .gif"
        ) from None
    imageio.mimwrite(out, list[Any](frames), fps=fps, macro_block_size=2)
