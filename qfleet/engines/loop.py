"""The loop, written once: *collect* and *learn*, gated by one RateLimiter.

Engines decide who advances these two generators and where; nothing in here knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from qfleet.agent.learner import Learner
from qfleet.agent.schedules import next_rows
from qfleet.config.config import Config
from qfleet.core.types import Clock, Collector, Memory, WeightsChannel
from qfleet.telemetry.timers import Timers


class RateLimiter:
    """Holds the replay ratio: ``gradient_steps`` updates per ``train_freq`` env steps.

    ``replay_slack`` is the width of the band: how many owed updates collecting may run ahead.
    """

    def __init__(self, config: Config, clock: Clock, memory: Memory) -> None:
        self._config, self._clock, self._memory = config, clock, memory
        self._train_freq = config.train_freq
        self._since = (config.learning_starts, 0)
        """Env steps and updates from which on the ratio is counted."""

    def updates_owed(self) -> int:
        env_steps, updates = self._since
        learnable = self._clock.env_steps - env_steps
        if learnable <= 0:
            return 0
        bursts = learnable // self._train_freq
        return bursts * self._config.gradient_steps - (self._clock.updates - updates)

    def forgive(self, updates: int) -> None:
        """So many fewer are owed, as if they had been made."""
        env_steps, made = self._since
        self._since = (env_steps, made - updates)

    def set_train_freq(self, train_freq: int) -> None:
        """Another number of steps between bursts from now on; what is owed stays owed."""
        if train_freq == self._train_freq:
            return
        if self._clock.env_steps > self._config.learning_starts:
            owed = self.updates_owed()
            self._since = (self._clock.env_steps, self._clock.updates - owed)
        self._train_freq = train_freq

    def may_collect(self) -> bool:
        return self.updates_owed() <= self._config.replay_slack or not self._memory.can_sample()


def collect(
    collector: Collector,
    memory: Memory,
    channel: WeightsChannel,
    config: Config,
    clock: Clock,
    timers: Timers,
) -> Iterator[None]:
    """Each turn: one block from the environments into the memory."""
    copying = timers.span("copy")
    while True:
        block = collector.collect(next_rows(config, clock.env_steps))
        channel.record_lag(clock.updates - block.version)
        with copying:
            memory.extend(block)
        clock.env_steps += block.rows * config.envs
        yield


def learn(
    learner: Learner, limiter: RateLimiter, channel: WeightsChannel, clock: Clock
) -> Iterator[None]:
    """Each turn: the gradient steps owed, then a new version of the weights."""
    while True:
        learner.learn(limiter.updates_owed())
        channel.publish(clock.updates)
        yield
