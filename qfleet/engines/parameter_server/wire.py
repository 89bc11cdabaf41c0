"""The messages between workers and servers, and their codec.

Every request has a class of its own. ``Reply`` answers all of them except ``Join``, which
``Welcome`` answers, and ``Ping``, which comes back unchanged. A message travels as one tuple of its
class's name and its fields: numbers, strings and arrays. Ray copies no array, but copies tensors,
and runs Python code for every object that is neither an array nor built in.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, TypeAlias

from qfleet.engines.parameter_server.compression import Array, Vector

INLINE_VECTOR_BYTES = 2**20
"""Smaller vectors travel inside their message. At this size the object store of Ray takes twice as
long, at twice this size as long (docs/performance.md)."""

# The arrays that Ray delivers are shared and read-only. No code here writes to them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Stamp(NamedTuple):
    """Identifies the weights of a shard. Versions of different epochs are unrelated."""

    epoch: int
    version: int


class Join(NamedTuple):
    """A worker takes part from now on."""

    worker: int
    life: int = 0
    """The number of earlier workers with this worker's number."""
    turn: int = 0
    """The earliest turn that its next gradient is for (``admission.py``)."""


class Ping(NamedTuple):
    """An empty message, to measure the cost of a call or to check that the server is alive."""


class Pull(NamedTuple):
    """A request for the newest weights."""

    known: tuple[int, ...] | None = None
    """The stamp of the weights that the caller has; they are not sent again."""


class Push(NamedTuple):
    """One worker's gradient for one shard. Admission policies see it as well."""

    worker: int
    sequence: int
    """The number of this worker's message to this shard, from 0."""
    epoch: int
    version: int
    """Version of the weights that the gradient was computed on."""
    gradient: Vector | None
    """This shard's slice, clipped by the worker. The shard sets None where it must not be used."""
    learning_rate: float
    loss: float | None = None
    weight: float = 1.0
    """Weight in a mean: the number of samples behind the gradient, where workers differ."""
    turn: int | None = None
    """The turn it is for (``admission.py``); None: the current turn of the shard."""
    life: int = 0
    patience_s: float = 0.0
    """Seconds that the server may hold the call while the worker has to wait."""
    staleness: int = 0
    """Set by the shard: the updates made since the weights that it was computed on."""

    @property
    def known(self) -> Stamp:
        return Stamp(self.epoch, self.version)


class Wait(NamedTuple):
    """Asks whether the worker may go on, and for the newest weights if so."""

    worker: int
    known: tuple[int, ...] | None
    patience_s: float
    life: int = 0


class Exchange(NamedTuple):
    """One worker's weights, to be averaged with the centre (``schemes.elastic_difference``)."""

    worker: int
    sequence: int
    epoch: int
    weights: Vector
    alpha: float
    life: int = 0


class Welcome(NamedTuple):
    """The reply to ``Join``."""

    epoch: int
    sequence: int
    """The number of the worker's next message; above 0 if it was present before."""


class Reply(NamedTuple):
    """The reply to every request that may bring weights back."""

    epoch: int
    version: int
    """Version of the shard after the request, and of ``weights``."""
    outcome: str = ""
    """The fate of a push or exchange: ``applied``, ``kept`` (for a later update), ``dropped``, or
    ``past``: a repetition so old that its reply is forgotten. Empty: the shard ignored it."""
    reason: str = ""
    """Why it was dropped."""
    waits: bool = False
    """The worker may not go on yet and has to send ``Wait``. There is no version to wait for,
    because other workers' updates may come in between."""
    weights: Array | None = None
    """The newest weights, or the difference to subtract after an exchange. None: the caller has
    them already, has to wait, or nothing was exchanged."""
    waited_s: float = 0.0
    """Seconds that the server held the call."""
    is_present: bool = True
    """False: the worker was removed and has to join again."""
    turn: int = 0
    """The turn of the worker's next gradient on this shard."""

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.epoch, self.version)


Request: TypeAlias = Join | Ping | Pull | Push | Wait | Exchange
Message: TypeAlias = Request | Welcome | Reply
MESSAGES: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Join, Ping, Pull, Push, Wait, Exchange, Welcome, Reply)
}


def encode(message: Message) -> tuple[Any, ...]:
    return (type(message).__name__, *message)


def decode(plain: tuple[Any, ...]) -> Any:
    name, *fields = plain
    return MESSAGES[name](*fields)
