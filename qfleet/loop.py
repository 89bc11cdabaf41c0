"""The loop, written once: *collect* and *learn*, gated by one RateLimiter.

Engines decide who advances these two generators and where; nothing in here knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from qfleet.actor import Actor
from qfleet.config import Config
from qfleet.core import Clock, Memory, WeightsChannel
from qfleet.learner import Learner
from qfleet.telemetry.timers import Timers


class RateLimiter:
    """Holds the replay ratio: ``gradient_steps`` updates per ``train_freq`` env steps.

    ``slack_updates`` is the width of the band: how many owed updates collecting may run ahead.
    """

    def __init__(
        self, config: Config, clock: Clock, memory: Memory, slack_updates: int = 0
    ) -> None:
        self._config, self._clock, self._memory = config, clock, memory
        self._slack = slack_updates

    def updates_owed(self) -> int:
        learnable = self._clock.env_steps - self._config.learning_starts
        if learnable <= 0:
            return 0
        bursts = learnable // self._config.train_freq
        return bursts * self._config.gradient_steps - self._clock.updates

    def may_collect(self) -> bool:
        return self.updates_owed() <= self._slack or not self._memory.can_sample()


def rows_per_block(config: Config) -> int:
    """Rows collected between two looks at the limiter: one train_freq, over all envs."""
    return max(1, min(config.train_freq // config.envs, 1024, config.buffer_size // config.envs))


def collect(
    actor: Actor, memory: Memory, config: Config, clock: Clock, timers: Timers
) -> Iterator[None]:
    """Each turn: one block from the environments into the memory."""
    copying = timers.span("copy")
    while True:
        rows_left = -(-(config.steps - clock.env_steps) // config.envs)
        block = actor.collect(min(rows_per_block(config), rows_left))
        with copying:
            memory.extend(block)
        yield


def learn(
    learner: Learner, limiter: RateLimiter, channel: WeightsChannel, clock: Clock
) -> Iterator[None]:
    """Each turn: the gradient steps owed, then a new version of the weights."""
    while True:
        for batch, target in learner.batches(limiter.updates_owed()):
            learner.step(batch, target)
        channel.publish(clock.updates)
        yield
