"""The shards of the replay memory as one ``Memory``. In: letters, wherever they are; out: batches.

The next samples are drawn while the learner learns from the last ones, so their priorities are up
to two bursts of updates old. A shard that dies is replaced by an empty one; the others are sampled
meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError, ClusterError, MemberLost, QfleetError, ValueLost
from qfleet.core.types import Batch, Block, EnvSpec, StateDict
from qfleet.engines.actors.account import Account
from qfleet.engines.actors.messages import COLUMNS, Drawn, News
from qfleet.engines.actors.shares import Holding, allot, relative_rarity, ring_slots, shares_of
from qfleet.engines.cluster.ray_cluster import RUN_AGAIN, TIMEOUT_S, Cluster
from qfleet.engines.cluster.state_arrays import as_arrays, as_tensors
from qfleet.storage.segments import Segments
from qfleet.telemetry.faults import FaultLog

PREFETCHED = 2
"""Draws under way while the learner learns: one to take up next, one behind it."""
LETTERS_PER_ACTOR = 2
"""Letters of an actor on their way to its shard; with more, collecting waits for the shard."""
ROWS_OF_A_LIFE = 2**40
"""More than a ring ever takes: rows of different lives have different numbers."""


class NothingToSample(QfleetError):
    """All that could be sampled was lost with its shards: more has to be collected first."""


@dataclass
class FarBlock(Block):
    """A block whose contents are elsewhere: here they are shapes alone (``meta`` tensors)."""

    actor: int = 0
    letter: Any = None
    """Reference of the ``BlockMessage``, which travels from the actor to its shard directly."""

    @classmethod
    def of(
        cls, spec: EnvSpec, rows: int, envs: int, version: int, actor: int, letter: Any
    ) -> FarBlock:
        nowhere = torch.device("meta")
        return cls(
            obs=torch.empty(
                (rows, envs, *spec.frame_shape), dtype=spec.torch_dtype, device=nowhere
            ),
            action=torch.empty((rows, envs), dtype=torch.int64, device=nowhere),
            reward=torch.empty((rows, envs), device=nowhere),
            flags=torch.empty((rows, envs), dtype=torch.uint8, device=nowhere),
            version=version,
            actor=actor,
            letter=letter,
        )


@dataclass
class _Request:
    """Samples that were asked for, of several shards."""

    shares: dict[int, float]
    waiting: int = 0
    """Shards that have not answered yet."""
    parts: list[Drawn] = field(default_factory=list)


@dataclass
class _Call:
    reference: Any
    request: _Request | None = None


@dataclass
class _Shard:
    number: int
    actors: list[int]
    handle: Any
    life: int = 0
    """How often it was replaced, since the run began."""
    calls: deque[_Call] = field(default_factory=deque)
    """In the order in which they were made, which is the order in which they are answered."""
    holdings: dict[int, Holding] = field(default_factory=dict)
    is_there: bool = False
    """It has answered: a node had room for it, and it has started."""
    failures: int = 0
    """Times in a row that it was lost without having answered."""


@dataclass
class _Samples:
    """Samples that are there and not yet taken."""

    columns: tuple[NDArray[Any], ...]
    index: NDArray[np.int64]
    rarity: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.index)

    def cut(self, count: int) -> tuple[_Samples, _Samples]:
        """The first ``count``, and the rest."""
        first = tuple(column[:count] for column in self.columns)
        rest = tuple(column[count:] for column in self.columns)
        return (
            _Samples(first, self.index[:count], self.rarity[:count]),
            _Samples(rest, self.index[count:], self.rarity[count:]),
        )


class ShardedReplay:
    def __init__(
        self,
        cluster: Cluster,
        config: Config,
        spec: EnvSpec,
        faults: FaultLog,
        account: Account,
        seed: int,
        spawn: Callable[[list[int], int], Any],
    ) -> None:
        """``spawn`` starts the shard of these actors, with this life number."""
        self.device = torch.device("cpu")
        self._cluster, self._config, self._spec = cluster, config, spec
        self._faults, self._account = faults, account
        self._random = np.random.default_rng(seed)
        self._slots = ring_slots(config)
        self._requests: deque[_Request] = deque()
        self._samples: deque[_Samples] = deque()
        self._news: list[News] = []
        # With less, after a loss, few transitions would be learnt from many times over.
        self._least = max(1, min(config.learning_starts, config.buffer_size) // 2)
        self._shards = [
            _Shard(number, list(range(number, config.workers, config.servers)), None)
            for number in range(config.servers)
        ]
        self._spawn = spawn
        for shard in self._shards:
            shard.handle = spawn(shard.actors, shard.life)

    # --- in -----------------------------------------------------------------------------------

    def extend(self, block: Block) -> None:
        """Send a block's letter to the shard of its actor, without waiting for it to arrive."""
        assert isinstance(block, FarBlock), "actors send their blocks themselves"
        if block.rows:
            shard = self._shards[block.actor % len(self._shards)]
            self._call(shard, shard.handle.insert.remote(block.letter))
            while len(shard.calls) > LETTERS_PER_ACTOR * len(shard.actors) + PREFETCHED:
                self._hear(shard)
        self._hear_all()

    def end_open_episodes(self) -> None:
        for shard in self._shards:
            self._call(shard, shard.handle.end_open_episodes.remote())

    # --- out ----------------------------------------------------------------------------------

    def can_sample(self) -> bool:
        """Whether there is enough to learn from: half of what a run begins to learn with."""
        self._hear_all()
        return sum(held.starts for held in self.holdings().values()) >= self._least

    def holdings(self) -> dict[int, Holding]:
        """What there was to sample of each actor when its shard was last heard of."""
        return {ring: held for shard in self._shards for ring, held in shard.holdings.items()}

    def sample(self, count: int, beta: float | Tensor) -> Batch:
        there = sum(map(len, self._samples))
        while there < count:
            if not self._requests:
                self._request(count)
            arrived = self._arrived(self._requests.popleft())
            if arrived is not None:
                self._samples.append(arrived)
                there += len(arrived)
        batch = self._take(count, float(beta))
        while len(self._requests) < PREFETCHED:
            self._request(count)
        return batch

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Priorities travel with the next request for samples."""
        if not self._config.prioritized_replay:
            return
        flat = index.cpu().numpy()
        found = priority.detach().float().cpu().numpy()
        ring = flat // self._slots
        for number in np.unique(ring).tolist():
            of_it = ring == number
            self._news.append(News(number, flat[of_it] % self._slots, found[of_it]))

    def _request(self, count: int) -> None:
        """Ask the shards for ``count`` samples, each for its share, and tell them the news."""
        shares = shares_of(self.holdings())
        if not shares:
            raise NothingToSample("the replay memory was lost with its shards")
        wanted = allot(count, shares, self._random)
        request = _Request(shares)
        news, self._news = self._news, []
        for shard in self._shards:
            own = {ring: wanted[ring] for ring in shard.actors if ring in wanted}
            told = [entry for entry in news if entry.actor in shard.actors]
            if own or told:
                request.waiting += 1
                self._account.sent(sum(entry.nbytes for entry in told))
                self._call(shard, shard.handle.exchange.remote(told, own), request)
        self._requests.append(request)

    def _arrived(self, request: _Request) -> _Samples | None:
        """What has come of a request, once all shards have answered or are lost."""
        while request.waiting:
            for shard in self._shards:
                if any(call.request is request for call in shard.calls):
                    self._hear(shard)
        parts = [part for part in request.parts if len(part.index)]
        return self._join(parts, request.shares) if parts else None

    def _join(self, parts: Sequence[Drawn], shares: dict[int, float]) -> _Samples:
        """The shards' samples, shuffled: a burst is cut into batches, which must all be alike."""
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
        return _Samples(
            columns=tuple(
                gathered([part.columns[column] for part in parts]) for column in range(len(COLUMNS))
            ),
            index=ring * self._slots + index,
            rarity=relative_rarity(probability, ring, shares, holdings)
            if self._config.prioritized_replay
            else np.ones(total),
        )

    def _take(self, count: int, beta: float) -> Batch:
        taken: list[_Samples] = []
        while count:
            samples = self._samples.popleft()
            if len(samples) > count:
                samples, rest = samples.cut(count)
                self._samples.appendleft(rest)
            taken.append(samples)
            count -= len(samples)

        def whole(arrays: Sequence[NDArray[Any]]) -> Tensor:
            return torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

        columns = {
            name: whole([samples.columns[i] for samples in taken]) for i, name in enumerate(COLUMNS)
        }
        weight = whole([samples.rarity for samples in taken]).pow(beta).float()
        return Batch(**columns, weight=weight, index=whole([s.index for s in taken]))

    # --- calls and losses -----------------------------------------------------------------------

    def _call(self, shard: _Shard, reference: Any, request: _Request | None = None) -> None:
        shard.calls.append(_Call(reference, request))
        self._account.messages += 1

    def _hear_all(self) -> None:
        """Take note of all answers that are there."""
        for shard in self._shards:
            while shard.calls and self._cluster.ready([shard.calls[0].reference], 0.0):
                self._answer(shard)

    def _hear(self, shard: _Shard) -> None:
        """Wait for one answer of this shard."""
        wait_s = self._config.worker_timeout_s + (0.0 if shard.is_there else TIMEOUT_S)
        if self._cluster.ready([shard.calls[0].reference], wait_s):
            self._answer(shard)
        else:
            self._lose(shard, f"replay shard {shard.number} did not answer within {wait_s:g} s")

    def _answer(self, shard: _Shard) -> None:
        call = shard.calls.popleft()
        try:
            answer = self._cluster.get(call.reference, f"replay shard {shard.number}")
        except MemberLost as error:
            shard.calls.appendleft(call)
            self._lose(shard, str(error).removesuffix(RUN_AGAIN))
            return
        except ValueLost as error:
            # A letter. The shard sees from the next one that rows are missing, and cuts there.
            self._faults("letter", str(error))
            return
        shard.failures, shard.is_there = 0, True
        shard.holdings = answer.holdings
        self._account.heard(shard.number, answer.tally)
        if call.request is not None:
            assert isinstance(answer, Drawn)
            call.request.waiting -= 1
            call.request.parts.append(answer)
            self._account.received(answer.nbytes)

    def _lose(self, shard: _Shard, why: str) -> None:
        """Go on without what this shard had, and with an empty one in its place."""
        shard.failures += 1
        if shard.failures > self._config.max_env_restarts:
            raise ClusterError(
                f"{why}, {shard.failures} times in a row; is there memory for --buffer-size?"
            )
        lost = sum(held.starts for held in shard.holdings.values())
        there = sum(held.starts for held in self.holdings().values())
        self._faults("replay_shard", f"{why}: {lost} of {there} transitions lost, refilling")
        self._account.lost(shard.number, lost)
        for call in shard.calls:
            if call.request is not None:
                call.request.waiting -= 1
        shard.calls.clear()
        shard.holdings = {}
        self._cluster.stop(shard.handle)
        shard.life, shard.is_there = shard.life + 1, False
        shard.handle = self._spawn(shard.actors, shard.life)

    # --- the rest of a memory -------------------------------------------------------------------

    def generators(self) -> list[torch.Generator]:
        """None here: shards draw."""
        return []

    def compilables(self) -> list[Compilable]:
        return []

    def close(self) -> None:
        """The shards end with their cluster."""

    def state_dict(self) -> StateDict:
        """All rings, by actor, whichever shard has them; frames are fetched when they are read."""
        rings = {}
        for shard in self._shards:
            for actor in shard.actors:
                reference = shard.handle.describe.remote(actor)
                state, newest_rows = self._fetch(shard, reference)
                pieces = _FarPieces(self._fetch, shard, actor, len(newest_rows))
                # Who takes a lost shard's place counts rows from 0 again: they are other rows.
                versions = [row + shard.life * ROWS_OF_A_LIFE for row in newest_rows]
                rings[str(actor)] = {
                    **as_tensors(state),
                    "frames": Segments(pieces, versions),
                    "life": shard.life,
                }
        return {"actors": self._config.workers, "rings": rings}

    def _fetch(self, shard: _Shard, reference: Any) -> Any:
        try:
            return self._cluster.get(reference, f"replay shard {shard.number}")
        except ClusterError as error:
            raise CheckpointError(f"the replay memory cannot be saved: {error}") from None

    def load_state_dict(self, state: StateDict) -> None:
        theirs, ours = state["actors"], self._config.workers
        if theirs != ours:
            raise CheckpointError(
                f"the stored replay memory is that of {theirs} actors, not of {ours}; resume with "
                f"--workers {theirs}"
            )
        for shard in self._shards:
            for actor in shard.actors:
                self._restore(shard, actor, dict(state["rings"][str(actor)]))

    def _restore(self, shard: _Shard, actor: int, state: StateDict) -> None:
        pieces: Segments = state.pop("frames")
        shard.life = max(shard.life, state.pop("life", 0))  # older checkpoints say nothing
        who = f"replay shard {shard.number}"
        shard.holdings = self._cluster.get(
            shard.handle.restore.remote(actor, as_arrays(state)), who
        ).holdings
        row = 0
        for piece in pieces.tensors:
            self._cluster.get(shard.handle.restore_frames.remote(actor, row, piece.numpy()), who)
            row += len(piece)


class _FarPieces(Sequence[Tensor]):
    """Pieces of a ring's frames, each fetched when it is asked for: all need not fit here."""

    def __init__(
        self, fetch: Callable[[_Shard, Any], Any], shard: _Shard, actor: int, count: int
    ) -> None:
        self._fetch, self._shard, self._actor, self._count = fetch, shard, actor, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if index >= self._count:
            raise IndexError(index)
        reference = self._shard.handle.frames.remote(self._actor, index)
        return torch.from_numpy(np.array(self._fetch(self._shard, reference)))
