"""One slice of the flat weights on a parameter server. In: workers' pushes. Out: weights, versions.

A shard owns its slice, the slice's optimiser and a version, the number of updates made. It lives on
the host, never waits, and expects one call at a time. Clocks are passed in (``now_s``); only time
windows read them.

**Exactly once.** A worker numbers its messages 0, 1, 2, … and sends the next one only after the
answer to the one before. One that comes again, because its answer was lost, changes nothing and
gets the first answer.

**Epochs.** A version that was reached may be lost: a shard that is restored from a snapshot goes on
from an older one. So versions count within an *epoch*, the number of restores, and everything that
leaves a shard carries both. Of two stamps (epoch, version) the larger is the newer; where the epoch
has grown, updates may have been lost, and whoever sees it pulls anew and calls ``add_worker`` again
to learn which number its next message has. A gradient of another epoch is refused, because it
belongs to weights that never were. Who puts a new shard in the place of a dead one counts that and
passes ``epoch``, for the snapshot cannot know how often it was used.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.agent.updaters.optimisers import FlatOptimiser
from qfleet.core.errors import CheckpointError, ProtocolError
from qfleet.core.types import StateDict
from qfleet.engines.parameter_server.admission import Admission, Arrival, Decision, Moment
from qfleet.engines.parameter_server.compression import Codec, Sent, bytes_of, decode
from qfleet.engines.parameter_server.schemes import elastic_difference

NOT_FINITE = "not-finite"
OTHER_EPOCH = "other-epoch"


class Stamp(NamedTuple):
    """Which weights: versions of different epochs have nothing to do with each other."""

    epoch: int
    version: int


class Push(NamedTuple):
    """One worker's gradient for one shard."""

    worker: int
    sequence: int
    """Number of this worker's message to this shard, from 0."""
    based_on: Stamp
    """The weights that the gradient was computed on."""
    gradient: Sent
    """float32, this shard's part of it, clipped by the worker."""
    learning_rate: float
    loss: float | None = None
    weight: float = 1.0
    """Its share in a mean, relative to the others': the samples behind it, where they differ."""
    turn: int | None = None
    """That it is for, by what all shards have told the worker; None: the one that it is here."""


class Exchange(NamedTuple):
    """One worker's weights for one shard's centre (``schemes.elastic_difference``)."""

    worker: int
    sequence: int
    epoch: int
    weights: Sent
    alpha: float


class Receipt(NamedTuple):
    stamp: Stamp
    """Of the shard, right after the message."""
    outcome: str
    """``applied``, ``kept`` (for an update with others), ``dropped``, or ``past`` for a repetition
    so old that its answer was forgotten: nobody can be waiting for it."""
    reason: str = ""
    """Why it was dropped."""
    wait: bool = False
    """The worker may not go on before ``Shard.waits`` says so. There is no version to wait for:
    other workers' updates may come in between."""


class Exchanged(NamedTuple):
    receipt: Receipt
    difference: Tensor | None
    """What the worker subtracts from its weights; None where nothing was exchanged."""


class Pulled(NamedTuple):
    stamp: Stamp
    weights: Sent | None
    """None: those that the caller knows are the newest."""


class Welcome(NamedTuple):
    epoch: int
    sequence: int
    """Number of the worker's next message; above 0 where it was here before."""


