"""The loop, written once: *collect* and *learn*, gated by one RateLimiter.

Engines decide what advances these two generators and where; this module does not know.
"""

from __future__ import annotations

from collections.abc import Iterator

from qfleet.agent.learner import Learner
from qfleet.agent.schedules import next_rows
from qfleet.config.config import Config
from qfleet.core.types import Clock, Collector, Lag, Memory, WeightsChannel
from qfleet.telemetry.timers import Timers


class RateLimiter:
    """Holds the replay ratio: ``gradient_steps`` updates per ``train_freq`` env steps.

    ``replay_slack`` is the width of the band: by how many updates collecting may run ahead.
    """

    def __init__(self, config: Config, clock: Clock, memory: Memory) -> None:
        self._config, self._clock, self._memory = config, clock, memory
        self.envs = config.envs
        """Environments per agent."""
        self.since = (config.learning_starts, 0)
        """Env steps and updates at which counting the ratio starts."""

    def updates_owed(self) -> int:
        env_steps, updates = self.since
        learnable = self._clock.env_steps - env_steps
        if learnable <= 0:
            return 0
        bursts = learnable // self._config.train_freq
        return bursts * self._config.gradient_steps - (self._clock.updates - updates)

    def forgive(self, updates: int) -> None:
        """Owe this many updates less, as if they had been made."""
        self.since = (self.since[0], self.since[1] - updates)

    def set_train_freq(self, train_freq: int) -> None:
        """Change the number of env steps between bursts, from the last burst on."""
        bursts, rest = divmod(self._clock.updates - self.since[1], self._config.gradient_steps)
        self.since = (self.since[0] + bursts * self._config.train_freq, self._clock.updates - rest)
        self._config = self._config.replace(train_freq=train_freq)

    def may_collect(self) -> bool:
        return self.updates_owed() <= self._config.replay_slack or not self._memory.can_sample()

    def next_rows(self) -> int:
        """Return the rows of the next block; 0 once the run is complete."""
        return next_rows(self._config, self._clock.env_steps)


class SameWeights:
    """The weights channel of engines whose actor and learner share one network."""

    def __init__(self) -> None:
        self._version = 0
        self.lag = Lag()

    def publish(self, version: int) -> None:
        self._version = version

    def restart(self, version: int) -> None:
        self._version = version

    def refresh(self) -> int:
        return self._version


def collect(
    collector: Collector,
    memory: Memory,
    channel: WeightsChannel,
    limiter: RateLimiter,
    clock: Clock,
    timers: Timers,
) -> Iterator[None]:
    """Each turn: move one block from the environments into the memory."""
    copying = timers.span("copy")
    while True:
        block = collector.collect(limiter.next_rows())
        channel.lag.record(clock.updates - block.version)
        with copying:
            memory.extend(block)
        clock.env_steps += block.rows * limiter.envs
        yield


def learn(
    learner: Learner, limiter: RateLimiter, channel: WeightsChannel, clock: Clock
) -> Iterator[None]:
    """Each turn: take the gradient steps owed, then publish a new version of the weights."""
    while True:
        learner.learn(limiter.updates_owed())
        channel.publish(clock.updates)
        yield
