"""A part of the replay memory, in a process of its own. In: block messages; out: samples.

It keeps one ring for each of its actors: blocks of different actors arrive at different times, and
a ring needs consecutive rows of an env. Every reply says what there is to sample now.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.seeding import Seeds, mix_seeds
from qfleet.core.types import FIRST, EnvSpec, StateDict
from qfleet.engines.actors.block_messages import BlockMessage, decode
from qfleet.engines.actors.messages import (
    COLUMNS,
    PriorityUpdate,
    SampleReply,
    ShardReply,
    Tally,
)
from qfleet.engines.actors.shares import Holding, ring_capacity
from qfleet.engines.cluster.state_arrays import as_arrays, as_tensors
from qfleet.engines.factories import make_sampler
from qfleet.engines.torch_settings import set_threads
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import UniformSampler
from qfleet.storage.segments import Segments


class _ActorRing:
    """The ring of one actor, and the row that it expects next."""

    def __init__(self, config: Config, spec: EnvSpec, seed: int) -> None:
        host, capacity = torch.device("cpu"), ring_capacity(config)
        self.sampler = make_sampler(config, capacity, host, seed)
        self.ring = Ring(
            spec,
            config.envs,
            capacity,
            config.n_steps,
            config.gamma,
            self.sampler,
            host,
            compression=config.replay_compression,
        )
        self.follows: tuple[int, int] | None = None
        """Life and number of the next row; None if no episode is open."""
        self.starts = 0

    def insert(self, message: BlockMessage) -> None:
        block = decode(message)
        if self.follows != (message.life, message.start):
            if self.follows is not None:
                self.ring.end_open_episodes()
            block.flags[0] |= FIRST  # the rows before it are of other episodes
        self.follows = (message.life, message.start + block.rows)
        self.ring.extend(block)
        self.starts = self.ring.starts()
        if message.priority is not None and len(message.priority):
            index = self.ring.newest_starts(len(message.priority))
            # A ring that is younger than its actor has fewer rows than the actor knows.
            priority = np.array(message.priority[len(message.priority) - len(index) :])
            self.ring.update_priorities(index.view(-1), torch.from_numpy(priority).view(-1))

    def holding(self) -> Holding:
        if isinstance(self.sampler, UniformSampler):
            return Holding(float(self.starts), 1.0, self.starts)
        return Holding(*self.sampler.mass(), self.starts)

    def probability(self, index: torch.Tensor) -> NDArray[np.float64]:
        """Return the probability of each transition within the ring, right after the draw."""
        if isinstance(self.sampler, UniformSampler):
            return np.full(len(index), 1.0 / self.starts)
        leaves = self.sampler.leaves.index_select(0, index).double()
        found: NDArray[np.float64] = (leaves / self.sampler.mass()[0]).numpy()
        return found


class ReplayShard:
    def __init__(self, config: Config, spec: EnvSpec, actors: Sequence[int], life: int = 0) -> None:
        """Keep the rows of ``actors``; ``life``: how often the shard was replaced."""
        set_threads(1, spec)
        seed = Seeds.of(config.seed).memory
        self._tally = Tally()
        self._processor_s = time.process_time()
        self._rings = {
            actor: _ActorRing(config, spec, mix_seeds(mix_seeds(seed, actor), life))
            for actor in actors
        }

    def insert(self, message: BlockMessage) -> ShardReply:
        """Append a block to the ring of its actor."""
        self._rings[message.actor].insert(message)
        self._count(env_steps=message.action.size, bytes_in=message.nbytes)
        return self._reply()

    def exchange(self, updates: Sequence[PriorityUpdate], wanted: Mapping[int, int]) -> SampleReply:
        """Update priorities, then draw ``wanted[actor]`` samples from the ring of each actor."""
        for update in updates:
            # Copies: arrays of another process may be read-only.
            self._rings[update.actor].ring.update_priorities(
                torch.from_numpy(np.array(update.index)),
                torch.from_numpy(np.array(update.priority)),
            )
        able = {actor: n for actor, n in wanted.items() if self._rings[actor].ring.can_sample()}
        batches = {actor: self._rings[actor].ring.sample(n, 0.0) for actor, n in able.items()}

        def joined(name: str) -> NDArray[Any]:
            array: NDArray[Any] = torch.cat([getattr(b, name) for b in batches.values()]).numpy()
            return array

        reply = SampleReply(
            holdings=self._reply().holdings,
            tally=self._tally,
            columns=tuple(map(joined, COLUMNS)) if batches else (),
            index=joined("index") if batches else np.zeros(0, np.int64),
            actor=np.concatenate([np.zeros(0, np.int64), *map(np.full, able.values(), able)]),
            probability=np.concatenate(
                [np.zeros(0), *(self._rings[a].probability(b.index) for a, b in batches.items())]
            ),
        )
        received = sum(update.nbytes for update in updates)
        self._count(samples=len(reply.index), bytes_in=received, bytes_out=reply.nbytes)
        return dataclasses.replace(reply, tally=self._tally)

    def end_open_episodes(self) -> ShardReply:
        for kept in self._rings.values():
            kept.ring.end_open_episodes()
            kept.follows = None
        return self._reply()

    # --- checkpoints --------------------------------------------------------------------------

    def describe(self, actor: int) -> tuple[StateDict, list[int]]:
        """Return a ring's state without its frames, and the version of each piece of frames."""
        state = self._rings[actor].ring.state_dict()
        pieces: Segments = state.pop("frames")
        return as_arrays(state), pieces.versions

    def frames(self, actor: int, piece: int) -> NDArray[Any]:
        """Return one piece of a ring's frames."""
        pieces: Segments = self._rings[actor].ring.state_dict()["frames"]
        found: NDArray[Any] = pieces.tensors[piece].numpy()
        return found

    def restore(self, actor: int, state: StateDict) -> ShardReply:
        """Restore a ring's state without its frames."""
        kept = self._rings[actor]
        kept.ring.load_state_dict({**as_tensors(state), "frames": Segments([], [])})
        kept.starts = kept.ring.starts()
        kept.follows = None
        return self._reply()

    def restore_frames(self, actor: int, row: int, frames: NDArray[Any]) -> ShardReply:
        self._rings[actor].ring.write_frames(row, torch.from_numpy(np.array(frames)))
        return self._reply()

    def _reply(self) -> ShardReply:
        holdings = {actor: kept.holding() for actor, kept in self._rings.items()}
        return ShardReply(holdings, self._tally)

    def _count(self, **more: int) -> None:
        """Add to the tally, and update its processor time."""
        counts = {name: getattr(self._tally, name) + count for name, count in more.items()}
        spent_s = time.process_time() - self._processor_s
        self._tally = self._tally._replace(**counts, processor_s=spent_s)
