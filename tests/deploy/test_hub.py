"""Push and pull: the same policy comes back, from a stand-in of the hub and from a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import qfleet
from qfleet.cli.main import main
from qfleet.core.errors import ConfigError, TransferError
from qfleet.core.urls import public_url
from qfleet.deploy.hub import FILE_LIST, pull, push
from qfleet.deploy.model_card import Score, model_card
from qfleet.storage.checkpoint import PUBLISHED_POLICY as POLICY
from support.configs import tiny_fields
from support.hub import TOKEN, Hub, hub
from support.messages import holds, says
from support.policies import untrained

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("onnxruntime")
MANY = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
FILES = {"policy.safetensors", "policy.onnx", "config.json", "result.json", "README.md"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    # Its protocol for large files, a program of its own, cannot be stood in for; LFS can.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an ONNX export and a video."""
    folder = tmp_path_factory.mktemp("pushed") / "run"
    fields = tiny_fields(steps=120, learning_starts=20, buffer_size=100, batch_size=4, eval_freq=60)
    qfleet.train("CartPole-v1", **fields | {"n_eval_episodes": 3}, run_dir=folder)
    assert main(["export", str(folder), "--to", "onnx"]) == 0
    (folder / "videos").mkdir()
    (folder / "videos" / "best-seed1.gif").write_bytes(b"GIF89a...")
    return folder


def front_matter(card: str) -> dict[str, object]:
    """The fields before the text; they are written as JSON, which is YAML."""
    _, front, _ = card.split("---\n", 2)
    return {name: json.loads(text) for name, _, text in
            (line.partition(": ") for line in front.splitlines())}  # fmt: skip


