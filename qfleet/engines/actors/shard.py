"""A part of the replay memory, in a process of its own. In: letters; out: samples.

It keeps one ring for each of its actors: rows of different actors come at different times, and a
ring needs those of an env in one piece. Every call answers with what there is to sample now.
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
from qfleet.engines.actors.messages import COLUMNS, Answer, Drawn, News, Tally
from qfleet.engines.actors.shares import Holding, ring_capacity
from qfleet.engines.cluster.state_arrays import as_arrays, as_tensors
from qfleet.engines.torch_settings import set_threads
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import PrioritizedSampler, UniformSampler
from qfleet.storage.segments import Segments


class _Kept:
    """A ring and what it expects next."""

    def __init__(self, config: Config, spec: EnvSpec, seed: int) -> None:
        host = torch.device("cpu")
        generator = torch.Generator().manual_seed(seed)
        capacity = ring_capacity(config)
        self.prioritized: PrioritizedSampler | None = None
        if config.prioritized_replay:
            self.prioritized = PrioritizedSampler(
                capacity // config.envs,
                config.envs,
                config.prioritized_replay_alpha,
                config.prioritized_replay_eps,
                host,
                generator,
            )
        self.ring = Ring(
            spec,
            config.envs,
            capacity,
            config.n_steps,
            config.gamma,
            self.prioritized or UniformSampler(generator),
            host,
            compression=config.replay_compression,
        )
        self.follows: tuple[int, int] | None = None
        """Life and number of the row that comes next; None where nothing is open."""
        self.starts = 0

    def insert(self, letter: BlockMessage) -> None:
        block = decode(letter)
        if self.follows is not None and self.follows != (letter.life, letter.start):
            self.ring.end_open_episodes()
        if self.follows != (letter.life, letter.start):
            block.flags[0] |= FIRST  # what lies behind is not of these episodes
        self.follows = (letter.life, letter.start + block.rows)
        self.ring.extend(block)
        self.starts = self.ring.starts()
        if letter.priority is not None and len(letter.priority):
            index = self.ring.newest_starts(len(letter.priority))
            # A ring that is younger than its actor has fewer rows than the actor knows.
            priority = np.array(letter.priority[len(letter.priority) - len(index) :])
            self.ring.update_priorities(index.view(-1), torch.from_numpy(priority).view(-1))

    def holding(self) -> Holding:
        if self.prioritized is None:
            return Holding(float(self.starts), 1.0, self.starts)
        mass, least = self.prioritized.mass()
        return Holding(mass, least, self.starts)

    def probability(self, index: torch.Tensor) -> NDArray[np.float64]:
        """Of each of these transitions, within the ring, right after they were drawn."""
        if self.prioritized is None:
            return np.full(len(index), 1.0 / self.starts)
        leaves = self.prioritized.leaves.index_select(0, index).double()
        found: NDArray[np.float64] = (leaves / self.prioritized.mass()[0]).numpy()
        return found


class ReplayShard:
    def __init__(self, config: Config, spec: EnvSpec, actors: Sequence[int], life: int = 0) -> None:
        """``actors``: whose rows it keeps; ``life``: how often it was replaced."""
        set_threads(1, spec)
        seed = Seeds.of(config.seed).memory
        self._tally = Tally()
        self._processor_s = time.process_time()
        self._kept = {
            actor: _Kept(config, spec, mix_seeds(mix_seeds(seed, actor), life)) for actor in actors
        }

    def insert(self, letter: BlockMessage) -> Answer:
        """Rows of one actor, after those that came before."""
        self._kept[letter.actor].insert(letter)
        self._count(env_steps=letter.action.size, bytes_in=letter.nbytes)
        return self._answer()

    def exchange(self, news: Sequence[News], wanted: Mapping[int, int]) -> Drawn:
        """Take over new priorities, then draw so many samples from the ring of each actor."""
        for entry in news:
            # Copies: what comes from another process may be read-only.
            self._kept[entry.actor].ring.update_priorities(
                torch.from_numpy(np.array(entry.index)), torch.from_numpy(np.array(entry.priority))
            )
        batches, numbers, probabilities = [], [], []
        for actor, count in wanted.items():
            kept = self._kept[actor]
            if kept.ring.can_sample():
                batch = kept.ring.sample(count, 0.0)
                batches.append(batch)
                numbers.append(np.full(count, actor))
                probabilities.append(kept.probability(batch.index))
        columns: tuple[NDArray[Any], ...] = ()
        index = torch.zeros(0, dtype=torch.int64)
        if batches:
            columns = tuple(
                torch.cat([getattr(batch, name) for batch in batches]).numpy() for name in COLUMNS
            )
            index = torch.cat([batch.index for batch in batches])
        drawn = Drawn(
            holdings=self._holdings(),
            tally=self._tally,
            columns=columns,
            index=index.numpy(),
            actor=np.concatenate([np.zeros(0, np.int64), *numbers]),
            probability=np.concatenate([np.zeros(0), *probabilities]),
        )
        told = sum(entry.nbytes for entry in news)
        self._count(samples=len(index), bytes_in=told, bytes_out=drawn.nbytes)
        return dataclasses.replace(drawn, tally=self._tally)

    def end_open_episodes(self) -> Answer:
        for kept in self._kept.values():
            kept.ring.end_open_episodes()
            kept.follows = None
        return self._answer()

    # --- checkpoints --------------------------------------------------------------------------

    def describe(self, actor: int) -> tuple[StateDict, list[int]]:
        """A ring's state but for its frames; and versions of the pieces that these come in."""
        state = self._kept[actor].ring.state_dict()
        pieces: Segments = state.pop("frames")
        return as_arrays(state), pieces.versions

    def frames(self, actor: int, piece: int) -> NDArray[Any]:
        """One piece of a ring's frames."""
        pieces: Segments = self._kept[actor].ring.state_dict()["frames"]
        found: NDArray[Any] = pieces.tensors[piece].numpy()
        return found

    def restore(self, actor: int, state: StateDict) -> Answer:
        """A ring's state but for its frames."""
        kept = self._kept[actor]
        kept.ring.load_state_dict({**as_tensors(state), "frames": Segments([], [])})
        kept.starts = kept.ring.starts()
        kept.follows = None
        return self._answer()

    def restore_frames(self, actor: int, row: int, frames: NDArray[Any]) -> Answer:
        self._kept[actor].ring.write_frames(row, torch.from_numpy(np.array(frames)))
        return self._answer()

    def _answer(self) -> Answer:
        return Answer(self._holdings(), self._tally)

    def _count(self, **more: int) -> None:
        """So much has been done; the processor's time is brought up to now."""
        counts = {name: getattr(self._tally, name) + count for name, count in more.items()}
        spent_s = time.process_time() - self._processor_s
        self._tally = self._tally._replace(**counts, processor_s=spent_s)

    def _holdings(self) -> dict[int, Holding]:
        return {actor: kept.holding() for actor, kept in self._kept.items()}
