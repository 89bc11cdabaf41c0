"""N Atari games in ale-py's own C++ pool of threads.

Actions go in, a ``core.Step`` with uint8 stacks ``[N, stack, 84, 84]`` comes out. The pool does the
usual preprocessing (grey, resized, frames skipped and max-pooled, no-ops and FIRE at the start),
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
"""Half an hour of play, as in the published results."""
_OPTIONS = ("use_fire_reset", "maxpool", "img_height", "img_width")
"""Of the pool's arguments, those that env_kwargs may set; the others are configuration fields."""


def _make_pool(config: Config, *arguments: Any, **options: Any) -> AtariVectorEnv:
    try:
        return AtariVectorEnv(*arguments, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"Atari game '{config.env}' cannot take env_kwargs {config.env_kwargs}: "
            f"{one_line(error)}"
        ) from None


class AtariEnvs:
    """A ``core.VectorEnv``. The emulator's rewards and pixels are integers, so none is ever NaN."""

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
        """``colour``: full-size colour frames instead, for the camera; no network takes them."""
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
            # ALE's own would end the episode in reports too; see life_lost below.
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
        """Start all games anew from their seeds: two resets give the same episodes."""
        obs, info = self._pool.reset(seed=np.array(self.seeds))
        self._lives = info["lives"]
        self._is_over = np.zeros(self.num_envs, dtype=np.bool_)
        return np.asarray(obs)

    def step(self, actions: NDArray[np.int64]) -> Step:
        self.send(actions)
        return self.recv()

    def send(self, actions: NDArray[np.int64]) -> None:
        """Wake the pool's threads; they step the games while this one does something else."""
        assert not self._is_in_flight, "send() before the recv() of the step before"
        self._is_in_flight = True
        self._pool.send(actions)

    def recv(self) -> Step:
        """Wait for the pool. It allocates what it returns anew: no later call overwrites it."""
        # The pool itself would wait for ever.
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
        """None: the pool does not give its emulators' state away."""
        return None

    def load_state_dict(self, state: StateDict) -> None:
        raise CheckpointError(f"Atari games cannot be resumed from a state ({len(state)} entries)")

    def close(self) -> None:
        self._pool.close()
        # The C++ threads end with the object that owns them.
        del self._pool.ale
