"""The server of live pages: token, no writes, names of runs, events, and its end."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qfleet.cli.main import main
from support.live_pages import TOKEN, serve_folder
from support.processes import start_qfleet
from support.synthetic_runs import EVAL, curve, write_run
from support.waiting import PHASE_S, deadline, finish


def fetch(url: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=deadline(PHASE_S)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(page_url: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a page."""
    page = fetch(page_url)[1]
    found = re.search(r'qfleet\.follow\("([^"]+)"\)', page)
    assert found is not None
    address = page_url.partition("/?")[0] + json.loads(f'"{found[1]}"')
    with urllib.request.urlopen(address, timeout=deadline(PHASE_S)) as reply:
        for line in reply:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def test_requests_need_the_token_and_only_read(tmp_path: Path) -> None:
    write_run(tmp_path / "run", curve(1, 2))
    with serve_folder(tmp_path) as url:
        assert fetch(url)[0] == 200
        for wrong in ("", "?token=", "?token=secret-toke", f"?tokens={TOKEN}"):
            assert fetch(url.partition("?")[0] + wrong)[0] == 403
        assert fetch(url.replace("/?", "/events?").replace(TOKEN, "x"))[0] == 403
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert fetch(url, method)[0] == 405


def test_only_runs_of_the_folder_are_served(tmp_path: Path) -> None:
    write_run(tmp_path / "outside", curve(1))
    write_run(tmp_path / "runs" / "run", curve(1))
    with serve_folder(tmp_path / "runs") as url:
        assert fetch(f"{url}&run=run")[0] == 200
        for name in ("none", "..%2Foutside", str(tmp_path / "outside"), ""):
            assert fetch(f"{url}&run={name}")[0] == 404


def test_events_hold_what_has_changed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", curve(1, 2))
    with serve_folder(path) as url:
        stream = events(url)
        first = next(stream)
        assert set(first["html"]) == {"scores", "fields", "details-0"}
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"env_steps": 300, EVAL: 77.0}) + "\n")
        second = next(stream)
        assert set(second["html"]) == {"scores"}
        assert set(second["sources"]) == {EVAL}
        stream.close()


def test_new_runs_appear_in_the_list_and_names_are_escaped(tmp_path: Path) -> None:
    with serve_folder(tmp_path) as url:
        assert "no runs yet" in fetch(url)[1]
        stream = events(url)
        assert "no runs yet" in next(stream)["html"]["runs"]
        write_run(tmp_path / "<b>&", curve(1, 2))
        text = next(stream)["html"]["runs"]
        assert "&lt;b&gt;&amp;" in text
        assert "<b>&" not in text
        stream.close()


def test_a_damaged_run_does_not_hide_others(tmp_path: Path) -> None:
    write_run(tmp_path / "good", curve(1))
    (write_run(tmp_path / "bad", curve(1)) / "config.json").write_text("{")
    with serve_folder(tmp_path) as url:
        assert "good" in fetch(url)[1]


def test_watch_prints_its_address_and_ends_with_a_signal(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", curve(1, 2))
    process = start_qfleet("watch", str(path), text=True)
    line = process.stdout.readline() if process.stdout else ""
    found = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", line)
    assert found is not None, line
    stream = events(found[0])
    next(stream)  # an open page does not keep it alive
    process.send_signal(signal.SIGTERM)
    finish(process, "watch ends")
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("words", [["watch", "s3://bucket/run"], ["watch", "--port", "65536"]])
def test_what_watch_refuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert words[-1] in capsys.readouterr().err
