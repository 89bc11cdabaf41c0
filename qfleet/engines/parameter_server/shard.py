"""One slice of the flat weights on a parameter server. In: requests of workers. Out: replies.

A shard owns its slice, the slice's optimiser and a version, the number of updates made. It lives on
the host, never waits, and expects one call at a time. Clocks are passed in (``now_s``); only time
windows read them.

**Exactly once.** A worker numbers its messages 0, 1, 2, … and sends the next one only after the
reply to the one before. A message that comes again, because its reply was lost, changes nothing and
gets the first reply.

**Epochs.** A version that was reached may be lost: a shard that is restored from a snapshot goes on
from an older one. So versions count within an *epoch*, the number of restores, and every reply
carries both. Of two stamps (epoch, version) the larger is the newer. Where the epoch has grown,
updates may have been lost: the worker pulls again and calls ``add_worker`` again to learn the
number of its next message. A gradient of another epoch is refused, because it belongs to weights
that no longer exist. The caller that replaces a dead shard counts the replacements and passes
``epoch``, because the snapshot does not know how often it was used.
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
from qfleet.engines.parameter_server.admission import Admission, Decision, Moment
from qfleet.engines.parameter_server.compression import Cast, Vector, bytes_of, unpack
from qfleet.engines.parameter_server.schemes import elastic_difference
from qfleet.engines.parameter_server.wire import Exchange, Push, Reply, Stamp, Welcome

NOT_FINITE = "not-finite"
OTHER_EPOCH = "other-epoch"


@dataclass
class Counters:
    received: int = 0
    """Messages, including repeated and refused ones."""
    applied: int = 0
    """Gradients or exchanges that are in the weights."""
    repeated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason."""
    bytes_in: int = 0
    """Bytes of vectors, as they were sent."""
    bytes_out: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients by their staleness (updates) on arrival."""

    def state_dict(self) -> StateDict:
        staleness = {str(updates): count for updates, count in self.staleness.items()}
        return {**vars(self), "dropped": dict(self.dropped), "staleness": staleness}

    @classmethod
    def from_state(cls, state: StateDict) -> Counters:
        staleness = Counter({int(updates): n for updates, n in state["staleness"].items()})
        return cls(**{**state, "dropped": Counter(state["dropped"]), "staleness": staleness})


class _Record(NamedTuple):
    """The last message of a worker, whether it is present or not."""

    sequence: int = 0
    """The number of its next message."""
    reply: Reply | None = None
    """The reply to its last message."""


class Shard:
    def __init__(
        self,
        weights: Tensor,
        optimiser: FlatOptimiser,
        admission: Admission,
        cast: Cast | None = None,
        epoch: int = 0,
    ) -> None:
        """``weights`` is the slice itself and changes in place; ``optimiser`` was made for it.

        ``cast`` compresses the weights that are pulled. ``epoch`` is the number of shards that this
        one replaces, one after another.
        """
        self._weights, self._optimiser = weights, optimiser
        self._admission, self._cast = admission, cast
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
        """Let the worker take part from now on; one that does already only learns its number.

        Its next gradient will be for this turn or a later one (``admission.py``).
        """
        self._records.setdefault(worker, _Record())
        if worker not in self._present:
            self._present.add(worker)
            self._admission.join(worker, self._moment(now_s))
        self._admission.expect(worker, turn)
        self.tick(now_s)
        return self.next_message(worker)

    def remove_worker(self, worker: int, now_s: float = 0.0) -> None:
        """No longer wait for the worker. The gradients that it has sent still count."""
        if worker in self._present:
            self._present.remove(worker)
            self.tick(now_s)

    def next_message(self, worker: int) -> Welcome:
        """Return the number of the worker's next message, whether it is present or not."""
        return Welcome(self._epoch, self._records.get(worker, _Record()).sequence)

    def waits(self, worker: int) -> bool:
        """Return whether the worker has to wait before it pulls weights for its next gradient."""
        self._check_present(worker)
        return self._admission.waits(worker)

    def turn(self, worker: int) -> int:
        """Return the turn of the worker's next gradient (``admission.py``)."""
        return self._admission.turn(worker)

    def tick(self, now_s: float) -> None:
        """Make the update that is due at this time, if one is."""
        self._make(self._admission.settle(self._moment(now_s)))

    # --- requests -----------------------------------------------------------------------------

    def push(self, push: Push, now_s: float = 0.0) -> Reply:
        gradient = self._receive(push.gradient)
        answered = self._answered(push.worker, push.sequence, push.epoch)
        if answered is not None:
            return answered
        self._check_push(push, gradient)
        staleness = self._version - push.version
        self.counters.staleness[staleness] += 1
        finite = _is_finite(gradient)
        arrived = push._replace(gradient=gradient if finite else None, staleness=staleness)
        decision = self._admission.arrive(arrived, self._moment(now_s))
        self._make(decision)
        reason = decision.dropped if finite else NOT_FINITE
        waits = self._admission.waits(push.worker)
        if reason:
            self.counters.dropped[reason] += 1
            outcome = "dropped"
        else:
            outcome = "kept" if waits else "applied"
        reply = Reply(self._epoch, self._version, outcome, reason, waits)
        self._records[push.worker] = _Record(push.sequence + 1, reply)
        return reply

    def exchange(self, exchange: Exchange) -> Reply:
        """Move centre and worker towards each other; no policy decides and no worker waits."""
        weights = self._receive(exchange.weights)
        reply = self._answered(exchange.worker, exchange.sequence, exchange.epoch)
        if reply is None:
            reply = self._exchanged(exchange, weights)
            self._records[exchange.worker] = _Record(exchange.sequence + 1, reply)
        if reply.weights is not None:
            self.counters.bytes_out += reply.weights.nbytes
        return reply

    def _exchanged(self, exchange: Exchange, weights: Tensor) -> Reply:
        self._check_size(exchange.worker, weights)
        if not 0 < exchange.alpha <= 1:
            raise ProtocolError(
                f"alpha must be > 0 and ≤ 1, got {exchange.alpha:g} from worker {exchange.worker}"
            )
        difference = elastic_difference(weights, self._weights, exchange.alpha)
        if not _is_finite(difference):
            self.counters.dropped[NOT_FINITE] += 1
            return Reply(self._epoch, self._version, "dropped", NOT_FINITE)
        self._weights.add_(difference)
        self._version += 1
        self.counters.applied += 1
        return Reply(self._epoch, self._version, "applied", weights=difference.numpy())

    def pull(self, known: tuple[int, ...] | None = None, lend: bool = False) -> Reply:
        """Return the newest weights, unless ``known`` is their stamp.

        ``lend``: return the shard's own memory, which the next message changes, not a copy.
        """
        if known == self.stamp:
            return Reply(self._epoch, self._version)
        mine = self._weights
        if self._cast is not None:
            weights = self._cast.pack(mine)
        else:
            weights = (mine if lend else mine.clone()).numpy()
        self.counters.bytes_out += weights.nbytes
        return Reply(self._epoch, self._version, weights=weights)

    # --- snapshots ----------------------------------------------------------------------------

    def snapshot(self) -> StateDict:
        """Return the whole state: tensors that share no memory, and JSON values."""
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

        The workers that were present are present again, and kept gradients are kept: the caller
        knows which workers are gone and removes them.
        """
        weights, policy = snapshot["weights"], snapshot["policy"]
        if weights.shape != self._weights.shape:
            raise CheckpointError(
                f"the snapshot is of a shard of {weights.numel()} weights, this one has "
                f"{self._weights.numel()}; use the same number of shards"
            )
        if policy != type(self._admission).__name__:
            raise CheckpointError(
                f"the snapshot is of the policy {policy}, this shard has "
                f"{type(self._admission).__name__}; restore it with the same policy"
            )
        self._weights.copy_(weights)
        self._optimiser.load_state_dict(snapshot["optimiser"])
        self._admission.load_state_dict(snapshot["admission"])
        self.counters = Counters.from_state(snapshot["counters"])
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

    def _receive(self, vector: Vector | None) -> Tensor:
        assert vector is not None, "a worker sends a vector"
        self.counters.received += 1
        self.counters.bytes_in += bytes_of(vector)
        return unpack(vector)

    def _answered(self, worker: int, sequence: int, epoch: int) -> Reply | None:
        """Return the reply to a message that is repeated or of another epoch; None: it is new."""
        if epoch > self._epoch:
            raise ProtocolError(
                f"worker {worker} knows epoch {epoch} of a shard in epoch {self._epoch}: the shard "
                f"was replaced without counting it; start it with epoch={epoch}"
            )
        if epoch < self._epoch:
            self.counters.dropped[OTHER_EPOCH] += 1
            return Reply(self._epoch, self._version, "dropped", OTHER_EPOCH)
        record = self._records.get(worker, _Record())
        if sequence < record.sequence:
            self.counters.repeated += 1
            if sequence == record.sequence - 1 and record.reply is not None:
                return record.reply
            return Reply(self._epoch, self._version, "past")
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
                f"{self._weights.dtype} {tuple(self._weights.shape)}; cut it with layout.cut"
            )

    def _check_push(self, push: Push, gradient: Tensor) -> None:
        self._check_size(push.worker, gradient)
        if push.version > self._version:
            raise ProtocolError(
                f"worker {push.worker} knows version {push.version} of a shard at "
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
                f"{push.weight:g}; both must be finite, and the weight > 0"
            )


def mean(update: tuple[Push, ...]) -> tuple[Tensor, float]:
    """Return the mean of the gradients by weight, and the smallest of their learning rates.

    They are added one after another, not by a reduction whose order depends on the vector's length:
    k shards must round as one does.
    """
    first, *others = update
    gradient = _gradient_of(first)
    if not others:
        return gradient, first.learning_rate
    if all(push.weight == first.weight for push in others):
        gradient = gradient.clone()
        for push in others:
            gradient.add_(_gradient_of(push))
        gradient.div_(len(update))
    else:
        gradient = gradient * first.weight
        for push in others:
            gradient.add_(_gradient_of(push) * push.weight)
        gradient.div_(math.fsum(push.weight for push in update))
    return gradient, min(push.learning_rate for push in update)


def _gradient_of(push: Push) -> Tensor:
    assert push.gradient is not None, "a policy chose a gradient that must not be used"
    return unpack(push.gradient)


def _is_finite(vector: Tensor) -> bool:
    """Return whether all entries are finite.

    A non-finite entry makes the sum non-finite, so one pass usually suffices. Large finite numbers
    may add up to infinity: then the smallest and largest entry decide, which are NaN if any entry
    is. They take five times as long as the sum.
    """
    if math.isfinite(vector.sum().item()):
        return True
    low, high = torch.aminmax(vector)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _saved(record: _Record) -> StateDict:
    saved: StateDict = {"sequence": record.sequence}
    if record.reply is not None:
        epoch, version, outcome, reason, waits, difference, *_ = record.reply
        saved["receipt"] = [epoch, version, outcome, reason, waits]
        if difference is not None:
            saved["difference"] = torch.tensor(difference)
    return saved


def _loaded(saved: StateDict) -> _Record:
    if "receipt" not in saved:
        return _Record(saved["sequence"])
    difference = saved["difference"].clone().numpy() if "difference" in saved else None
    return _Record(saved["sequence"], Reply(*saved["receipt"])._replace(weights=difference))
