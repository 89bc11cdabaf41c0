"""N Atari games in EnvPool's C++ thread pool, if that library is installed.

A step returns a ``core.Step`` with uint8 stacks ``[N, stack, 84, 84]``, pixel for pixel equal to
those of ``atari`` with ale-py's pool. EnvPool also resets on the step after an episode's end. Three
differences are corrected here:

* EnvPool fills a new episode's stack with repeats of the first frame; memories rebuild it with
  zeros;
* EnvPool reports a game that ends in its last allowed step as truncated; it is terminated;
* EnvPool's seeds are fixed when a pool is created, so a reset creates a new pool. (ale-py reloads
  its ROMs in a seeded reset, which takes as long.)

One difference remains: if FIRE is not pressed at the start, an episode has one no-op frame more.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, UnknownNameError, one_line
from qfleet.core.seeding import env_seeds
from qfleet.core.types import EnvSpec, Step
from qfleet.envs.base import BaseEnvs
from qfleet.envs.registry import env_kwargs, refused_kwargs
from qfleet.envs.spaces import describe
from qfleet.envs.threads import MAX_FRAMES, pool_threads

_OPTIONS = ("use_fire_reset", "img_height", "img_width")
"""The pool's arguments that env_kwargs may set; the others are configuration fields."""


class EnvPoolEnvs(BaseEnvs):
    """A ``core.VectorEnv`` of Atari games. Rewards and pixels are integers, so never NaN."""

    in_background = True

    def __init__(
        self, config: Config, game: str, num_envs: int, seed: int, *, training: bool
    ) -> None:
        """Prepare a pool; ``reset`` creates it. ``game`` is a ROM name, such as ``ms_pacman``."""
        self._library = _import_library(game)
        self._task_id = task_id(game)
        seeds = env_seeds(seed, num_envs)
        self._options = _options(config, seeds, training=training)
        super().__init__(self._describe(config), seeds, num_envs)
        self._reports_lives = config.episodic_life and training
        self._pool: Any = None

    def _describe(self, config: Config) -> EnvSpec:
        try:
            spaces = self._library.make_spec(self._task_id, **self._options)
            spec = describe(
                config.env,
                spaces.gymnasium_observation_space,
                spaces.gymnasium_action_space,
                frame_stack=self._options["stack_num"],
                frame_skip=config.frame_skip,
            )
            if min(self._options["img_height"], self._options["img_width"]) < 1:
                # EnvPool accepts this size and then aborts the process from one of its threads.
                raise ValueError("an image needs at least one pixel")
        except (TypeError, ValueError, RuntimeError) as error:
            raise refused_kwargs(config, error) from None
        return spec

    def reset(self) -> NDArray[Any]:
        # The old pool's threads end before the new pool's threads start.
        self.close()
        self._pool = self._library.make_gymnasium(self._task_id, **self._options)
        obs, info = self._pool.reset()
        self._begin_episodes(info["lives"])
        self._blank_before_start(obs, info["elapsed_step"])
        return np.asarray(obs)

    def _send(self, actions: NDArray[np.int64]) -> None:
        # The pool copies the actions as 32-bit integers.
        self._pool.send(actions)

    def _recv(self) -> Step:
        """Wait for the pool's step. Its arrays are new: no later call overwrites them."""
        obs, reward, _, at_limit, info = self._pool.recv()
        terminated = info["terminated"].astype(np.bool_)
        self._blank_before_start(obs, info["elapsed_step"])
        lives = info["lives"] if self._reports_lives else None
        return self._autoreset_step(obs, reward, terminated, at_limit & ~terminated, lives)

    def _blank_before_start(self, obs: NDArray[Any], age_env_steps: NDArray[np.int32]) -> None:
        """Zero the frames before the episode's first; only few envs need it at a time."""
        blanks = self.spec.frame_stack - 1 - age_env_steps
        for env in np.flatnonzero(blanks > 0).tolist():
            obs[env, : blanks[env]] = 0

    def close(self) -> None:
        """Delete the pool, which ends its C++ threads, also during a step."""
        self._pool = None
        self._is_in_flight = False


def task_id(game: str) -> str:
    """Return EnvPool's name of a ROM: ``MsPacman-v5`` for ``ms_pacman``."""
    return "".join(word.capitalize() for word in game.split("_")) + "-v5"


def _import_library(game: str) -> Any:
    """Import EnvPool and check that it has this game."""
    try:
        # Imported only when needed, because the import takes a second.
        library = importlib.import_module("envpool")
        games = importlib.import_module("envpool.atari.registration").atari_game_list
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"vectorize 'envpool' needs package '{error.name}': pip install envpool, or use auto"
        ) from None
    except (ImportError, OSError) as error:
        # OSError: the ROM files are in a separate package.
        raise ConfigError(
            f"vectorize 'envpool' cannot import its library: {one_line(error)}; "
            "pip install --force-reinstall envpool, or use auto"
        ) from None
    if game not in games:
        raise UnknownNameError("EnvPool game", game, games)
    return library


def _options(config: Config, seeds: list[int], *, training: bool) -> dict[str, Any]:
    """Return the pool's arguments."""
    return {
        "num_envs": len(seeds),
        "num_threads": pool_threads(config, len(seeds), training=training),
        "seed": seeds,
        "max_episode_steps": config.max_episode_steps or -(-MAX_FRAMES // config.frame_skip),
        "repeat_action_probability": config.sticky_actions,
        "full_action_space": config.full_action_space,
        "stack_num": config.frame_stack or 4,
        "frame_skip": config.frame_skip,
        # A limit of 0 crashes EnvPool. 1 means the same: the number of no-ops is drawn from below
        # the limit, as in ale-py.
        "noop_max": max(config.noop_max, 1),
        "reward_clip": False,
        # The pool's episodic life would also end the reported episodes; see life_lost above.
        "episodic_life": False,
        "gray_scale": True,
        "img_height": 84,
        "img_width": 84,
        **env_kwargs(config, "EnvPool", _OPTIONS),
    }
