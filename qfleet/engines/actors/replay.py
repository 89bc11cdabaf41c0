"""The shards of the replay memory as one ``Memory``. In: references of blocks; out: batches.

The next samples are drawn while the learner learns from the last ones, so their priorities are up
to two bursts of updates old. A shard that dies is replaced by an empty one; the others are sampled
meanwhile.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.config.config import Config
from qfleet.core.errors import (
    CheckpointError,
    ClusterError,
    ClusterLost,
    MemberLost,
    QfleetError,
    ValueLost,
)
from qfleet.core.types import Batch, Block, EnvSpec, StateDict
from qfleet.engines.actors.account import Account
from qfleet.engines.actors.messages import COLUMNS, PriorityUpdate, SampleReply
from qfleet.engines.actors.shard import ReplayShard
from qfleet.engines.actors.shares import Holding, allot, relative_rarity, ring_slots, shares_of
from qfleet.engines.cluster.member_pool import Member, MemberPool
from qfleet.engines.cluster.ray_cluster import Cluster
from qfleet.engines.cluster.state_arrays import as_arrays, as_tensors
from qfleet.storage.segments import LazyPieces, Segments
from qfleet.telemetry.faults import FaultLog

PREFETCHED = 2
"""Requests in flight while the learner learns: the next one, and the one after it."""
BLOCKS_PER_ACTOR = 2
"""Blocks of an actor in flight to its shard; with more, collecting waits for the shard."""
ROWS_OF_A_LIFE = 2**40
"""More rows than a ring ever takes: rows of different lives have different numbers."""
WHOLE = "whole"
"""Name of the only ring of a checkpoint whose replay memory was in the learner's process."""

Samples = list[NDArray[Any]]
"""Arrays of samples that have arrived: those of ``COLUMNS``, index and relative rarity."""


class NothingToSample(QfleetError):
    """All transitions were lost with their shards: more have to be collected first."""


