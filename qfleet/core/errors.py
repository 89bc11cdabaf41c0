"""Every error a user can meet.

Each message names the thing, the value and the mend. The command line prints it as one line and
exits with ``exit_code``; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QfleetError(Exception):
    """Base of all errors that qfleet raises on purpose."""

    exit_code = 1


class UserError(QfleetError):
    """The request itself is wrong; nothing was started and nothing was lost."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration value that cannot work, alone or beside another."""


class UnknownNameError(UserError):
    """An environment, algorithm, preset, run … that does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        if close:
            mend = "did you mean " + " or ".join(close) + "?"
        else:
            mend = "known: " + (", ".join(known[:12]) + (" …" if len(known) > 12 else "") or "none")
        super().__init__(f"unknown {kind} '{name}'; {mend}")


class UnsupportedEnvError(UserError):
    """An environment whose spaces the DQN family cannot handle."""


class MemoryRefusedError(UserError):
    """The replay memory would not fit; says the largest capacity that does."""


class RunBusyError(UserError):
    """Another process is writing into this run's folder."""


class CheckpointError(QfleetError):
    """A checkpoint is missing, damaged or of another kind."""

    exit_code = 2


class EnvironmentFault(QfleetError):
    """An environment failed more often than the configuration tolerates."""


class FaultRateError(QfleetError):
    """Bad rewards, observations or gradients came more often than the configuration tolerates."""


class DivergedError(QfleetError):
    """Q-values left every sensible range; names the last good checkpoint."""


class ProtocolError(QfleetError):
    """A worker and a parameter server have lost track of each other, or never spoke the same."""


class GivenUp(ProtocolError):
    """A worker that was cut off is heard again, and another has its place."""


class ClusterError(QfleetError):
    """A cluster that cannot be started, reached or used, or a worker of it that was lost."""


class StoreFullError(ClusterError):
    """The cluster's object store is full, and so is the disk that stands in for it."""


class ValueLost(ClusterError):
    """What a call was given lay on a machine that is gone; who was called is well."""


class MemberLost(ClusterError):
    """A process of the cluster died, or the call of it that was under way did."""


class MemberSilent(MemberLost):
    """It did not answer in time, or cannot be reached; it may live on, and answer later."""