@pytest.mark.parametrize("place", ["hub", "file"])
def test_a_run_is_pushed_and_pulled_back(
    place: str, run: Path, tmp_path: Path, server: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    target = "hf://me/cart-pole" if place == "hub" else f"file://{tmp_path}/models/cart-pole"
    assert main(["push", str(run), target, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said["files"]) == FILES | {"replay.gif"}
    out = tmp_path / "pulled"
    assert main(["pull", target, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == FILES | {"replay.gif"}
    for path in (out, out / POLICY):
        assert np.array_equal(qfleet.load(path).q_values(MANY), qfleet.load(run).q_values(MANY))
    assert (out / "policy.onnx").read_bytes() == (run / "exports" / "policy.onnx").read_bytes()
    assert (out / "replay.gif").read_bytes() == b"GIF89a..."
    for words in (["evaluate", "--episodes", "1"], ["export", "--to", "torch"]):
        assert main([words[0], str(out), *words[1:], "--json"]) == 0
    if place == "hub":
        assert "/lfs" in server.seen  # the weights went the way of large files
        assert set(server.repos["me/cart-pole"]) == FILES | {"replay.gif", FILE_LIST}


def test_the_card_has_the_score_of_the_policy_and_how_to_reproduce_it(
    run: Path, tmp_path: Path
) -> None:
    target = f"file://{tmp_path}/it"
    assert main(["push", str(run), target]) == 0
    card = (tmp_path / "it" / "README.md").read_text()
    front = front_matter(card)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = max(
        (row for row in rows if "eval/mean_reward" in row), key=lambda r: r["eval/mean_reward"]
    )
    value = f"{best['eval/mean_reward']:.2f} +/- {best['eval/std_reward']:.2f}"
    (model,) = front["model-index"]  # type: ignore[misc]
    (result,) = model["results"]
    assert result["metrics"] == [{"type": "mean_reward", "name": "mean_reward", "value": value}]
    assert result["dataset"]["name"] == "CartPole-v1"
    assert front["library_name"] == "qfleet"
    assert {"CartPole-v1", "dqn", "reinforcement-learning"} <= set(front["tags"])  # type: ignore[call-overload]
    for text in (value.replace("+/-", "±"), "replay.gif", f"qfleet pull {target}", "onnxruntime"):
        assert text in card
    assert "qfleet train --config policy/config.json" in card
    (read,) = huggingface_hub.ModelCard(card).data.eval_results or []  # as the hub reads it
    assert (read.metric_value, read.dataset_name) == (value, "CartPole-v1")
    repeated = tmp_path / "repeated"
    config = tmp_path / "it" / "config.json"
    assert main(["train", "--config", str(config), "--run-dir", str(repeated), "--quiet"]) == 0
    assert np.array_equal(qfleet.load(repeated).q_values(MANY), qfleet.load(run).q_values(MANY))


def test_a_saved_policy_is_pushed_without_a_score(tmp_path: Path) -> None:
    pushed = push(untrained(), None, "best", f"file://{tmp_path}/it", pytest.fail)
    assert set(pushed) == {POLICY, "config.json", "README.md"}
    front = front_matter((tmp_path / "it" / "README.md").read_text())
    assert front["model-index"][0]["results"][0]["metrics"] == []  # type: ignore[index]


def test_private_values_of_a_configuration_are_not_published(tmp_path: Path) -> None:
    policy = untrained()
    private = {"replay_dir": "/home/me/replay", "track": "wandb", "baseline": "/home/me/run"}
    policy.config = policy.config.replace(**private, data="/home/me/pong")
    push(policy, None, "best", f"file://{tmp_path}/it", pytest.fail)
    stored = json.loads((tmp_path / "it" / "config.json").read_text())
    assert (stored["replay_dir"], stored["track"], stored["data"]) == ("", "none", "pong")
    for path in (tmp_path / "it").iterdir():
        assert b"/home/me" not in path.read_bytes()


def test_an_export_of_another_policy_is_left_out(run: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    pushed = push(untrained(), run, "best", f"file://{tmp_path}/it", lines.append)
    assert "policy.onnx" not in pushed
    (line,) = lines
    assert holds(line, "policy.onnx", "export")


@pytest.mark.parametrize("what", ["damaged", "package"])
def test_an_export_that_cannot_be_read_is_left_out(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "policy.onnx").write_bytes(b"nothing")
    if what == "package":
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    lines: list[str] = []
    pushed = push(untrained(), tmp_path, "last", f"file://{tmp_path}/it", lines.append)
    assert "policy.onnx" not in pushed
    assert holds(*lines, "policy.onnx", "left out")


@pytest.mark.parametrize("place", ["hub", "file"])
def test_files_of_an_earlier_push_are_deleted(
    place: str, run: Path, tmp_path: Path, server: Hub
) -> None:
    target = "hf://me/again" if place == "hub" else f"file://{tmp_path}/again"
    assert main(["push", str(run), target]) == 0
    push(untrained(), None, "best", target, pytest.fail)
    left = (
        set(server.repos["me/again"])
        if place == "hub"
        else {path.name for path in (tmp_path / "again").iterdir()}
    )
    assert left == {POLICY, "config.json", "README.md", FILE_LIST}


def test_a_repository_is_created_as_a_private_one_if_asked(tmp_path: Path, server: Hub) -> None:
    path = str(untrained().save(tmp_path / "it"))
    assert main(["push", path, "hf://me/hidden", "--private"]) == 0
    assert main(["push", path, "hf://me/shown"]) == 0
    hidden, shown = server.created
    assert hidden.get("private") or hidden.get("visibility") == "private"
    assert not shown.get("private")
    assert shown.get("visibility") != "private"
    assert main(["push", path, f"file://{tmp_path}/it", "--private"]) == 2


def test_secrets_of_a_url_are_not_published_or_shown(tmp_path: Path) -> None:
    card = model_card(untrained(), None, [], public_url("s3://key:pass@bucket/it?sig=x"))
    assert "qfleet pull s3://bucket/it --out" in card
    with pytest.raises(TransferError, match=says("nosuch://host/it")) as caught:
        pull("nosuch://key:pass@host/it?sig=x", tmp_path / "out")
    assert not holds(str(caught.value), "pass")
    assert not holds(str(caught.value), "sig")


def test_a_score_without_deviation_has_none() -> None:
    card = model_card(untrained(), Score(3.0, None, 10), [], "hf://me/it")
    assert "**3.00 after 10 env steps**" in card
    assert "±" not in card


def test_a_stray_export_does_not_stand_in_for_the_policy_of_a_run(run: Path) -> None:
    right = qfleet.load(run).q_values(MANY)
    stray = untrained(seed=3).save(run / POLICY)
    try:
        assert np.array_equal(qfleet.load(run).q_values(MANY), right)
    finally:
        stray.unlink()


# --- faults -----------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, str]:
    target = f"file://{tmp_path}/stored"
    push(untrained(), None, "best", target, pytest.fail)
    return tmp_path / "stored", target


def test_a_damaged_file_is_refused_and_leaves_nothing(
    stored: tuple[Path, str], tmp_path: Path
) -> None:
    folder, target = stored
    data = bytearray((folder / POLICY).read_bytes())
    data[-1] ^= 1
    (folder / POLICY).write_bytes(bytes(data))
    with pytest.raises(TransferError, match=says(POLICY, "SHA-256")):
        pull(target, tmp_path / "out" / "it")
    assert list((tmp_path / "out").iterdir()) == []


NAMES = ["../x", "/etc/x", "a/b", "..", ".", "", ".bashrc", "a\\b", "x\0y", "x\n", "a" * 101, "C:x"]


@pytest.mark.parametrize("name", NAMES)
def test_a_listed_name_that_leaves_the_folder_is_refused(
    name: str, stored: tuple[Path, str], tmp_path: Path
) -> None:
    """Fault 39."""
    folder, target = stored
    listed = json.loads((folder / FILE_LIST).read_text())
    listed["files"][name] = listed["files"][POLICY]
    (folder / FILE_LIST).write_text(json.dumps(listed))
    with pytest.raises(TransferError, match=says(FILE_LIST, "refused")):
        pull(target, tmp_path / "out" / "it")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', "[" * 100_000, '{"format": "x"}'])
def test_a_malformed_list_is_refused(text: str, stored: tuple[Path, str], tmp_path: Path) -> None:
    folder, target = stored
    (folder / FILE_LIST).write_text(text)
    with pytest.raises(TransferError, match=says(FILE_LIST)) as caught:
        pull(target, tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["bytes", "files"])
def test_a_list_that_is_too_long_is_refused(
    what: str, stored: tuple[Path, str], tmp_path: Path
) -> None:
    folder, target = stored
    listed = json.loads((folder / FILE_LIST).read_text())
    if what == "files":
        listed["files"] |= {f"file{i}": {} for i in range(100)}
    (folder / FILE_LIST).write_text(json.dumps(listed) + " " * (10**6 * (what == "bytes")))
    with pytest.raises(TransferError, match=says(FILE_LIST, "over", what)):
        pull(target, tmp_path / "out" / "it")


TARGETS = [
    "models/x",
    "hf://me",
    "hf://me/../you",
    "hf://../x",
    "hf://me/a/b",
    "file:///a/../b",
    "",
]


@pytest.mark.parametrize("target", [*TARGETS, "nosuch://x"])
def test_a_place_that_is_none_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, TransferError)) as caught:
        pull(target, tmp_path / "out")
    assert repr(target) in str(caught.value)
    with pytest.raises((ConfigError, TransferError)):
        push(untrained(), None, "best", target, pytest.fail)


def test_a_folder_that_exists_is_not_replaced(stored: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match=says("mine", "--out")):
        pull(stored[1], tmp_path / "mine")


@pytest.mark.parametrize("step", ["create", "preupload", "lfs/objects", "commit"])
def test_a_push_that_fails_leaves_the_old_policy(
    step: str, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the retries of the client
    target, first, other = "hf://me/it", untrained(), untrained(net_arch=(4,))
    push(first, None, "best", target, pytest.fail)
    server.fails_at = step
    with pytest.raises(TransferError, match=says(target)) as caught:
        push(other, None, "best", target, pytest.fail)
    assert "\n" not in str(caught.value)
    server.fails_at = ""
    pull(target, tmp_path / "out")
    again = qfleet.load(tmp_path / "out")
    assert np.array_equal(again.q_values(MANY), first.q_values(MANY))


@pytest.mark.usefixtures("server")
def test_a_hub_without_the_repository_or_the_token_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "hf://me/nosuch", "--out", str(tmp_path / "out")]) == 1
    assert holds(capsys.readouterr().err, "hf://me/nosuch")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(TransferError, match=says("hf://me/it", "401")):
        push(untrained(), None, "best", "hf://me/it", pytest.fail)


def test_an_unreachable_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with hub() as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.url)
    with pytest.raises(TransferError, match=says("hf://me/it")) as caught:
        pull("hf://me/it", tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "target", "extra"),
    [("huggingface_hub", "hf://me/it", "hub"), ("fsspec", "file:///x", "data")],
)
def test_a_missing_package_is_named(
    module: str, target: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=says(module, f"qfleet[{extra}]")):
        pull(target, tmp_path / "out")
