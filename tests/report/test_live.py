"""The server of live pages: token, no writes, names of runs, events, and its end."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qfleet.cli.main import main
from qfleet.core.errors import UserError
from qfleet.report import data, live
from qfleet.report.files import find_folder
from qfleet.report.live import Watched
from support.live_pages import TOKEN, serve_folder
from support.processes import start_qfleet
from support.synthetic_runs import EVAL, curve, write_run
from support.waiting import PHASE_S, deadline, finish, wait_until


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


def append(run: Path, env_steps: int) -> None:
    """Log an evaluation with a return of 77."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"env_steps": env_steps, EVAL: 77.0}) + "\n")


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
        append(path, 300)
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
    output = tmp_path / "output"
    with output.open("w") as file:
        process = start_qfleet("watch", str(path), stdout=file)
    try:
        wait_until(lambda: "\n" in output.read_text(), "the address is printed", process=process)
        line = output.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", line)
        assert found is not None, line
        stream = events(found[0])
        next(stream)  # an open page does not keep it alive
        process.send_signal(signal.SIGTERM)
        finish(process, "watch ends")
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()


def test_a_folder_that_does_not_exist_yet_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serve_folder(find_folder("runs")) as url:
        assert "no runs yet" in fetch(url)[1]
        write_run(tmp_path / "runs" / "first", curve(1, 2))
        assert "first" in fetch(url)[1]
    with pytest.raises(UserError, match="nothing"):
        find_folder("nothing")


def test_a_folder_may_become_a_run(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run")
    assert not watched.is_run
    write_run(tmp_path / "run", curve(1, 2))
    assert watched.is_run


def test_a_page_that_cannot_be_made_leaves_its_events_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run", curve(1, 2))
    with serve_folder(path) as url:
        stream = events(url)
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(live, "page_data", lambda *_, **__: 1 / 0)
            append(path, 300)
            said = list[str]()
            wait_until(lambda: said.append(capsys.readouterr().err) or any(said), "it is said")
        assert "ZeroDivisionError" in "".join(said)
        append(path, 400)
        assert set(next(stream)["sources"]) == {EVAL}
        stream.close()


def test_events_do_not_read_traces_and_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(data, "read_chrome_trace", lambda path: read.append(path) or {})
    path = write_run(tmp_path / "run", curve(1, 2))
    view = Watched(path).view("run", "/")
    assert read == []
    view.page("/events")
    assert read == [path / "trace.json"]


def test_a_row_of_the_list_is_made_again_only_for_a_run_that_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    make = live.sparkline
    monkeypatch.setattr(live, "sparkline", lambda h: made.append(h.run.path) or make(h))
    paths = [write_run(tmp_path / name, curve(1, 2)) for name in ("a", "b")]
    watched = Watched(tmp_path)
    watched.view(None, "/")
    append(paths[1], 300)
    assert "<b>77.0" in watched.view(None, "/").html["runs"]
    assert made == [*paths, paths[1]]


def test_the_browser_is_opened_when_the_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[int, bool]] = []

    def open_page(url: str) -> None:
        opened.append((fetch(url)[0], threading.current_thread().daemon))
        server.should_exit = True

    monkeypatch.setattr(live.webbrowser, "open", open_page)
    with socket.create_server((live.LOOPBACK, 0)) as listener:
        url = f"http://{live.LOOPBACK}:{listener.getsockname()[1]}/?token={TOKEN}"
        server = live.LiveServer(live.LiveApp(Watched(tmp_path), TOKEN), url)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        thread.join(deadline(PHASE_S))
    assert opened == [(200, True)]


@pytest.mark.parametrize("words", [["watch", "s3://bucket/run"], ["watch", "--port", "65536"]])
def test_what_watch_refuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert words[-1] in capsys.readouterr().err
