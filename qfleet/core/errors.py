"""Every error that qfleet raises for the user.

Each message says what is wrong with which value, what is allowed and what to do. The command line
prints it as one line and exits with ``exit_code``; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable


def one_line(error: BaseException) -> str:
    """Return ``ValueError: text``, with all lines of the message in one."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def lacks_memory(error: BaseException) -> bool:
    """Return whether Python or PyTorch, which raises a RuntimeError, got no memory."""
    no_memory = "allocate memory|out of memory|Storage size"
    return isinstance(error, MemoryError) or bool(re.search(no_memory, str(error)))


def require(ok: bool, name: str, value: float, allowed: str) -> None:
    """Raise ConfigError unless ``ok``: the value of ``name`` must be ``allowed``."""
    if not ok:
        raise ConfigError(f"{name} must be {allowed}, got {value}")


def check_platform() -> None:
    """Raise UserError on Windows, which lacks the file locks and signals that runs need."""
    if sys.platform == "win32":
        raise UserError(
            "Windows is not supported, because runs need POSIX file locks and signals; use WSL "
            "(https://learn.microsoft.com/windows/wsl), where qfleet runs as on Linux"
        )


class QfleetError(Exception):
    """Base class of all errors that qfleet raises on purpose."""

    exit_code = 1


class UserError(QfleetError):
    """An invalid request: nothing was started and nothing was lost."""

    exit_code = 2


class ConfigError(UserError):
    """An invalid configuration value, or a combination of values that cannot work."""


class UnknownNameError(UserError):
    """An environment, algorithm, preset, run … that does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str], advice: str = "") -> None:
        """``known`` are all names; with ``advice``, an alternative, only those worth suggesting."""
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        if close:
            fix = "did you mean " + " or ".join(close) + "?"
        elif advice:
            fix, advice = advice, ""
        else:
            fix = "known: " + (", ".join(known[:12]) + (" …" if len(known) > 12 else "") or "none")
        super().__init__(f"unknown {kind} '{name}'; {fix}{f' ({advice})' if advice else ''}")


class UnsupportedEnvError(UserError):
    """An environment whose spaces the DQN family cannot handle."""


class MemoryRefusedError(UserError):
    """A replay memory that does not fit into memory; the message names the largest that does."""


class RunBusyError(UserError):
    """A run folder that another process is writing into."""


class CheckpointError(QfleetError):
    """A checkpoint that is missing, damaged or of another kind."""

    exit_code = 2


class DataError(QfleetError):
    """A dataset that is missing, damaged, malformed or of another environment."""

    exit_code = 2


class ExportError(QfleetError):
    """An exported file that does not act like its policy; it was removed."""


class TransferError(QfleetError):
    """A hub or storage that cannot be reached, refuses, or holds damaged files."""


class StorageError(TransferError):
    """A folder at a URL that is missing or refused, or whose address is wrong: raised at once."""


class StorageMissing(StorageError):
    """An object or folder that does not exist."""


class StorageOutage(StorageError):
    """A store that did not answer for as long as it was retried; it may answer later."""


class EnvironmentFault(QfleetError):
    """An environment that failed more often than the configuration tolerates."""


class FaultRateError(QfleetError):
    """Invalid rewards, observations or gradients more often than the configuration tolerates."""


class DivergedError(QfleetError):
    """Divergence: Q-values beyond the limit. The message names the last good checkpoint."""


class ProtocolError(QfleetError):
    """A worker and a parameter server whose states or message formats do not match."""


class GivenUp(ProtocolError):
    """A worker that was unreachable and has been replaced reports again."""


class ClusterError(QfleetError):
    """A cluster that cannot be started, reached or used, or that lost a process."""


class ClusterLost(ClusterError):
    """A process of Ray's own died, without which no process of the cluster can be reached."""


class RankLost(ClusterError):
    """A rank of an all-reduce run ended or does not answer; the others cannot go on without it."""


class StoreFullError(ClusterError):
    """The cluster's object store is full, and so is the disk that it spills to."""


class ValueLost(ClusterError):
    """An argument of a call was stored on a machine that is gone; the called process is alive."""


class MemberLost(ClusterError):
    """A process of the cluster died, or a call to it failed in flight."""


class MemberSilent(MemberLost):
    """A process did not answer in time or cannot be reached; it may be alive and answer later."""