@dataclass
class Counters:
    received: int = 0
    """Messages, repetitions and refused ones included."""
    applied: int = 0
    """Gradients or exchanges that are in the weights."""
    repeated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason."""
    bytes_in: int = 0
    """Of vectors, as they travelled."""
    bytes_out: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """How many gradients were so many updates old on arrival."""

    def state_dict(self) -> StateDict:
        staleness = {str(updates): count for updates, count in self.staleness.items()}
        return {**vars(self), "dropped": dict(self.dropped), "staleness": staleness}

    def load_state_dict(self, state: StateDict) -> None:
        self.received, self.applied = state["received"], state["applied"]
        self.repeated, self.dropped = state["repeated"], Counter(state["dropped"])
        self.bytes_in, self.bytes_out = state["bytes_in"], state["bytes_out"]
        counts = {int(updates): count for updates, count in state["staleness"].items()}
        self.staleness = Counter(counts)


@dataclass
class _Record:
    """What was heard from a worker, whether it is present or not."""

    sequence: int = 0
    """Number of its next message."""
    answer: Exchanged | None = None
    """To its last one."""


class Shard:
    def __init__(
        self,
        weights: Tensor,
        optimiser: FlatOptimiser,
        admission: Admission,
        wire: Codec | None = None,
        epoch: int = 0,
    ) -> None:
        """``weights`` is the slice itself and changes in place; ``optimiser`` was made for it.

        ``wire`` packs the weights that are pulled. ``epoch`` is above 0 for one that takes the
        place of another: the number of those before it.
        """
        self._weights, self._optimiser = weights, optimiser
        self._admission, self._wire = admission, wire
        self._epoch, self._version = epoch, 0
        self._present: set[int] = set()
        self._records: dict[int, _Record] = {}
        self.counters = Counters()

    @property
    def stamp(self) -> Stamp:
        return Stamp(self._epoch, self._version)

    @property
    def size(self) -> int:
        return self._weights.numel()

    @property
    def present(self) -> frozenset[int]:
        return frozenset(self._present)

    # --- workers ------------------------------------------------------------------------------

    def add_worker(self, worker: int, turn: int = 0, now_s: float = 0.0) -> Welcome:
        """The worker takes part from now on; who is present already only learns its number.

        Its next gradient will be for this turn, or a later one (``admission.py``).
        """
        record = self._records.setdefault(worker, _Record())
        if worker not in self._present:
            self._present.add(worker)
            self._admission.join(worker, self._moment(now_s))
        self._admission.expect(worker, turn)
        self.tick(now_s)
        return Welcome(self._epoch, record.sequence)

    def remove_worker(self, worker: int, now_s: float = 0.0) -> None:
        """Nobody waits for the worker any more. What it has sent still counts."""
        if worker in self._present:
            self._present.remove(worker)
            self._make(self._admission.settle(self._moment(now_s)))

    def heard_from(self, worker: int) -> Welcome:
        """How far the worker has come, whether it is present or not."""
        return Welcome(self._epoch, self._records.get(worker, _Record()).sequence)

    def waits(self, worker: int) -> bool:
        """Whether the worker has to wait before it pulls weights for its next gradient."""
        self._check_present(worker)
        return self._admission.waits(worker)

    def turn(self, worker: int) -> int:
        """Of the worker's next gradient (``admission.py``)."""
        return self._admission.turn(worker)

    def tick(self, now_s: float) -> None:
        """Time has passed: make the update that is due, if one is."""
        self._make(self._admission.settle(self._moment(now_s)))

    # --- messages -----------------------------------------------------------------------------

    def push(self, push: Push, now_s: float = 0.0) -> Receipt:
        gradient = self._receive(push.gradient)
        answered = self._answered(push.worker, push.sequence, push.based_on.epoch)
        if answered is not None:
            return answered.receipt
        self._check_push(push, gradient)
        staleness = self._version - push.based_on.version
        self.counters.staleness[staleness] += 1
        finite = _is_finite(gradient)
        arrival = Arrival(
            push.worker,
            push.sequence,
            gradient if finite else None,
            staleness,
            push.learning_rate,
            push.weight,
            push.loss,
            push.turn,
        )
        decision = self._admission.arrive(arrival, self._moment(now_s))
        self._make(decision)
        reason = decision.dropped if finite else NOT_FINITE
        wait = self._admission.waits(push.worker)
        if reason:
            self.counters.dropped[reason] += 1
            outcome = "dropped"
        else:
            outcome = "kept" if wait else "applied"
        receipt = Receipt(self.stamp, outcome, reason, wait)
        self._records[push.worker] = _Record(push.sequence + 1, Exchanged(receipt, None))
        return receipt

    def exchange(self, exchange: Exchange) -> Exchanged:
        """Move centre and worker towards each other; no policy is asked and nobody waits."""
        weights = self._receive(exchange.weights)
        answered = self._answered(exchange.worker, exchange.sequence, exchange.epoch)
        if answered is not None:
            if answered.difference is not None:
                self.counters.bytes_out += answered.difference.nbytes
            return answered
        self._check_size(exchange.worker, weights)
        if not 0 < exchange.alpha <= 1:
            raise ProtocolError(
                f"worker {exchange.worker} sent alpha {exchange.alpha:g}; use above 0 up to 1"
            )
        difference = elastic_difference(weights, self._weights, exchange.alpha)
        if _is_finite(difference):
            self._weights.add_(difference)
            self._version += 1
            self.counters.applied += 1
            self.counters.bytes_out += difference.nbytes
            answer = Exchanged(Receipt(self.stamp, "applied"), difference)
        else:
            self.counters.dropped[NOT_FINITE] += 1
            answer = Exchanged(Receipt(self.stamp, "dropped", NOT_FINITE), None)
        self._records[exchange.worker] = _Record(exchange.sequence + 1, answer)
        return answer

    def pull(self, known: Stamp | None = None, lend: bool = False) -> Pulled:
        """The newest weights, unless they are those that the caller knows.

        ``lend``: the shard's own, which the next message changes, instead of a copy.
        """
        stamp, mine = self.stamp, self._weights
        if known == stamp:
            return Pulled(stamp, None)
        weights: Sent
        if self._wire is not None:
            weights = self._wire.encode(mine)
        else:
            weights = mine if lend else mine.clone()
        self.counters.bytes_out += bytes_of(weights)
        return Pulled(stamp, weights)

    # --- snapshots ----------------------------------------------------------------------------

    def snapshot(self) -> StateDict:
        """All there is, as tensors of its own and JSON values."""
        optimiser = self._optimiser.state_dict()
        return {
            "weights": self._weights.clone(),
            "optimiser": {name: tensor.clone() for name, tensor in optimiser.items()},
            "epoch": self._epoch,
            "version": self._version,
            "present": sorted(self._present),
            "records": {str(worker): _saved(record) for worker, record in self._records.items()},
            "policy": type(self._admission).__name__,
            "admission": self._admission.state_dict(),
            "counters": self.counters.state_dict(),
        }

    def restore(self, snapshot: StateDict) -> None:
        """Go on from a snapshot, in a new epoch.

        Who was present is so again, and what was kept is kept: who started the shard anew knows
        which workers are gone, and removes them.
        """
        weights, policy = snapshot["weights"], snapshot["policy"]
        if weights.shape != self._weights.shape:
            raise CheckpointError(
                f"the snapshot is of a shard of {weights.numel()} weights, this one has "
                f"{self._weights.numel()}; cut the vector over as many shards as then"
            )
        if policy != type(self._admission).__name__:
            raise CheckpointError(
                f"the snapshot is of the policy {policy}, this shard has "
                f"{type(self._admission).__name__}; restore it with the policy that it had"
            )
        self._weights.copy_(weights)
        self._optimiser.load_state_dict(snapshot["optimiser"])
        self._admission.load_state_dict(snapshot["admission"])
        self.counters.load_state_dict(snapshot["counters"])
        self._present = set(snapshot["present"])
        records: dict[str, StateDict] = snapshot["records"]
        self._records = {int(worker): _loaded(saved) for worker, saved in records.items()}
        self._version = snapshot["version"]
        self._epoch = max(self._epoch, snapshot["epoch"]) + 1

    # --- inside -------------------------------------------------------------------------------

    def _moment(self, now_s: float) -> Moment:
        return Moment(frozenset(self._present), now_s)

    def _make(self, decision: Decision) -> None:
        if decision.update:
            gradient, learning_rate = mean(decision.update)
            self._optimiser.step(self._weights, gradient, learning_rate, None)
            self._version += 1
            self.counters.applied += len(decision.update)

    def _receive(self, sent: Sent) -> Tensor:
        self.counters.received += 1
        self.counters.bytes_in += bytes_of(sent)
        return decode(sent)

    def _answered(self, worker: int, sequence: int, epoch: int) -> Exchanged | None:
        """The answer to a message that must not be looked at (again); None: it is new."""
        if epoch > self._epoch:
            raise ProtocolError(
                f"worker {worker} knows epoch {epoch} of a shard in epoch {self._epoch}: another "
                f"shard took its place uncounted; start it with epoch={epoch}"
            )
        if epoch < self._epoch:
            self.counters.dropped[OTHER_EPOCH] += 1
            return Exchanged(Receipt(self.stamp, "dropped", OTHER_EPOCH), None)
        record = self._records.get(worker, _Record())
        if sequence < record.sequence:
            self.counters.repeated += 1
            if sequence == record.sequence - 1 and record.answer is not None:
                return record.answer
            return Exchanged(Receipt(self.stamp, "past"), None)
        self._check_present(worker)
        if sequence > record.sequence:
            raise ProtocolError(
                f"worker {worker} sent message {sequence}, but {record.sequence} is its next: "
                "some were lost; send them again in order, or call add_worker for its number"
            )
        return None

    def _check_present(self, worker: int) -> None:
        if worker not in self._present:
            raise ProtocolError(f"worker {worker} is not present; call add_worker first")

    def _check_size(self, worker: int, vector: Tensor) -> None:
        if vector.shape != self._weights.shape or vector.dtype != self._weights.dtype:
            raise ProtocolError(
                f"worker {worker} sent {vector.dtype} of shape {tuple(vector.shape)} to a shard of "
                f"{self._weights.dtype} {tuple(self._weights.shape)}; cut it as layout.cut does"
            )

    def _check_push(self, push: Push, gradient: Tensor) -> None:
        self._check_size(push.worker, gradient)
        if push.based_on.version > self._version:
            raise ProtocolError(
                f"worker {push.worker} knows version {push.based_on.version} of a shard at "
                f"{self._version}; pull from the shard that the gradient is sent to"
            )
        if self._admission.waits(push.worker):
            raise ProtocolError(
                f"worker {push.worker} has to wait, but sent message {push.sequence}; "
                "ask waits() before the next gradient"
            )
        if not (math.isfinite(push.learning_rate) and 0 < push.weight < math.inf):
            raise ProtocolError(
                f"worker {push.worker} sent learning rate {push.learning_rate:g} and weight "
                f"{push.weight:g}; the first must be finite, the second above 0 too"
            )


