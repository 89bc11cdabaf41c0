"""The lease of a run at a URL: which process may publish there.

Leases are numbered objects. A new one is created with a conditional write, so that of several
processes one succeeds; its owner writes it again to renew it. A process whose lease is not the
newest any more has lost it. Expiry compares the clocks of machines, which must agree to seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time

from qfleet.core.errors import RunBusyError, StorageError
from qfleet.storage.remote import Store

LEASE_S = 120.0
"""Seconds after which a lease that was not renewed expires."""
RENEW_S = 20.0
_FOLDER = "leases"


class Lease:
    """The right to publish to a Store, until it is released, expires and is taken, or is lost."""

    def __init__(self, store: Store, lease_s: float = LEASE_S) -> None:
        """Raise RunBusyError if another process has the lease."""
        self._store, self._lease_s, self._token = store, lease_s, secrets.token_hex(8)
        older = self._numbers()
        if older:
            _check_free(store, self._name(older[-1]))
        self.number = older[-1] + 1 if older else 1
        if not store.create(self._name(self.number), self._body(lease_s)):
            raise RunBusyError(f"another process has just begun to publish to '{store.shown}'")
        self._renewed_s = time.monotonic()
        if self.is_lost():  # some stores create an object although it exists
            raise RunBusyError(f"another process has just begun to publish to '{store.shown}'")
        for number in older:
            store.remove(self._name(number))

    def renew(self) -> bool:
        """Prolong the lease if that is due; return False if another process has taken it."""
        if time.monotonic() - self._renewed_s > min(RENEW_S, self._lease_s / 4):
            if self.is_lost():
                return False
            self._store.write(self._name(self.number), self._body(self._lease_s))
            self._renewed_s = time.monotonic()
        return True

    def is_lost(self) -> bool:
        """Return whether another process has taken the lease."""
        if self._numbers()[-1:] != [self.number]:
            return True
        try:
            held = json.loads(self._store.read(self._name(self.number)))
            return bool(held["token"] != self._token)
        except (ValueError, TypeError, LookupError):
            return True

    def release(self) -> None:
        """Let the lease expire now. Its number stays: the next one is higher."""
        with contextlib.suppress(StorageError):  # otherwise it expires by itself
            if not self.is_lost():
                self._store.write(self._name(self.number), self._body(0.0))

    def _numbers(self) -> list[int]:
        names = [
            name.rpartition("/")[2].removesuffix(".json") for name in self._store.names(_FOLDER)
        ]
        return sorted(int(name) for name in names if name.isdecimal())

    @staticmethod
    def _name(number: int) -> str:
        return f"{_FOLDER}/{number:09d}.json"

    def _body(self, lease_s: float) -> bytes:
        body = {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid()}
        return json.dumps(
            {**body, "token": self._token, "expires_s": time.time() + lease_s}
        ).encode()


def _check_free(store: Store, name: str) -> None:
    """Raise RunBusyError if the owner of this lease may be alive."""
    try:
        held = json.loads(store.read(name))
        left_s = float(held["expires_s"]) - time.time()
        host, pid = str(held["host"]), int(held["pid"])
        is_here = bool(held["machine"]) and held["machine"] == _machine()
    except (ValueError, TypeError, LookupError):
        return  # not ours, so nobody renews it
    if left_s > 0 and not (is_here and not _is_alive(pid)):
        raise RunBusyError(
            f"'{store.shown}' is being written by process {pid} on {host}; stop it, choose another "
            f"URL, or wait: its lease ends in {left_s:.0f} s unless it is renewed"
        )


def _machine() -> str:
    """Return what identifies the processes that a pid refers to, or '' where that is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # of another user
    return True