@dataclass
class RemoteBlock(Block):
    """A block whose contents are in another process: here it only has shapes."""

    actor: int = 0
    message: Any = None
    """Reference of the ``BlockMessage``, which the actor sends to its shard directly."""

    @classmethod
    def of(
        cls, spec: EnvSpec, rows: int, envs: int, version: int, actor: int, message: Any
    ) -> RemoteBlock:
        def shaped(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((rows, envs, *shape), dtype=dtype, device="meta")

        return cls(
            obs=shaped(spec.torch_dtype, *spec.frame_shape),
            action=shaped(torch.int64),
            reward=shaped(torch.float32),
            flags=shaped(torch.uint8),
            version=version,
            actor=actor,
            message=message,
        )


def check_actors(state: StateDict, workers: int) -> None:
    """Raise CheckpointError if a stored memory is that of another number of actors."""
    if (theirs := state["actors"]) != workers:
        raise CheckpointError(
            f"the stored replay memory is of {theirs} actors, not of {workers}; resume with "
            f"--workers {theirs}"
        )


@dataclass
class _Request:
    """A request for samples of several shards."""

    shares: dict[int, float]
    parts: list[SampleReply] = field(default_factory=list)
    """Answers of shards that hold samples."""


@dataclass
class _Shard(Member):
    actors: list[int] = field(default_factory=list)
    calls: deque[tuple[Any, _Request | None]] = field(default_factory=deque)
    """References of calls, in the order of the calls, which is that of the answers."""
    holdings: dict[int, Holding] = field(default_factory=dict)


class ShardedReplay:
    """The replay memory of the actors engine, on the learner's side."""

    def __init__(
        self,
        cluster: Cluster,
        config: Config,
        spec: EnvSpec,
        faults: FaultLog,
        account: Account,
        seed: int,
    ) -> None:
        self.device = torch.device("cpu")
        self._cluster, self._config, self._spec = cluster, config, spec
        self._faults, self._account = faults, account
        self._random = np.random.default_rng(seed)
        self._slots = ring_slots(config)
        self._requests: deque[_Request] = deque()
        self._samples: deque[Samples] = deque()
        self._updates: list[PriorityUpdate] = []
        # With fewer, after a loss, each transition would be sampled many times.
        self._least = max(1, min(config.learning_starts, config.buffer_size) // 2)
        self._shards = [
            _Shard(number, actors=list(range(number, config.workers, config.servers)))
            for number in range(config.servers)
        ]
        self._pool = MemberPool(
            cluster,
            "replay shard",
            lambda shard: cluster.spawn(ReplayShard, config, spec, shard.actors, shard.life),
            self._shards,
            max_failures=config.max_env_restarts,
            advice="is there memory for --buffer-size?",
        )

    # --- in -----------------------------------------------------------------------------------

    def extend(self, block: Block) -> None:
        """Send a block to the shard of its actor; do not wait until it arrives."""
        assert isinstance(block, RemoteBlock), "actors send their blocks themselves"
        if block.rows:
            shard = self._shards[block.actor % len(self._shards)]
            self._call(shard, shard.handle.insert.remote(block.message))
            while len(shard.calls) > BLOCKS_PER_ACTOR * len(shard.actors) + PREFETCHED:
                self._take_answer(shard)
        self._take_ready_answers()

    def end_open_episodes(self) -> None:
        for shard in self._shards:
            self._call(shard, shard.handle.end_open_episodes.remote())

    # --- out ----------------------------------------------------------------------------------

    def can_sample(self) -> bool:
        """Return whether there are at least half of the transitions at which learning starts."""
        self._take_ready_answers()
        return sum(held.starts for held in self.holdings().values()) >= self._least

    def holdings(self) -> dict[int, Holding]:
        """Return what there was to sample of each actor in the last answer of its shard."""
        return {ring: held for shard in self._shards for ring, held in shard.holdings.items()}

    def sample(self, count: int, beta: float | Tensor) -> Batch:
        while sum(len(samples[0]) for samples in self._samples) < count:
            if not self._requests:
                self._request(count)
            self._await(self._requests.popleft())
        batch = self._take(count, float(beta))
        while len(self._requests) < PREFETCHED:
            self._request(count)
        return batch

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Keep new priorities; they travel with the next request for samples."""
        if not self._config.prioritized_replay:
            return
        found = priority.detach().float().cpu().numpy()
        ring, slot = np.divmod(index.cpu().numpy(), self._slots)
        for number in np.unique(ring).tolist():
            own = ring == number
            self._updates.append(PriorityUpdate(number, slot[own], found[own]))

    def _request(self, count: int) -> None:
        """Request ``count`` samples, of each shard its share, and send new priorities along."""
        shares = shares_of(self.holdings())
        if not shares:
            raise NothingToSample("the replay memory was lost with its shards")
        wanted = allot(count, shares, self._random)
        request = _Request(shares)
        updates, self._updates = self._updates, []
        for shard in self._shards:
            own = {ring: wanted[ring] for ring in shard.actors if ring in wanted}
            sent = [update for update in updates if update.actor in shard.actors]
            if own or sent:
                self._account.bytes_sent += sum(update.nbytes for update in sent)
                self._call(shard, shard.handle.exchange.remote(sent, own), request)
        self._requests.append(request)

    def _await(self, request: _Request) -> None:
        """Wait until all shards have answered a request or are lost; keep its samples."""
        while waiting := [s for s in self._shards if any(r is request for _, r in s.calls)]:
            for shard in waiting:
                self._take_answer(shard)
        if request.parts:
            self._samples.append(self._join(request.parts, request.shares))

    def _join(self, parts: Sequence[SampleReply], shares: dict[int, float]) -> Samples:
        """Shuffle the shards' samples: every batch of a burst must be a sample of all shards."""
        total = sum(len(part.index) for part in parts)
        places = np.split(
            self._random.permutation(total), np.cumsum([len(part.index) for part in parts])[:-1]
        )

        def gathered(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
            joined = np.empty((total, *arrays[0].shape[1:]), dtype=arrays[0].dtype)
            for place, array in zip(places, arrays, strict=True):
                joined[place] = array
            return joined

        holdings = self.holdings()
        for part in parts:
            holdings |= part.holdings
        ring = gathered([part.actor for part in parts])
        index = gathered([part.index for part in parts])
        probability = gathered([part.probability for part in parts])
        rarity = np.ones(total)
        if self._config.prioritized_replay:
            rarity = relative_rarity(probability, ring, shares, holdings)
        columns = zip(*(part.columns for part in parts), strict=True)
        return [*map(gathered, columns), ring * self._slots + index, rarity]

    def _take(self, count: int, beta: float) -> Batch:
        taken: list[Samples] = []
        while count:
            samples = self._samples.popleft()
            if len(samples[0]) > count:
                self._samples.appendleft([array[count:] for array in samples])
                samples = [array[:count] for array in samples]
            taken.append(samples)
            count -= len(samples[0])
        *columns, index, rarity = (
            torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
            for arrays in zip(*taken, strict=True)
        )
        weight = rarity.pow(beta).float()
        return Batch(**dict(zip(COLUMNS, columns, strict=True)), weight=weight, index=index)

    # --- calls and losses -----------------------------------------------------------------------

    def _call(self, shard: _Shard, reference: Any, request: _Request | None = None) -> None:
        shard.calls.append((reference, request))
        self._account.messages += 1

    def _take_ready_answers(self) -> None:
        for shard in self._shards:
            while shard.calls and self._cluster.ready([shard.calls[0][0]], 0.0):
                self._take_answer(shard)

    def _take_answer(self, shard: _Shard) -> None:
        """Wait for the next answer of a shard; replace a shard that is lost or silent."""
        reference, request = shard.calls[0]
        wait_s = self._config.worker_timeout_s + shard.grace_s
        try:
            answer = self._pool.get(shard, reference, wait_s)
        except MemberLost as error:
            self._lose(shard, str(error))
            return
        except ValueLost as error:
            # A block. The shard sees from the next one that rows are missing, and ends episodes.
            shard.calls.popleft()
            self._faults("letter", str(error))
            return
        shard.calls.popleft()
        shard.failures, shard.is_ready = 0, True
        shard.holdings = answer.holdings
        self._account.set_tally(shard.number, answer.tally)
        if request is not None:
            assert isinstance(answer, SampleReply)
            self._account.bytes_received += answer.nbytes
            if len(answer.index):
                request.parts.append(answer)

    def _lose(self, shard: _Shard, loss: str) -> None:
        """Replace a shard by an empty one, and go on without what it held."""
        self._pool.count_failure(shard, loss)
        lost = sum(held.starts for held in shard.holdings.values())
        total = sum(held.starts for held in self.holdings().values())
        self._faults("replay_shard", f"{loss}: {lost} of {total} transitions lost, refilling")
        self._account.add_loss(shard.number, lost)
        shard.calls.clear()
        shard.holdings = {}
        self._pool.replace(shard)

    # --- the rest of a memory -------------------------------------------------------------------

    def generators(self) -> list[torch.Generator]:
        """Return an empty list: the generators are in the shards."""
        return []

    def compilables(self) -> list[Compilable]:
        return []

    def close(self) -> None:
        """Do nothing: the shards end with their cluster."""

    def state_dict(self) -> StateDict:
        """Return all rings by actor, of all shards; frames are fetched when they are read.

        There are none if the cluster is lost: the run is resumed with an empty memory.
        """
        rings: StateDict = {}
        if self._cluster.is_lost:
            return {"actors": self._config.workers, "rings": rings}
        for shard in self._shards:
            for actor in shard.actors:
                state, newest_rows = self._fetch(shard, shard.handle.describe.remote(actor))
                read = functools.partial(self._read_frames, shard, actor)
                # The successor of a lost shard counts rows from 0 again: they are other rows.
                versions = [row + shard.life * ROWS_OF_A_LIFE for row in newest_rows]
                rings[str(actor)] = {
                    **as_tensors(state),
                    "frames": Segments(LazyPieces(len(versions), read), versions),
                    "life": shard.life,
                }
        return {"actors": self._config.workers, "rings": rings}

    def _read_frames(self, shard: _Shard, actor: int, piece: int) -> Tensor:
        frames = self._fetch(shard, shard.handle.frames.remote(actor, piece))
        return torch.from_numpy(np.array(frames))

    def _fetch(self, shard: _Shard, reference: Any) -> Any:
        try:
            return self._pool.get(shard, reference)
        except ClusterLost:
            raise  # the run ends, with a checkpoint of what is left
        except ClusterError as error:
            raise CheckpointError(f"the replay memory cannot be saved: {error}") from None

    def load_state_dict(self, state: StateDict) -> None:
        if WHOLE in state["rings"]:
            raise CheckpointError(
                "the stored replay memory is in one piece; resume with --servers 0"
            )
        check_actors(state, self._config.workers)
        for shard in self._shards:
            for actor in shard.actors if state["rings"] else ():
                self._restore(shard, actor, dict(state["rings"][str(actor)]))

    def _restore(self, shard: _Shard, actor: int, state: StateDict) -> None:
        pieces: Segments = state.pop("frames")
        shard.life = max(shard.life, state.pop("life", 0))  # older checkpoints have none
        restored = shard.handle.restore.remote(actor, as_arrays(state))
        shard.holdings = self._pool.get(shard, restored).holdings
        row = 0
        for piece in pieces.tensors:
            self._pool.get(shard, shard.handle.restore_frames.remote(actor, row, piece.numpy()))
            row += len(piece)