def mean(update: tuple[Arrival, ...]) -> tuple[Tensor, float]:
    """The gradients' mean by weight, and the smallest of their learning rates.

    Summed one after another, not by a reduction whose order depends on the vector's length: k
    shards must round as one does.
    """
    first, *others = update
    gradient = _gradient_of(first)
    if not others:
        return gradient, first.learning_rate
    even = all(arrival.weight == first.weight for arrival in others)
    if even:
        gradient = gradient.clone()
        for arrival in others:
            gradient.add_(_gradient_of(arrival))
        gradient.div_(len(update))
    else:
        gradient = gradient * first.weight
        for arrival in others:
            gradient.add_(_gradient_of(arrival) * arrival.weight)
        gradient.div_(math.fsum(arrival.weight for arrival in update))
    return gradient, min(arrival.learning_rate for arrival in update)


def _is_finite(vector: Tensor) -> bool:
    """Whether every entry is: then one pass shows it, for whatever is not spoils the sum.

    Large numbers that are finite may add up to infinity: then both ends are looked at, which are
    not-a-number where any entry is. They take five times as long as the sum.
    """
    if math.isfinite(vector.sum().item()):
        return True
    low, high = torch.aminmax(vector)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _gradient_of(arrival: Arrival) -> Tensor:
    assert arrival.gradient is not None, "a policy chose a gradient that must not be used"
    return arrival.gradient


def _saved(record: _Record) -> StateDict:
    saved: StateDict = {"sequence": record.sequence}
    if record.answer is not None:
        (stamp, outcome, reason, wait), difference = record.answer
        saved["receipt"] = [*stamp, outcome, reason, wait]
        if difference is not None:
            saved["difference"] = difference.clone()
    return saved


def _loaded(saved: StateDict) -> _Record:
    if "receipt" not in saved:
        return _Record(saved["sequence"])
    epoch, version, outcome, reason, wait = saved["receipt"]
    receipt = Receipt(Stamp(epoch, version), outcome, reason, wait)
    difference = saved.get("difference")
    answer = Exchanged(receipt, None if difference is None else difference.clone())
    return _Record(saved["sequence"], answer)
