"""What was measured on this machine is found again, and the file is never a reason to fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qfleet.engines.measured_cache import cache_path, recall, remember

KEY = {"env": "Toy-v0", "net_arch": (64, 64), "envs": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_remembered_is_recalled_under_its_own_key_alone() -> None:
    assert recall("engine", KEY) is None
    remember("engine", KEY, {"serial": 10.5})
    assert recall("engine", KEY) == {"serial": 10.5}
    assert recall("engine", dict(reversed(KEY.items()))) == {"serial": 10.5}
    assert recall("engine", {**KEY, "envs": 9}) is None
    remember("engine", KEY, {"serial": 11.0})
    assert recall("engine", KEY) == {"serial": 11.0}


def test_two_kinds_share_the_file_and_not_their_keys() -> None:
    remember("engine", KEY, 1)
    assert recall("tuning", KEY) is None
    remember("tuning", KEY, 2)
    assert (recall("engine", KEY), recall("tuning", KEY)) == (1, 2)
    kinds = [entry["kind"] for entry in json.loads(cache_path().read_text()).values()]
    assert sorted(kinds) == ["engine", "tuning"]


def test_another_machine_measures_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    remember("engine", KEY, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4096)))
    assert recall("engine", KEY) is None


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe", b'{"a": {"value": 1}}']
)
def test_a_damaged_file_is_measured_anew_and_mended(damage: bytes) -> None:
    remember("engine", KEY, 1)
    cache_path().write_bytes(damage)
    assert recall("engine", KEY) is None
    remember("engine", KEY, 2)
    assert recall("engine", KEY) == 2


def test_an_entry_that_is_no_entry_is_passed_over() -> None:
    remember("engine", KEY, 1)
    (name,) = json.loads(cache_path().read_text())
    cache_path().write_text(json.dumps({name: 7}))
    assert recall("engine", KEY) is None


def test_a_folder_that_cannot_be_made_is_no_error(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    remember("engine", KEY, 1)
    assert recall("engine", KEY) is None
    assert cache.read_text() == "a file where the folder should be"


def test_a_file_that_cannot_be_replaced_is_no_error() -> None:
    cache_path().mkdir(parents=True)
    remember("engine", KEY, 1)
    assert recall("engine", KEY) is None
    assert [path.name for path in cache_path().parent.iterdir()] == [cache_path().name]


def test_without_xdg_it_is_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path() == tmp_path / ".cache" / "qfleet" / "measured.json"
