"""What many processes did and cost: counted by the learner's side, for ``result.json``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Account:
    """Bytes are those of arrays as they passed; what wraps them is not counted."""

    workers: int
    servers: int
    bytes_sent: int = 0
    """By the learner: weights, once for all actors, and priorities."""
    bytes_received: int = 0
    """By the learner: samples."""
    letter_bytes: int = 0
    """From actors to shards; they do not pass through the learner."""
    messages: int = 0
    """Calls of actors and shards, and weights that were stored."""
    broadcasts: int = 0
    actors_replaced: int = 0
    shards_replaced: int = 0
    transitions_lost: int = 0
    env_steps: Counter[int] = field(default_factory=Counter)
    """Of each actor, as far as they have entered the memory."""
    actor_seconds: Counter[str] = field(default_factory=Counter)
    """Of all actors together, by stage."""
    _steady: tuple[float, int] | None = None
    """When every actor had sent a block: time, and env steps by then."""
    _newest_s: float = 0.0

    def took(self, actor: int, env_steps: int, now_s: float) -> None:
        """A block of so many env steps has come."""
        self.env_steps[actor] += env_steps
        self._newest_s = now_s
        if self._steady is None and len(self.env_steps) == self.workers:
            self._steady = (now_s, self.env_steps.total())

    def env_steps_per_s(self) -> float | None:
        """From when every actor had sent a block to the newest one; starting them is not in it."""
        if self._steady is None or self._newest_s <= self._steady[0]:
            return None
        since_s, before = self._steady
        return (self.env_steps.total() - before) / (self._newest_s - since_s)

    def sent(self, size_bytes: int) -> None:
        self.bytes_sent += size_bytes

    def received(self, size_bytes: int) -> None:
        self.bytes_received += size_bytes

    def communication(self) -> dict[str, int | None]:
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "messages": self.messages,
        }

    def as_dict(self) -> dict[str, Any]:
        steps = [self.env_steps[actor] for actor in range(self.workers)]
        return {
            "workers": self.workers,
            "servers": self.servers,
            "env_steps": sum(steps),
            "env_steps_each": steps,
            "env_steps_per_s": self.env_steps_per_s(),
            "actors_replaced": self.actors_replaced,
            "shards_replaced": self.shards_replaced,
            "transitions_lost": self.transitions_lost,
            "letter_bytes": self.letter_bytes,
            "broadcasts": self.broadcasts,
            "actor_seconds": {stage: s for stage, s in self.actor_seconds.items() if s > 0},
        }
