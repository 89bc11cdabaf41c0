"""Full disks, kills at every write point, damage and forgery (faults 25 to 28)."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qfleet.core import files
from qfleet.core.errors import CheckpointError
from qfleet.storage.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    load_policy,
    save_checkpoint,
    save_policy,
)
from qfleet.storage.segments import Segments
from support.messages import says
from support.waiting import PHASE_S, deadline


def state(value: int) -> dict[str, Any]:
    return {
        "learner": {"w": torch.full((50,), float(value)), "updates": value},
        "memory": {"ring": Segments([torch.zeros(9), torch.full((9,), value)], [0, value])},
    }


def save(root: Path, number: int, keep: int = 1) -> None:
    save_checkpoint(root, number, state(number), {"n": number}, keep)


def assert_is(root: Path, number: int) -> None:
    """The newest checkpoint loads without an alert and holds what `number` was saved with."""
    loaded = load_checkpoint(root, on_alert=pytest.fail)
    assert (loaded.env_steps, loaded.meta) == (number, {"n": number})
    assert torch.equal(loaded.parts["learner"]["w"], torch.full((50,), float(number)))
    assert float(loaded.parts["memory"]["ring"].tensors[1][0]) == number


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def points_of(action: Callable[[], object]) -> list[str]:
    """The write points that an action passes, in order."""
    names: list[str] = []
    original = files.write_point
    files.write_point = names.append
    try:
        action()
    finally:
        files.write_point = original
    return names


@pytest.fixture
def at_point(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """at_point(i, do): call do() at the i-th write point from now on."""

    def arm(index: int, do: Callable[[], None]) -> None:
        passed = 0

        def hook(_: str) -> None:
            nonlocal passed
            if passed == index:
                do()
            passed += 1

        monkeypatch.setattr(files, "write_point", hook)

    yield arm
    monkeypatch.undo()


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_write_points_cover_the_whole_protocol(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert points_of(lambda: save(tmp_path, 2)) == [
        "make folder",
        "create learner.safetensors",
        "write learner.safetensors",
        "sync learner.safetensors",
        "link memory.ring.0.safetensors",
        "create memory.ring.1.safetensors",
        "write memory.ring.1.safetensors",
        "sync memory.ring.1.safetensors",
        "create manifest.json",
        "sync manifest.json",
        "sync folder",
        "rename .tmp-2 to 2",
        "sync folder",
        "rename 1 to .tmp-1",
        "remove .tmp-1",
    ]


def test_disk_full_at_any_point_leaves_the_old_checkpoint_and_says_so(
    tmp_path: Path, at_point: Callable[..., None]
) -> None:
    template = tmp_path / "template"
    save(template, 1)
    points = points_of(lambda: save(template, 2))
    committed_at = points.index("rename .tmp-2 to 2")
    for index, point in enumerate(points):
        root = tmp_path / str(index)
        save(root, 1)
        before = tree(root / "1")
        at_point(index, disk_full)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            save(root, 2)
        at_point(-1, disk_full)
        assert "\n" not in str(caught.value)
        if index <= committed_at:
            assert tree(root) == {f"1/{k}": v for k, v in before.items()}, point
            assert [p.name for p in root.iterdir()] == ["1"], point
            assert_is(root, 1)
        else:
            assert_is(root, 2)
        save(root, 3)
        assert_is(root, 3)
        assert [p.name for p in root.iterdir()] == ["3"], point


def test_a_full_disk_while_replacing_puts_the_old_one_back(
    tmp_path: Path, at_point: Callable[..., None]
) -> None:
    folder = tmp_path / "best"
    save_policy(folder, {}, {"v": 0})
    points = points_of(lambda: save_policy(folder, {}, {"v": 1}))
    at_point(points.index("rename .tmp-best to best"), disk_full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_policy(folder, {}, {"v": 2})
    assert load_policy(folder).meta == {"v": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


def test_a_really_full_disk(tmp_path: Path) -> None:
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("no mount command")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        save(disk, 1)
        before = tree(disk)
        with pytest.raises(CheckpointError, match="No space left"):
            save_checkpoint(disk, 2, {"p": {"w": torch.ones(1 << 20)}}, {}, keep=1)
        assert tree(disk) == before
        save(disk, 3)
        assert_is(disk, 3)
    finally:
        subprocess.run([umount, str(disk)], check=True)


def killed_in_child(action: Callable[[], object]) -> bool:
    """Run an action in a forked process; whether it died of SIGKILL."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(math.ceil(deadline(PHASE_S)))
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("second", [2, 1], ids=["a new number", "the same number"])
def test_killed_at_any_point_the_newest_committed_one_loads(
    tmp_path: Path, at_point: Callable[..., None], second: int
) -> None:
    def first(root: Path) -> None:
        save_checkpoint(root, 1, state(1), {"n": 1}, keep=1)

    def then(root: Path) -> None:
        save_checkpoint(root, second, state(2), {"n": 2}, keep=1)

    first(tmp_path / "template")
    points = points_of(lambda: then(tmp_path / "template"))
    commit = points.index(f"rename .tmp-{second} to {second}")
    for index, point in enumerate(points):
        root = tmp_path / str(index)
        first(root)
        at_point(index, kill_self)
        assert killed_in_child(lambda root=root: then(root)), point
        at_point(-1, kill_self)
        expected = 1 if index <= commit else 2
        loaded = load_checkpoint(root, on_alert=pytest.fail)
        assert loaded.meta == {"n": expected}, point
        assert float(loaded.parts["learner"]["w"][0]) == expected
        assert loaded.env_steps == list_checkpoints(root)[-1]
        save(root, 3)
        assert_is(root, 3)
        assert [p.name for p in root.iterdir()] == ["3"], point


