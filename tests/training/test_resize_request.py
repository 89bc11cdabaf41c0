"""A wish for other workers: left by one process, seen by another."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.cli.main import main
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, UserError
from qfleet.engines.parameter_server import limits, resize_request
from qfleet.storage.locks import RunLock, is_locked
from support.messages import says

FLEET = Config(engine="parameter-server", workers=2)


@pytest.mark.parametrize("workers", [0, -1, 2 * limits.MOST_GROWTH + 1])
def test_numbers_that_a_run_cannot_have_are_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match=says(str(workers), "workers", "2")):
        limits.check(FLEET, workers)


def test_other_engines_keep_their_number() -> None:
    with pytest.raises(ConfigError, match=says("serial", "workers")):
        limits.check(Config(engine="serial"), 2)
    limits.check(FLEET, 2 * limits.MOST_GROWTH)


def test_a_wish_is_seen_once_and_its_file_is_gone(tmp_path: Path) -> None:
    seen: list[int] = []
    assert resize_request.handle(tmp_path, seen.append) is None
    with RunLock(tmp_path):
        asking = threading.Thread(target=resize_request.ask, args=(tmp_path, 3))
        asking.start()
        while not seen:
            said = resize_request.handle(tmp_path, seen.append)
        asking.join()
    assert (seen, said) == ([3], "3 workers from now on")
    assert resize_request.handle(tmp_path, seen.append) is None


def test_who_asks_hears_why_it_was_refused(tmp_path: Path) -> None:
    def refuse(workers: int) -> None:
        raise ConfigError(f"no room for {workers}")

    failures: list[UserError] = []

    def ask() -> None:
        try:
            resize_request.ask(tmp_path, 3)
        except UserError as error:
            failures.append(error)

    with RunLock(tmp_path):
        asking = threading.Thread(target=ask)
        asking.start()
        while resize_request.handle(tmp_path, refuse) is None:
            pass
        asking.join()
    assert [str(error) for error in failures] == [
        "the request for other workers was refused: no room for 3"
    ]


def test_wishes_of_an_earlier_sitting_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / resize_request.FILE).write_text("3")
    resize_request.forget(tmp_path)
    assert resize_request.handle(tmp_path, lambda _: None) is None


def test_nobody_is_asked_where_nobody_trains(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with pytest.raises(UserError, match="no run is training in"):
        resize_request.ask(tmp_path, 3)
    with RunLock(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(UserError, match="did not answer"):
            resize_request.ask(tmp_path, 3, wait_s=0.2)
    assert not is_locked(tmp_path)
    assert not (tmp_path / resize_request.FILE).exists()


def make_run(folder: Path, checkpoint: bool = False, **fields: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(FLEET.replace(**fields).to_json())
    (folder / "metrics.jsonl").touch()
    if checkpoint:
        (folder / "checkpoints" / "100").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("workers", [3, 100])
def test_where_nobody_trains_the_advice_works(tmp_path: Path, workers: int) -> None:
    """Whatever the number: how many may join matters to who trains only."""
    resumable = make_run(tmp_path / "resumable", checkpoint=True)
    with pytest.raises(UserError, match=says(f"qfleet resume {resumable} --workers {workers}")):
        qfleet.scale(resumable, workers)
    failed = make_run(tmp_path / "failed")
    mend = f"train --config {failed}/config.json --run-dir {failed} --workers {workers}"
    with pytest.raises(UserError, match=says(mend)):
        qfleet.scale(failed, workers)
    with pytest.raises(ConfigError, match=says("actors", "workers")):
        qfleet.scale(make_run(tmp_path / "actors", engine="actors"), workers)


def test_scale_tells_what_it_did_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run")
    told = []
    for workers in (3, 1):
        with RunLock(folder):
            asking = threading.Thread(
                target=main, args=(["scale", str(folder), "--workers", str(workers), "--json"],)
            )
            asking.start()
            while asking.is_alive():  # not until it is heard: it may have been refused
                resize_request.handle(folder, lambda _: None)
            asking.join()
        told.append(json.loads(capsys.readouterr().out))
    assert told == [
        {"run_dir": str(folder), "workers_before": 2, "workers": 3},
        {"run_dir": str(folder), "workers_before": 3, "workers": 1},
    ]


def test_how_many_there_are_is_not_guessed(tmp_path: Path) -> None:
    assert resize_request.workers_now(tmp_path, FLEET) == 2
    for said, workers in [
        (resize_request.agreed(1), 1),
        (resize_request.agreed(12), 12),
        ("the request for other workers was refused: no room for 3", None),
        ("3 workers: a run that began with 2 may have 1 to 2", None),
    ]:
        (tmp_path / resize_request.ANSWER).write_text(said)
        assert resize_request.workers_now(tmp_path, FLEET) == workers


def test_a_wish_that_cannot_be_is_told_and_forgotten(tmp_path: Path) -> None:
    def refuse(workers: int) -> None:
        limits.check(FLEET, workers)

    told = [(b"many", "invalid literal"), (b"100", "may have 1 to 8"), (b"\xff", "codec")]
    for text, words in told:
        (tmp_path / resize_request.FILE).write_bytes(text)
        said = resize_request.handle(tmp_path, refuse)
        assert said is not None
        assert words in said
        assert not (tmp_path / resize_request.FILE).exists()
