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
            "env_steps_each": steps,
            "actors_replaced": self.actors_replaced,
            "shards_replaced": self.shards_replaced,
            "transitions_lost": self.transitions_lost,
            "letter_bytes": self.letter_bytes,
            "broadcasts": self.broadcasts,
            "actor_seconds": {stage: s for stage, s in self.actor_seconds.items() if s > 0},
        }
