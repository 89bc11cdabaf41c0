"""The lease of a run at a URL: one process publishes, and an expired lease is taken over."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qfleet.core.errors import RunBusyError
from qfleet.storage import lease
from qfleet.storage.lease import Lease
from qfleet.storage.remote import Store
from support.messages import says

pytest.importorskip("fsspec")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/run")


def test_a_second_writer_is_refused_until_the_first_has_ended(store: Store) -> None:
    first = Lease(store)
    with pytest.raises(RunBusyError, match=says(store.url, str(os.getpid()))):
        Lease(store)
    assert first.renew()
    first.release()
    second = Lease(store)
    assert second.number == first.number + 1
    assert first.is_lost()
    assert not second.is_lost()


def test_an_expired_lease_is_taken_over_and_its_owner_notices(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 0.0)
    first = Lease(store, lease_s=-1.0)
    second = Lease(store)
    assert not first.renew()
    first.release()  # must not end the lease of the second
    assert second.renew()
    with pytest.raises(RunBusyError):
        Lease(store)


def test_a_renewed_lease_does_not_expire(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 0.0)
    first = Lease(store, lease_s=-1.0)
    first._lease_s = 60.0
    assert first.renew()
    with pytest.raises(RunBusyError):
        Lease(store)


@pytest.mark.parametrize(("machine", "is_taken"), [(lease._machine(), True), ("another", False)])
def test_the_lease_of_a_killed_process_is_taken_on_its_machine_only(
    store: Store, machine: str, is_taken: bool
) -> None:
    if not lease._machine():
        pytest.skip("this system does not tell its machine")
    Lease(store)
    (name,) = store.names("leases")
    held = json.loads(store.read(name)) | {"pid": 2**22 + 1, "machine": machine}
    store.write(name, json.dumps(held).encode())
    if is_taken:
        assert Lease(store).number == 2
    else:
        with pytest.raises(RunBusyError, match=says(str(2**22 + 1))):
            Lease(store)


def test_a_lease_that_nobody_could_have_written_is_replaced(store: Store) -> None:
    store.write("leases/000000007.json", b"{}")
    assert Lease(store).number == 8
    assert store.names("leases") == ["leases/000000008.json"]


def test_a_store_that_creates_what_exists_has_one_owner(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(self: Store, path: str, data: bytes) -> bool:
        self.write(path, data)
        return True

    monkeypatch.setattr(Store, "create", create)
    monkeypatch.setattr(lease, "RENEW_S", 0.0)
    first = Lease(store)
    monkeypatch.setattr(Lease, "_numbers", lambda _: [])  # both begin at the same moment
    with pytest.raises(RunBusyError):
        Lease(store)  # it sees no lease at all, not even its own
    monkeypatch.undo()
    monkeypatch.setattr(lease, "RENEW_S", 0.0)
    assert not first.renew()  # the other has written over its lease
