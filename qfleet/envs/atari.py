"""N Atari games in ale-py's own C++ thread pool.

A step returns a ``core.Step`` with uint8 stacks ``[N, stack, 84, 84]``. The pool does the usual
preprocessing (grey scale, resizing, frame skip with max-pooling, no-ops and FIRE at the start),
pads a new episode's stack with zeros and resets on the step after an episode's end.
"""

from __future__ import annotations

from typing import Any

import ale_py
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError, ConfigError, UnknownNameError
from qfleet.core.seeding import env_seeds
from qfleet.core.types import EnvSpec, StateDict, Step
from qfleet.envs.guard import one_line
from qfleet.envs.registry import env_kwargs
from qfleet.envs.spaces import describe
from qfleet.envs.threads import pool_threads

_MAX_FRAMES = 108_000
"""Time limit in emulator frames: half an hour of play, as in the published results."""
_OPTIONS = ("use_fire_reset", "maxpool", "img_height", "img_width")
"""The pool's arguments that env_kwargs may set; the others are configuration fields."""


def _make_pool(config: Config, *arguments: Any, **options: Any) -> AtariVectorEnv:
    try:
        return AtariVectorEnv(*arguments, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"Atari game '{config.env}' cannot take env_kwargs {config.env_kwargs}: "
            f"{one_line(error)}"
        ) from None


class AtariEnvs:
    """A ``core.VectorEnv`` of Atari games. Rewards and pixels are integers, so never NaN."""

    spec: EnvSpec
    num_envs: int
    seeds: list[int]
    in_background = True

    def __init__(
        self,
        config: Config,
        game: str,
        num_envs: int,
        seed: int,
        *,
        training: bool,
        colour: bool = False,
    ) -> None:
        """Create the pool. ``colour``: return full-size colour frames instead, for videos only."""
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        options = env_kwargs(config)
        for name in options:
            if name not in _OPTIONS:
                raise UnknownNameError("Atari env_kwargs entry", name, _OPTIONS)
        frame_stack = config.frame_stack or 4
        self._pool = _make_pool(
            config,
            game,
            num_envs,
            num_threads=pool_threads(config, num_envs, training=training),
            max_num_frames_per_episode=(
                config.max_episode_steps * config.frame_skip or _MAX_FRAMES
            ),
            repeat_action_probability=config.sticky_actions,
            full_action_space=config.full_action_space,
            stack_num=frame_stack,
            frameskip=config.frame_skip,
            noop_max=config.noop_max,
            reward_clipping=False,
            # The pool's episodic life would also end the reported episodes; see life_lost below.
            episodic_life=False,
            grayscale=not colour,
            **{**options, **({"img_height": 210, "img_width": 160} if colour else {})},
        )
        self.spec = describe(
            config.env,
            self._pool.single_observation_space,
            self._pool.single_action_space,
            frame_stack=frame_stack,
            frame_skip=config.frame_skip,
        )
        self.num_envs = num_envs
        self.seeds = env_seeds(seed, num_envs)
        self._reports_lives = config.episodic_life and training
        self._lives = np.zeros(num_envs, dtype=np.int32)
        self._is_over = np.zeros(num_envs, dtype=np.bool_)
        self._is_in_flight = False

    def reset(self) -> NDArray[Any]:
        """Reset all games to their seeds: two resets give the same episodes."""
        obs, info = self._pool.reset(seed=np.array(self.seeds))
        self._lives = info["lives"]
        self._is_over = np.zeros(self.num_envs, dtype=np.bool_)
        return np.asarray(obs)

    def step(self, actions: NDArray[np.int64]) -> Step:
        self.send(actions)
        return self.recv()

    def send(self, actions: NDArray[np.int64]) -> None:
        """Start a step in the pool's threads and return at once."""
        assert not self._is_in_flight, "send() before the recv() of the step before"
        self._is_in_flight = True
        self._pool.send(actions)

    def recv(self) -> Step:
        """Wait for the pool's step. Its arrays are new: no later call overwrites them."""
        # The pool itself would wait forever.
        assert self._is_in_flight, "recv() without a send() before it"
        self._is_in_flight = False
        obs, reward, terminated, truncated, info = self._pool.recv()
        opened = self._is_over
        self._is_over = terminated | truncated
        life_lost = None
        if self._reports_lives:
            life_lost = (info["lives"] < self._lives) & ~terminated & ~opened
            self._lives = info["lives"]
        return Step(obs, reward, terminated, truncated, opened, opened, life_lost)

    def state_dict(self) -> StateDict | None:
        """Return None: the pool does not expose the state of its emulators."""
        return None

    def load_state_dict(self, state: StateDict) -> None:
        raise CheckpointError(f"Atari games cannot be resumed from a state ({len(state)} entries)")

    def close(self) -> None:
        self._pool.close()
        # The C++ threads end when the object that owns them is deleted.
        del self._pool.ale
