"""Runs at a URL: what is published, read back and resumed, through outages and second writers.

Faults are those of the WebHDFS stand-in; `tests/faults/test_fault_url.py` has those of S3.
"""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.cli.main import main
from qfleet.core.errors import (
    CheckpointError,
    ConfigError,
    RunBusyError,
    StorageError,
    StorageOutage,
)
from qfleet.storage import lease, published
from qfleet.storage.locks import RunLock
from qfleet.storage.published import INDEX, OBJECTS, read_index, record_of, working_folder
from qfleet.storage.remote import Store
from qfleet.training import publisher
from qfleet.training.publisher import Publisher
from support.configs import tiny_fields
from support.messages import holds, says
from support.waiting import PHASE_S, deadline, wait_until
from support.webhdfs import NameNode, let_requests_take_long, name_node

pytest.importorskip("fsspec")
pytest.importorskip("requests")

FIELDS = tiny_fields(
    steps=600, learning_starts=50, buffer_size=500, eval_freq=150, n_eval_episodes=1,
    checkpoint_freq=150, max_episode_steps=30,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep copies in the test's folder, and lose no time."""
    monkeypatch.setenv(published.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr("qfleet.training.api.draw_learning_curve", lambda _: None)
    monkeypatch.setattr(publisher, "POLL_S", 0.02)
    monkeypatch.setattr(publisher, "RETRY_S", 0.05)
    monkeypatch.setattr(publisher, "END_S", deadline(PHASE_S))
    monkeypatch.setattr(publisher, "Store", functools.partial(Store, patience_s=0.2))
    let_requests_take_long(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture
def hdfs() -> Iterator[NameNode]:
    with name_node() as server:
        yield server


def url_of(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


def weights(run: Path | str, which: Any = "last") -> torch.Tensor:
    return qfleet.load(run, which).weights.data


def forget(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as another machine, which has no copy of anything."""
    monkeypatch.setenv(published.CACHE_DIR, str(cache.with_name("other-machine")))


def test_a_published_run_equals_its_folder(tmp_path: Path) -> None:
    url = url_of(tmp_path)

    class Draw(qfleet.Callback):
        def on_end(self, run: Any, result: Any) -> None:
            (run.folder / "plots").mkdir()
            (run.folder / "plots/learning_curve.png").write_bytes(b"PNG")
            # Half of a picture, until it is renamed; an index that lists it is refused.
            (run.folder / "plots/.tmp-returns.png").write_bytes(b"P")

    trained = qfleet.train("CartPole-v1", **FIELDS, run_dir=url, callbacks=Draw())
    assert (trained.url, trained.folder) == (url, working_folder(url))
    index = read_index(Store(url))
    assert index is not None
    names = {"config.json", "seeds.json", "metrics.jsonl", "result.json"}
    names |= {"plots/learning_curve.png", "best/manifest.json", "best/policy.safetensors"}
    assert names <= index.files.keys()
    kept = {path.split("/")[1] for path in index.files if path.startswith("checkpoints/")}
    assert kept == {path.name for path in (trained.folder / "checkpoints").iterdir()}
    assert len(kept) == 2  # keep_checkpoints
    for path, record in index.files.items():
        assert record_of(trained.folder / path) == record
        assert record_of(tmp_path / "store/run" / OBJECTS / record.sha256) == record
    objects = {name.rpartition("/")[2] for name in Store(url).names(OBJECTS)}
    assert objects == {record.sha256 for record in index.files.values()}  # nothing else is left


def test_contents_are_uploaded_once_and_before_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that two checkpoints share are one object; an index names what is there."""
    order = list[str]()

    class Recorded(Store):
        def write(self, path: str, data: bytes) -> None:
            if path == INDEX:
                listed = {record[1] for record in json.loads(data)["files"].values()}
                assert listed <= {name.rpartition("/")[2] for name in self.names(OBJECTS)}
            order.append(path)
            super().write(path, data)

        def upload(self, local: Path, path: str) -> None:
            order.append(path)
            super().upload(local, path)

    monkeypatch.setattr(publisher, "Store", Recorded)
    monkeypatch.setattr("qfleet.memory.ring.SEGMENT_BYTES", 512)
    url = url_of(tmp_path)
    qfleet.train("CartPole-v1", **FIELDS, run_dir=url)
    index = read_index(Store(url))
    assert index is not None
    frames = [record.sha256 for path, record in index.files.items() if ".frames." in path]
    assert len(set(frames)) < len(frames)  # the second checkpoint links what has not changed
    uploads = [path for path in order if path.rpartition("/")[2] in frames]
    assert len(uploads) == len(set(frames))


@pytest.mark.parametrize("scheme", ["file", "webhdfs"])
def test_another_machine_resumes_as_if_it_had_never_stopped(
    scheme: str, tmp_path: Path, cache: Path, hdfs: NameNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = qfleet.train("CartPole-v1", **FIELDS, run_dir=tmp_path / "whole")
    url = url_of(tmp_path) if scheme == "file" else f"{hdfs.url}/user/run"
    half = qfleet.RunOptions(stop_after=300)
    qfleet.train("CartPole-v1", **FIELDS, run_dir=url, options=half)
    assert not torch.equal(weights(url), weights(whole.folder))
    forget(cache, monkeypatch)
    resumed = qfleet.resume(url)
    assert isinstance(resumed, qfleet.Trained)
    assert resumed.result.env_steps == 600
    assert torch.equal(weights(url), weights(whole.folder))
    assert torch.equal(weights(url, "best"), weights(whole.folder, "best"))
    assert len(qfleet.evaluate(url, episodes=2).returns) == 2


def test_a_local_folder_in_which_a_run_trains_is_not_fetched_into(tmp_path: Path) -> None:
    url, half = url_of(tmp_path), qfleet.RunOptions(stop_after=300)
    trained = qfleet.train("CartPole-v1", **FIELDS, run_dir=url, options=half)
    with RunLock(trained.folder), pytest.raises(RunBusyError, match=says(str(trained.folder))):
        qfleet.resume(url)


def test_what_another_machine_has_superseded_is_kept_aside(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of(tmp_path)
    here = qfleet.train(
        "CartPole-v1", **FIELDS, run_dir=url, options=qfleet.RunOptions(stop_after=300)
    )
    ours = weights(here.folder)
    monkeypatch.setenv("QFLEET_CACHE_DIR", str(tmp_path / "elsewhere"))
    qfleet.resume(url, options=qfleet.RunOptions(stop_after=400))
    monkeypatch.setenv("QFLEET_CACHE_DIR", str(cache))
    again = qfleet.resume(url)
    assert isinstance(again, qfleet.Trained)
    assert again.result.env_steps == 600
    (kept,) = here.folder.parent.glob("superseded-*")
    assert torch.equal(weights(kept), ours)
    assert holds(capsys.readouterr().err, "another process", str(kept))


def test_a_local_folder_without_checkpoints_is_fetched_again(tmp_path: Path) -> None:
    url, half = url_of(tmp_path), qfleet.RunOptions(stop_after=300)
    trained = qfleet.train("CartPole-v1", **FIELDS, run_dir=url, options=half)
    shutil.rmtree(trained.folder / "checkpoints")
    resumed = qfleet.resume(url, options=qfleet.RunOptions(stop_after=320))
    assert isinstance(resumed, qfleet.Trained)
    assert resumed.result.env_steps == 320


def test_a_file_system_without_links_is_published_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    trained = qfleet.train("CartPole-v1", **FIELDS, run_dir="memory:///without-links")
    assert torch.equal(weights("memory:///without-links"), weights(trained.folder))
    assert "storage" not in trained.result.faults


def test_a_url_that_holds_a_run_is_refused_or_overwritten(tmp_path: Path, cache: Path) -> None:
    url = url_of(tmp_path)
    qfleet.train("CartPole-v1", **FIELDS, run_dir=url)
    with pytest.raises(ConfigError, match=says(url, "resume", "--overwrite")):
        qfleet.train("CartPole-v1", **FIELDS, run_dir=url)
    fields = FIELDS | {"steps": 300, "seed": 7}
    again = qfleet.train("CartPole-v1", **fields, run_dir=url, overwrite=True)
    assert torch.equal(weights(url), weights(again.folder))
    assert len(list((cache / "runs").iterdir())) == 1


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Publisher(url) as first:
        first._staged.mkdir(parents=True)
        with pytest.raises(RunBusyError, match=says(url)):
            Publisher(url)
        assert first._staged.exists()  # what the first is about to upload
    with Publisher(url), pytest.raises(RunBusyError, match=says(url)):
        qfleet.train("CartPole-v1", **FIELDS, run_dir=url)
    qfleet.train("CartPole-v1", **FIELDS, run_dir=url)


def test_a_lost_lease_ends_publishing_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of(tmp_path)
    monkeypatch.setattr(lease, "RENEW_S", 0.0)
    monkeypatch.setattr(publisher, "Lease", functools.partial(lease.Lease, lease_s=-1.0))
    taken = list[lease.Lease]()

    def take(run: Any) -> None:
        if run.parts.clock.env_steps >= 200 and not taken:
            taken.append(lease.Lease(Store(url)))
            wait_until(lambda: "storage" in run.faults.counts, "the alert")

    trained = qfleet.train("CartPole-v1", **FIELDS, run_dir=url, callbacks=take)
    assert trained.result.env_steps == 600
    assert trained.result.faults["storage"] == 1
    index = read_index(Store(url))
    assert index is not None
    assert "result.json" not in index.files
    assert holds(capsys.readouterr().err, url, "lacks", "another process")


def test_a_run_goes_on_through_an_outage_and_catches_up(hdfs: NameNode) -> None:
    url = f"{hdfs.url}/run"

    def break_and_mend(run: Any) -> None:
        env_steps = run.parts.clock.env_steps
        if 200 <= env_steps < 400 and not hdfs.is_down:
            hdfs.is_down = True
        if env_steps >= 400 and hdfs.is_down:
            wait_until(lambda: "storage" in run.faults.counts, "the alert")
            hdfs.is_down = False

    trained = qfleet.train("CartPole-v1", **FIELDS, run_dir=url, callbacks=break_and_mend)
    assert trained.result.faults["storage"] >= 1
    assert torch.equal(weights(url), weights(trained.folder))


def test_what_an_outage_kept_back_at_the_end_is_published_later(
    hdfs: NameNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{hdfs.url}/run"
    monkeypatch.setattr(publisher, "END_S", 0.5)

    def stop_the_store(run: Any) -> None:
        if run.parts.clock.env_steps >= 500 and not hdfs.is_down:
            wait_until(lambda: f"/run/{INDEX}" in hdfs.files, "the first index")
            hdfs.is_down = True

    trained = qfleet.train("CartPole-v1", **FIELDS, run_dir=url, callbacks=stop_the_store)
    assert trained.result.env_steps == 600
    assert holds(capsys.readouterr().err, url, "lacks", str(trained.folder), "qfleet resume")
    wait_until(lambda: "publisher" not in {t.name for t in threading.enumerate()}, "its end")
    hdfs.is_down = False
    # As another process, once this one has ended.
    for name in [name for name in hdfs.files if "/leases/" in name]:
        del hdfs.files[name]
    index = read_index(Store(url))
    assert index is not None
    assert "result.json" not in index.files
    with pytest.raises(ConfigError, match="complete"):
        qfleet.resume(url)
    assert torch.equal(weights(url), weights(trained.folder))


def test_a_store_that_refuses_or_is_away_stops_the_start(hdfs: NameNode) -> None:
    hdfs.is_down = True
    with pytest.raises(StorageOutage):
        qfleet.train("CartPole-v1", **FIELDS, run_dir=f"{hdfs.url}/run")
    hdfs.is_down, hdfs.fails = False, [403]
    with pytest.raises(StorageError, match="denied"):
        qfleet.train("CartPole-v1", **FIELDS, run_dir=f"{hdfs.url}/run")
    assert hdfs.files == {}


@pytest.mark.parametrize("call", [qfleet.resume, qfleet.load])
def test_a_url_without_a_run_is_named(call: Any, tmp_path: Path) -> None:
    with pytest.raises(qfleet.QfleetError, match=says(url_of(tmp_path), "no run")):
        call(url_of(tmp_path))
    assert not (tmp_path / "store").exists()


def test_several_seeds_have_a_url_each(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, fields = f"{url_of(tmp_path)}/", FIELDS | {"record": str(tmp_path / "data")}
    trained = qfleet.train_seeds(2, "CartPole-v1", **fields, run_dir=url)
    assert [run.url for run in trained.runs] == [f"{url}seed-0", f"{url}seed-1"]
    assert (trained.folder / "aggregate.json").exists()
    with pytest.raises(ConfigError, match=says("seed-0", "holds a run")):
        qfleet.train_seeds([2, 0], "CartPole-v1", **FIELDS, run_dir=url)
    assert read_index(Store(f"{url}seed-2")) is None  # refused before the first is trained
    forget(cache, monkeypatch)
    assert not torch.equal(weights(f"{url}seed-0"), weights(f"{url}seed-1"))
    assert main(["runs", "--root", str(Path(url).parent).replace(":/", ":///"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in listed] == ["run/seed-1", "run/seed-0"]


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a published run."""
    root = tmp_path_factory.mktemp("master")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(published.CACHE_DIR, str(root / "cache"))
        patch.setattr(publisher, "POLL_S", 0.02)
        qfleet.train("CartPole-v1", **FIELDS, run_dir=f"file://{root}/run")
    return root / "run"


@pytest.fixture
def url(master: Path, tmp_path: Path) -> str:
    """The URL of a run that another machine has published."""
    shutil.copytree(master, tmp_path / "store" / "run")
    return url_of(tmp_path)


def object_of(url: str, path: str) -> Path:
    index = read_index(Store(url))
    assert index is not None
    return Path(url.removeprefix("file://")) / OBJECTS / index.files[path].sha256


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = object_of(url, "checkpoints/600/learner.safetensors")
    one.write_bytes(one.read_bytes()[:-1] + b"?")
    with pytest.raises(qfleet.QfleetError, match="damaged"):
        weights(url)
    assert holds(capsys.readouterr().err, "checkpoints/600/learner.safetensors", "SHA-256")
    resumed = qfleet.resume(url, steps=700)
    assert isinstance(resumed, qfleet.Trained)
    assert resumed.result.env_steps == 700
    assert resumed.result.faults["alert"] == 1


def test_the_cache_serves_reads_and_stays_below_its_size(
    url: str, cache: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    capsys.readouterr()
    weights(url, "best")
    assert holds(capsys.readouterr().err, url, "0 files from the cache", "5 downloaded")
    weights(url, "best")
    assert holds(capsys.readouterr().err, "5 files from the cache", "0 downloaded")
    (copy,) = cache.glob("read/*/best/policy.safetensors")
    copy.write_bytes(b"damaged")
    weights(url, "best")
    assert holds(capsys.readouterr().err, "4 files from the cache", "1 downloaded")
    monkeypatch.setenv(published.CACHE_BYTES, "1")
    weights(url, "last")
    assert not copy.exists()  # least recently used, and not needed now
    assert list(cache.glob("read/*/checkpoints/600/learner.safetensors"))


def test_a_deleted_local_folder_does_not_empty_the_url(url: str) -> None:
    before = read_index(Store(url))
    with Publisher(url) as one:
        one.folder.mkdir(parents=True)
        (one.folder / "config.json").write_text("{}")
        with pytest.raises(CheckpointError, match=says(str(one.folder), "lost")):
            one._publish()
    assert read_index(Store(url)) == before
    assert weights(url).numel() > 0


@pytest.mark.parametrize("path", ["../out", "/out", "a/../../out", ".lock", "a\\b", "a//b"])
def test_an_index_cannot_name_files_elsewhere(path: str, url: str) -> None:
    index = Path(url.removeprefix("file://")) / INDEX
    body = json.loads(index.read_text())
    body["files"][path] = body["files"]["config.json"]
    index.write_text(json.dumps(body))
    with pytest.raises(StorageError, match=says(INDEX, "refused")):
        qfleet.load(url)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "x"}', "\xff"])
def test_a_malformed_index_is_one_line(text: str, url: str) -> None:
    (Path(url.removeprefix("file://")) / INDEX).write_text(text)
    with pytest.raises(StorageError, match=says(INDEX, "malformed")):
        qfleet.load(url)


def test_the_verbs_take_a_url(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for words in (["evaluate", url, "--episodes", "1"], ["plot", url], ["runs", "--root"],
                  ["export", url, "--to", "safetensors"]):  # fmt: skip
        words += [url.rpartition("/")[0]] if words[0] == "runs" else []
        copies = tmp_path / f"copies-{words[0]}"
        assert main([*words, "--cache-dir", str(copies)]) == 0
        printed = capsys.readouterr()
        assert holds(printed.err, url, "downloaded")
        assert list(copies.glob("read/*/config.json"))
        assert words[0] != "runs" or holds(printed.out, "CartPole-v1", "600", "run ")
    assert (tmp_path / "plot.png").exists()
    assert torch.equal(weights(tmp_path / "policy.safetensors", None), weights(url, "best"))
    more = f"{url}-more"
    words = ["--preset", "none", "--steps", "400", "--eval-freq", "0", "--no-tensorboard"]
    assert main(["train", "CartPole-v1", *words, "--stop-after", "100", "--run-dir", more]) == 0
    assert holds(capsys.readouterr().out, f"qfleet resume {more}")
    assert main(["resume", more, "--quiet"]) == 0
    assert main(["resume", url]) == 2
    assert holds(capsys.readouterr().err, "complete")
    assert main(["evaluate", url, "--cache-dir"]) == 2
    assert holds(capsys.readouterr().err, "--cache-dir")


@pytest.mark.usefixtures("url")
def test_runs_at_a_url_have_their_own_names_and_the_newest_is_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "store"
    for name, written_s in (("b", 300.0), ("a/c", 200.0), ("d", 400.0)):
        shutil.copytree(root / "run", root / name)
        body = json.loads((root / name / INDEX).read_text())
        (root / name / INDEX).write_text(json.dumps(body | {"written_s": written_s}))
    (root / "run" / INDEX).write_text('{"format": 3, "lease": Infinity}')
    for _ in range(2):  # also if the copies are in the cache already
        assert main(["runs", "--root", f"file://{root}", "--json"]) == 0
        shown = capsys.readouterr()
        assert "malformed" in shown.err  # and it hides no other run
        listed = json.loads(shown.out)
        assert [run["name"] for run in listed] == ["d", "b", "a/c"]
        assert listed[0]["path"] == f"file://{root}/d"


def test_a_full_cache_says_how_to_choose_another(
    url: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.local import LocalFileSystem

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "get_file", full)
    with pytest.raises(ConfigError, match=says(str(cache), "No space", "--cache-dir")):
        qfleet.load(url)


def test_an_index_that_is_too_large_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "MOST_JSON_BYTES", 100)
    with pytest.raises(StorageError, match=says(INDEX, "more than 100 bytes")):
        qfleet.load(url)
