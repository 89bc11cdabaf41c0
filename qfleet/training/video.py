"""Video of the greedy policy: plays one episode and writes its frames as GIF or MP4.

Atari's C++ pool gives the policy grey 84×84 stacks. A second pool with the same seed and the same
actions plays the same game in colour and full size, for the video.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from qfleet.agent.policy import Policy
from qfleet.core.errors import ConfigError, EnvironmentFault, UserError, one_line
from qfleet.core.types import VectorEnv
from qfleet.envs.atari import AtariEnvs
from qfleet.envs.closing import close_env, closed_on_error
from qfleet.envs.device.names import is_tensor_env, make_tensor_env
from qfleet.envs.device.vector import TensorEnvs
from qfleet.envs.registry import ale_game, make_single, single_spec
from qfleet.envs.spaces import AnyEnv

Frame = NDArray[np.uint8]
SUFFIXES = (".gif", ".mp4")
MOST_GIF_FPS = 50
"""Viewers slow down a GIF whose frames are shorter."""
BOARD_PIXELS = 32
"""Side of a cell of a board, in pixels."""
DRIVER = "SDL_VIDEODRIVER"
"""The environment variable that chooses SDL's driver; pygame draws with SDL."""


def record_video(
    policy: Policy, out: Path, seed: int, max_frames: int, fps: int
) -> tuple[int, float]:
    """Write one episode of at most ``max_frames`` frames; return its length and its return."""
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"a video must end in {' or '.join(SUFFIXES)}, got '{out}'")
    if out.suffix == ".gif" and fps > MOST_GIF_FPS:
        raise ConfigError(
            f"a .gif has at most {MOST_GIF_FPS} frames per second, got {fps}; lower --fps, or "
            "write .mp4"
        )
    policy.check_trust()
    total = 0.0
    frames: list[Frame] = []
    try:
        for frame, reward in _play(policy, seed):
            frames.append(frame)
            total += reward
            if len(frames) >= max_frames:
                break
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"'{policy.config.env}' cannot render ({error}); try `pip install qfleet[render]`"
        ) from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(frames, out, fps)
    except OSError as error:
        raise ConfigError(f"cannot write '{out}': {error.strerror or error}") from None
    return len(frames), total


def _play(policy: Policy, seed: int) -> Iterator[tuple[Frame, float]]:
    """Yield the frames of an episode, each with the reward before it."""
    config = policy.env_config
    if game := ale_game(config.env):
        player, camera = (
            AtariEnvs(config, game, 1, seed, training=False, colour=colour)
            for colour in (False, True)
        )
        return _play_vector(policy, [player, camera], lambda stack: stack[-1].copy())
    if not is_tensor_env(config.env):
        return _play_single(policy, seed)
    board = TensorEnvs(make_tensor_env(config), 1, seed)
    shape = board.spec.unmasked.obs_shape
    if board.spec.obs_dtype != "uint8" or len(shape) != 3:
        raise ConfigError(f"'{config.env}' cannot be drawn: its observations are not a board")
    # A mask is behind the flattened board.
    return _play_vector(
        policy, [board], lambda obs: _draw_board(obs.reshape(-1)[: math.prod(shape)].reshape(shape))
    )


def _play_single(policy: Policy, seed: int) -> Iterator[tuple[Frame, float]]:
    with contextlib.ExitStack() as stack:
        try:
            env, obs, frame = _begin(policy, seed)
        except (UserError, gymnasium.error.DependencyNotInstalled):
            raise
        except Exception:
            if DRIVER in os.environ:
                raise
            # SDL may have found no screen. Its dummy driver needs none, but is the second choice:
            # with it, highway-env draws black frames.
            os.environ[DRIVER] = "dummy"
            stack.callback(os.environ.pop, DRIVER, None)
            env, obs, frame = _begin(policy, seed)
        stack.callback(close_env, env)
        yield frame, 0.0
        done = False
        while not done:
            row = np.asarray(obs, policy.spec.obs_dtype)[None]
            action = int(policy.greedy(row)[0])
            try:
                obs, reward, terminated, truncated, _ = env.step(action)
                frame = _rendered(env)
            except (UserError, gymnasium.error.DependencyNotInstalled):
                raise
            except Exception as error:
                raise EnvironmentFault(
                    f"environment '{policy.config.env}' failed: {one_line(error)}"
                ) from error
            done = terminated or truncated
            yield frame, float(reward)


def _begin(policy: Policy, seed: int) -> tuple[AnyEnv, Any, Frame]:
    """Return a new environment, its first observation and its first frame."""
    env = make_single(policy.env_config, render_mode="rgb_array")
    with closed_on_error(env):
        policy.check_spec(single_spec(policy.env_config, env))
        obs, _ = env.reset(seed=seed)
        return env, obs, _rendered(env)


def _rendered(env: AnyEnv) -> Frame:
    frame = None
    with contextlib.suppress(NotImplementedError):  # Gymnasium's own ``render``
        frame = env.render()
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise ConfigError("this environment renders no image in render_mode rgb_array")
    return frame.astype(np.uint8)  # a copy: environments may draw into the same array again


def _play_vector(
    policy: Policy, envs: Sequence[VectorEnv], draw: Callable[[NDArray[Any]], Frame]
) -> Iterator[tuple[Frame, float]]:
    """Play in the first env; draw the observations of the last, which gets the same actions."""
    with contextlib.ExitStack() as stack:
        for env in envs:
            stack.callback(env.close)
        policy.check_spec(envs[0].spec)
        obs, done = [env.reset() for env in envs], False
        yield draw(obs[-1][0]), 0.0
        while not done:
            action = policy.greedy(obs[0])
            steps = [env.step(action) for env in envs]
            obs = [step.obs for step in steps]
            done = bool(steps[0].terminated[0] or steps[0].truncated[0])
            yield draw(obs[-1][0]), float(steps[0].reward[0])


def _draw_board(board: NDArray[np.uint8]) -> Frame:
    """Return a board ``[C, 10, 10]`` in colours, one per channel; the last channel is on top."""
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
        # GIF counts hundredths of a second.
        ends = [round(100 * number / fps) for number in range(len(images) + 1)]
        durations = [10 * (end - start) for start, end in itertools.pairwise(ends)]
        images[0].save(out, save_all=True, append_images=images[1:], duration=durations, loop=0)
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
