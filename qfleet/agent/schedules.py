"""Every schedule, as a function of the run's clock and the configuration."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qfleet.algorithms.exploration import epsilon_ladder
from qfleet.config.config import Config


def progress(config: Config, env_steps: int) -> float:
    """Return the share of the run that is done, in [0, 1]."""
    return min(1.0, env_steps / config.steps)


def epsilon(config: Config, env_steps: int) -> float:
    """Return ε: it falls linearly over the first ``exploration_fraction`` of the run, as in SB3.

    0 if noise in the weights, or a policy that actions are sampled from, explores instead.
    """
    if config.noisy or config.head == "actor-critic":
        return 0.0
    done, fraction = env_steps / config.steps, config.exploration_fraction
    initial, final = config.exploration_initial_eps, config.exploration_final_eps
    return final if done >= fraction else initial + done * (final - initial) / fraction


def learning_rate(config: Config, env_steps: int) -> float:
    done = progress(config, env_steps)
    if config.lr_schedule == "linear":
        return config.learning_rate * (1.0 - done)
    if config.lr_schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate


def importance_exponent(config: Config, env_steps: int) -> float:
    """Return β of prioritised replay: it rises from its first value to 1 at the end of the run."""
    beta = config.prioritized_replay_beta0
    return beta + (1.0 - beta) * progress(config, env_steps)


def own_ladder(config: Config, worker: int) -> NDArray[np.float32] | None:
    """Return a worker's part of the ladder over all envs of all workers; None without a ladder.

    A worker that joins late reuses an existing ε of the ladder.
    """
    if not config.exploration_ladder:
        return None
    ladder = epsilon_ladder(config.workers * config.envs, config.exploration_final_eps).numpy()
    first = worker % config.workers * config.envs
    own: NDArray[np.float32] = ladder[first : first + config.envs]
    return own


def rows_per_block(config: Config) -> int:
    """Return the rows between two checks of the rate limiter: one train_freq, over all envs."""
    rows = config.block_rows or config.train_freq // config.envs
    if not config.replay:
        return rows  # whole rollouts, or parts into which they can be cut
    return max(1, min(rows, 1024, config.buffer_size // config.envs))


def next_rows(config: Config, env_steps: int) -> int:
    """Return the rows of the block that starts at ``env_steps``; 0 once the run is complete."""
    rows_left = -(-(config.steps - env_steps) // config.envs)
    return max(0, min(rows_per_block(config), rows_left))
