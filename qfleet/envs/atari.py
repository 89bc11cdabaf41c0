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
from qfleet.core.seeding import env_seeds
from qfleet.core.types import Step
from qfleet.envs.base import BaseEnvs
from qfleet.envs.registry import env_kwargs, refused_kwargs
from qfleet.envs.spaces import describe
from qfleet.envs.threads import MAX_FRAMES, pool_threads

_OPTIONS = ("use_fire_reset", "maxpool", "img_height", "img_width")
"""The pool's arguments that env_kwargs may set; the others are configuration fields."""


class AtariEnvs(BaseEnvs):
    """A ``core.VectorEnv`` of Atari games. Rewards and pixels are integers, so never NaN."""

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
        num_threads: int | None = None,
    ) -> None:
        """Create the pool. ``colour``: return full-size colour frames instead, for videos only.

        ``num_threads``: None for those of a whole group of envs.
        """
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        frame_stack = config.frame_stack or 4
        options: dict[str, Any] = {
            "num_threads": num_threads or pool_threads(config, num_envs, training=training),
            "max_num_frames_per_episode": config.max_episode_steps * config.frame_skip
            or MAX_FRAMES,
            "repeat_action_probability": config.sticky_actions,
            "full_action_space": config.full_action_space,
            "stack_num": frame_stack,
            "frameskip": config.frame_skip,
            "noop_max": config.noop_max,
            "reward_clipping": False,
            # The pool's episodic life would also end the reported episodes; see life_lost below.
            "episodic_life": False,
            "grayscale": not colour,
            **env_kwargs(config, "Atari", _OPTIONS),
            **({"img_height": 210, "img_width": 160} if colour else {}),
        }
        try:
            self._pool = AtariVectorEnv(game, num_envs, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise refused_kwargs(config, error) from None
        spec = describe(
            config.env,
            self._pool.single_observation_space,
            self._pool.single_action_space,
            frame_stack=frame_stack,
            frame_skip=config.frame_skip,
        )
        super().__init__(spec, env_seeds(seed, num_envs), num_envs)
        self._reports_lives = config.episodic_life and training

    def reset(self) -> NDArray[Any]:
        obs, info = self._pool.reset(seed=np.array(self.seeds))
        self._begin_episodes(info["lives"])
        return np.asarray(obs)

    def _send(self, actions: NDArray[np.int64]) -> None:
        self._pool.send(actions)

    def _recv(self) -> Step:
        """Wait for the pool's step. Its arrays are new: no later call overwrites them."""
        obs, reward, terminated, truncated, info = self._pool.recv()
        lives = info["lives"] if self._reports_lives else None
        return self._autoreset_step(obs, reward, terminated, truncated, lives)

    def close(self) -> None:
        self._pool.close()
        # The C++ threads end when the object that owns them is deleted.
        del self._pool.ale