def test_a_policy_writer_killed_at_any_point_leaves_a_policy(
    tmp_path: Path, at_point: Callable[..., None]
) -> None:
    def write(root: Path, value: int) -> None:
        save_policy(root / "best", {"n": {"w": torch.full((3,), value)}}, {"v": value})

    write(tmp_path / "template", 1)
    points = points_of(lambda: write(tmp_path / "template", 2))
    commit = points.index("rename .tmp-best to best")
    assert "rename best to .old-best" in points
    for index, point in enumerate(points):
        root = tmp_path / str(index)
        write(root, 1)
        at_point(index, kill_self)
        assert killed_in_child(lambda root=root: write(root, 2)), point
        at_point(-1, kill_self)
        expected = 1 if index <= commit else 2
        policy = load_policy(root / "best")
        assert (policy.meta["v"], int(policy.parts["n"]["w"][0])) == (expected, expected), point
        write(root, 3)
        assert load_policy(root / "best").meta == {"v": 3}
        assert [p.name for p in root.iterdir()] == ["best"], point


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, Path.unlink, flip_middle, flip_last])
def test_damage_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    names = ["learner.safetensors", "memory.ring.1.safetensors", "manifest.json"]
    for index, name in enumerate(names):
        root = tmp_path / str(index)
        save(root, 1, keep=2)
        save(root, 2, keep=2)
        damage(root / "2" / name)
        alerts: list[str] = []
        loaded = load_checkpoint(root, on_alert=alerts.append)
        assert loaded.env_steps == 1
        assert len(alerts) == 1
        assert "checkpoint 2" in alerts[0]
        check = r"failed the (size|SHA-256|JSON) check|cannot be read: No such file"
        assert re.search(rf"2/{name}' ({check})", alerts[0]), alerts[0]
        with pytest.raises(CheckpointError, match=says("checkpoint 2", "damaged")):
            load_checkpoint(root, 2, pytest.fail)
        damage(root / "1" / name)
        with pytest.raises(CheckpointError, match=says("every", "damaged")):
            load_checkpoint(root, on_alert=alerts.append)


def test_no_single_bit_of_the_manifest_can_change_unseen(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"p": {"a": 1.5, "b": "text"}}, {"gamma": 0.99}, keep=1)
    path = tmp_path / "1" / "manifest.json"
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ (1 << i % 8)]) + good[i + 1 :])
        assert list_checkpoints(tmp_path) == [], f"byte {i}: {good[i - 5 : i + 5]!r}"


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit a manifest and make its own checksum right again, as an attacker would."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**body, "sha256": digest}))


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("torch_zip", [False, True], ids=["pickle", "torch.save"])
def test_a_pickle_is_refused_even_with_a_forged_manifest(tmp_path: Path, torch_zip: bool) -> None:
    canary = tmp_path / "executed"
    probe = tmp_path / "probe"
    pickle.loads(pickle.dumps(Canary(probe)))
    assert probe.exists(), "the canary itself must work"
    save(tmp_path, 1)
    folder = tmp_path / "1"
    target = folder / "learner.safetensors"
    if torch_zip:
        torch.save(Canary(canary), target)
    else:
        target.write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(CheckpointError, match=says("learner.safetensors", "size")):
        load_checkpoint(tmp_path, 1, pytest.fail)

    def bless(body: dict[str, Any]) -> None:
        data = target.read_bytes()
        record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        body["files"]["learner.safetensors"] = record

    forge(folder, bless)
    with pytest.raises(CheckpointError, match=says("safetensors")):
        load_checkpoint(tmp_path, 1, pytest.fail)
    assert not canary.exists()


def set_files(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["files"].update({name: {"bytes": 1, "sha256": "0" * 64}})


@pytest.mark.parametrize(
    "change",
    [
        set_files("../../secret.safetensors"),
        set_files("/etc/passwd"),
        set_files("a/b.safetensors"),
        set_files("a\\b.safetensors"),
        set_files("..safetensors"),
        set_files("a\0.safetensors"),
        set_files("manifest.json"),
        lambda body: body.update(files=[]),
        lambda body: body["files"]["learner.safetensors"].update(bytes=True),
        lambda body: body["files"]["learner.safetensors"].update(sha256="x"),
        lambda body: body["files"].pop("memory.ring.1.safetensors"),
        lambda body: body.pop("parts"),
        lambda body: body["parts"].update({"../x": {}}),
        lambda body: body["parts"]["learner"].update(w=1),
        lambda body: body["segments"]["memory"].update({"../ring": [1]}),
        lambda body: body["segments"]["memory"].update({"ring": "1"}),
        lambda body: body["segments"]["memory"].update({"ring": [1.5]}),
        lambda body: body.update(format_version=2),
        lambda body: body.update(format="other"),
        lambda body: body.update(env_steps=5),
        lambda body: body.update(meta=3),
    ],
)
def test_forged_manifests_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "1"
    forge(folder, lambda _: None)
    assert_is(tmp_path, 1)  # the forger's checksum itself is accepted
    forge(folder, change)
    with pytest.raises(CheckpointError, match="manifest"):
        load_checkpoint(tmp_path, 1, pytest.fail)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "3", '"sha256"', "{}", "\0", "é"])
def test_odd_manifests_are_refused(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    (tmp_path / "1" / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="manifest"):
        load_checkpoint(tmp_path, 1, pytest.fail)
    assert list_checkpoints(tmp_path) == []


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    target = tmp_path / "1" / "learner.safetensors"
    outside = tmp_path / "outside"
    target.rename(outside)
    target.symlink_to(outside)
    with pytest.raises(CheckpointError, match=says("regular file")):
        load_checkpoint(tmp_path, 1, pytest.fail)
