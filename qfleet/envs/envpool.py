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
from qfleet.core.errors import CheckpointError, ConfigError, UnknownNameError
from qfleet.core.seeding import env_seeds
from qfleet.core.types import EnvSpec, StateDict, Step
from qfleet.envs.guard import one_line
from qfleet.envs.registry import env_kwargs
from qfleet.envs.spaces import describe
from qfleet.envs.threads import pool_threads

_MAX_FRAMES = 108_000
"""Time limit in emulator frames: half an hour of play, as in the published results."""
_OPTIONS = ("use_fire_reset", "img_height", "img_width")
"""The pool's arguments that env_kwargs may set; the others are configuration fields."""


class EnvPoolEnvs:
    """A ``core.VectorEnv`` of Atari games. Rewards and pixels are integers, so never NaN."""

    spec: EnvSpec
    num_envs: int
    seeds: list[int]
    in_background = True

    def __init__(
        self, config: Config, game: str, num_envs: int, seed: int, *, training: bool
    ) -> None:
        """Prepare a pool; ``reset`` creates it. ``game`` is a ROM name, such as ``ms_pacman``."""
        self._library = _import_library(game)
        self._task_id = task_id(game)
        self.num_envs = num_envs
        self.seeds = env_seeds(seed, num_envs)
        self._options = _options(config, self.seeds, training=training)
        self.spec = self._describe(config)
        self._reports_lives = config.episodic_life and training
        self._pool: Any = None
        self._lives = np.zeros(num_envs, dtype=np.int32)
        self._is_over = np.zeros(num_envs, dtype=np.bool_)
        self._is_in_flight = False

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
            raise ConfigError(
                f"Atari game '{config.env}' cannot take env_kwargs {config.env_kwargs}: "
                f"{one_line(error)}"
            ) from None
        return spec

    def reset(self) -> NDArray[Any]:
        """Reset all games to their seeds: two resets give the same episodes."""
        # The old pool's threads end before the new pool's threads start.
        self.close()
        self._pool = self._library.make_gymnasium(self._task_id, **self._options)
        obs, info = self._pool.reset()
        self._lives = info["lives"]
        self._is_over = np.zeros(self.num_envs, dtype=np.bool_)
        self._blank_before_start(obs, info["elapsed_step"])
        return np.asarray(obs)

    def step(self, actions: NDArray[np.int64]) -> Step:
        self.send(actions)
        return self.recv()

    def send(self, actions: NDArray[np.int64]) -> None:
        """Start a step in the pool's threads and return at once."""
        assert not self._is_in_flight, "send() before the recv() of the step before"
        self._is_in_flight = True
        # The pool copies the actions as 32-bit integers.
        self._pool.send(actions)

    def recv(self) -> Step:
        """Wait for the pool's step. Its arrays are new: no later call overwrites them."""
        # The pool itself would wait forever.
        assert self._is_in_flight, "recv() without a send() before it"
        self._is_in_flight = False
        obs, reward, _, at_limit, info = self._pool.recv()
        terminated = info["terminated"].astype(np.bool_)
        truncated = at_limit & ~terminated
        opened = self._is_over
        self._is_over = terminated | truncated
        life_lost = None
        if self._reports_lives:
            life_lost = (info["lives"] < self._lives) & ~terminated & ~opened
            self._lives = info["lives"]
        self._blank_before_start(obs, info["elapsed_step"])
        return Step(obs, reward, terminated, truncated, opened, opened, life_lost)

    def _blank_before_start(self, obs: NDArray[Any], age_env_steps: NDArray[np.int32]) -> None:
        """Zero the frames before the episode's first; only few envs need it at a time."""
        blanks = self.spec.frame_stack - 1 - age_env_steps
        for env in np.flatnonzero(blanks > 0).tolist():
            obs[env, : blanks[env]] = 0

    def state_dict(self) -> StateDict | None:
        """Return None: the pool does not expose the state of its emulators."""
        return None

    def load_state_dict(self, state: StateDict) -> None:
        raise CheckpointError(f"Atari games cannot be resumed from a state ({len(state)} entries)")

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
    options = env_kwargs(config)
    for name in options:
        if name not in _OPTIONS:
            raise UnknownNameError("EnvPool env_kwargs entry", name, _OPTIONS)
    return {
        "num_envs": len(seeds),
        "num_threads": pool_threads(config, len(seeds), training=training),
        "seed": seeds,
        "max_episode_steps": config.max_episode_steps or -(-_MAX_FRAMES // config.frame_skip),
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
        **options,
    }
