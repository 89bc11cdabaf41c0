"""Faults 48 and 49 of docs/faults.md: signed but inconsistent files, and files that are none."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.cli.main import main
from qfleet.core.errors import CheckpointError, ConfigError, QfleetError
from qfleet.core.files import read_text
from qfleet.storage.checkpoint import list_checkpoints
from qfleet.storage.segments import Segments
from qfleet.training.run_state import RunOptions
from support.configs import tiny_fields
from support.edited_checkpoints import MISSING, edit, mutate, put
from support.messages import holds
from support.waiting import PHASE_S, deadline

STORED = Path(__file__).parents[1] / "fixtures" / "stored_runs"
KINDS: dict[str, dict[str, Any]] = {
    "serial": {"algo": "rainbow", "engine": "serial", "buffer_size": 100},
    "pipeline": {"engine": "pipeline", "lockstep": True},
    "stateless": {"engine": "pipeline"},
    "serial-full": {"engine": "serial", "buffer_size": 100},
}


class Hung(BaseException):
    """Not an Exception: no handler of errors may take it for one."""


@contextmanager
def within_deadline() -> Iterator[None]:
    """Raise Hung in the main thread if the body blocks or does not end."""

    def expire(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, deadline(PHASE_S))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind that stopped at 160 of 240 steps."""
    root = tmp_path_factory.mktemp("runs")
    fields = tiny_fields(steps=240, envs=2, learning_starts=50, train_freq=4, eval_freq=80)
    for kind, changes in KINDS.items():
        stopped = RunOptions(stop_after=160)
        qfleet.train("CartPole-v1", **fields | changes, run_dir=root / kind, options=stopped)
    for kind in ("device", "serial-rollout"):
        shutil.copytree(STORED / kind, root / kind)
    return {path.name: path for path in root.iterdir()}


def copy_of(original: Path, folder: Path) -> tuple[Path, Path]:
    """Return the copy of a run and its newest checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    newest = list_checkpoints(folder / "checkpoints")[-1]
    return folder, folder / "checkpoints" / str(newest)


def resume_mutated(original: Path, folder: Path, seeds: range) -> None:
    """Every mutation ends in success or in an error of one line, and some end in an error."""
    refused = 0
    for seed in seeds:
        run, checkpoint = copy_of(original, folder)
        what: list[str] = []
        edit(checkpoint, lambda parts, seed=seed, what=what: what.append(mutate(parts, seed)))
        try:
            with within_deadline():
                qfleet.resume(run)
        except QfleetError as error:
            refused += len(str(error).splitlines()) == 1
        except BaseException as error:
            raise AssertionError(f"{what} ended in {error!r}") from error
    assert refused > len(seeds) // 3


@pytest.mark.parametrize("kind", [*KINDS, "device", "serial-rollout"])
def test_a_mutated_checkpoint_resumes_or_is_refused(
    kind: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    resume_mutated(originals[kind], tmp_path / "run", range(3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "device", "serial-rollout"])
def test_many_mutated_checkpoints_resume_or_are_refused(
    kind: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    resume_mutated(originals[kind], tmp_path / "run", range(3, 20))


def with_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a change of a tensor's first entry."""

    def change(old: torch.Tensor) -> torch.Tensor:
        new = old.clone()
        new.view(-1)[0] = value
        return new

    return change


CLASSES: dict[str, tuple[str, Any, str]] = {
    "another shape, which would be broadcast": ("learner/weights", lambda old: old[:1], "weights"),
    "another shape of frames": (
        "memory/frames",
        lambda old: Segments([piece[..., :1] for piece in old.tensors], old.versions),
        "frames",
    ),
    "another dtype": ("learner/weights", lambda old: old.double(), "weights"),
    "a missing key": ("learner/lr_scale", MISSING, "lr_scale"),
    "a missing section": ("actor", MISSING, "actor"),
    "an additional key": ("learner/unknown", None, "learner"),
    "a negative counter": ("run/updates", -1, "updates"),
    "a huge counter": ("run/updates", 2**40, "updates"),
    "another counter than the checkpoint's": ("run/env_steps", 80, "env_steps"),
    "a string for a number": ("run/marks/log", "3", "marks/log"),
    "a list for a dict": ("run/standings", [1], "list"),
    "a string for a return": ("run/standings/0/recent/0/0", "9", "recent"),
    "a ring position outside the ring": ("memory/total_rows", 10_000, "window"),
    "a window that is not the ring's": ("memory/sampler/window/0", 0, "window"),
    "a NaN priority": ("memory/sampler/leaves", with_first(float("nan")), "leaves"),
    "a negative priority": ("memory/sampler/leaves", with_first(-1.0), "leaves"),
    "a NaN weight": ("learner/weights", with_first(float("nan")), "weights"),
    "a NaN reward": ("memory/reward", lambda old: old * float("nan"), "reward"),
    "an action that does not exist": ("memory/action", with_first(7), "action"),
    "a flag that does not exist": ("memory/flags", with_first(64), "flags"),
    "an episode of an env that does not exist": ("actor/episodes", [[9, 1.0, 1]], "episodes"),
    "an evaluation without numbers": ("run/evaluation/returns", ["x"], "returns"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_an_inconsistent_checkpoint_is_refused_with_its_place(
    name: str, originals: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, checkpoint = copy_of(originals["serial"], tmp_path / "run")
    path, value, word = CLASSES[name]
    edit(checkpoint, put(path, value))
    assert main(["resume", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(checkpoint) in line
    assert word in line


def test_a_ring_position_without_its_env_steps_is_refused(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    run, checkpoint = copy_of(originals["serial-full"], tmp_path / "run")
    edit(checkpoint, put("memory/total_rows", lambda old: old + 1))
    with pytest.raises(CheckpointError, match="rows"):
        qfleet.resume(run)


@pytest.mark.slow
def test_an_unchanged_checkpoint_that_is_signed_again_resumes(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    """Negative control: the edits are refused, not the new checksums."""
    for original in originals.values():
        run, checkpoint = copy_of(original, tmp_path / "run")
        edit(checkpoint, lambda _: None)
        assert qfleet.resume(run).result.stopped_by == "steps"


@pytest.mark.parametrize("which", ["best", "last"])
@pytest.mark.parametrize(
    "value",
    [
        with_first(float("nan")),
        with_first(float("inf")),
        lambda old: old.double(),
        lambda old: old.long(),
        lambda old: old[:1],
        MISSING,
        "text",
    ],
    ids=["nan", "inf", "float64", "int64", "shape", "missing", "text"],
)
def test_malformed_weights_are_refused_on_load(
    which: Any, value: Any, originals: dict[str, Path], tmp_path: Path
) -> None:
    """Fault 49, by load, evaluate and init_from."""
    run, checkpoint = copy_of(originals["serial"], tmp_path / "run")
    if which == "best":
        edit(run / "best", put("policy/weights", value))
    else:
        edit(checkpoint, put("learner/weights", value))
        shutil.rmtree(run / "best")
    with pytest.raises(CheckpointError, match="weights") as caught:
        qfleet.load(run, which)
    assert holds(str(caught.value), which, str(run))
    assert main(["evaluate", str(run), "--which", which]) == 2
    fields = tiny_fields(algo="rainbow", steps=50, learning_starts=10, init_from=str(run))
    with pytest.raises(CheckpointError, match="weights"):
        qfleet.train("CartPole-v1", **fields, run_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_a_policy_file_with_other_weights_is_refused(
    dtype: torch.dtype, originals: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = qfleet.load(originals["serial"]).save(tmp_path / "policy.safetensors")
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    bad = {"weights": tensors["weights"].to(dtype)}
    for changed in (bad, {"weights": with_first(float("nan"))(tensors["weights"])}):
        save_file(tensors | changed, path, metadata)
        with pytest.raises(CheckpointError, match="weights"):
            qfleet.load(path)


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


OTHERS = {"pipe": put_fifo, "socket": put_socket, "folder": Path.mkdir, "device": put_device}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "name", ["manifest", "tensors", "config.json", "result.json", "metrics.jsonl", ".lock"]
)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(
    name: str, other: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    """Fault 48."""
    run, checkpoint = copy_of(originals["serial"], tmp_path / "run")
    places = {"manifest": checkpoint / "manifest.json", "tensors": checkpoint / "run.safetensors"}
    places["tensors"] = checkpoint / "learner.safetensors"
    path = places.get(name, run / name)
    path.unlink()
    OTHERS[other](path)
    with within_deadline():
        if name == ".lock" and other == "device":
            qfleet.load(run)  # a lock on a device holds
            return
        with pytest.raises(QfleetError):
            qfleet.resume(run)
        assert main(["runs", str(tmp_path)]) in (0, 2)
        assert main(["plot", str(run), "--out", str(tmp_path / "plot.png")]) in (0, 2)
        if name in ("manifest", "tensors"):
            shutil.rmtree(run / "best")
            with pytest.raises(CheckpointError):
                qfleet.load(run, "last")


@pytest.mark.parametrize("other", OTHERS)
def test_a_policy_file_must_be_a_regular_file(other: str, tmp_path: Path) -> None:
    OTHERS[other](tmp_path / "policy.safetensors")
    with within_deadline(), pytest.raises(QfleetError):
        qfleet.load(tmp_path / "policy.safetensors")


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json"])
def test_a_new_run_does_not_write_into_a_pipe(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    put_fifo(folder / name)
    with within_deadline(), pytest.raises(ConfigError, match="regular file"):
        qfleet.train("CartPole-v1", **tiny_fields(steps=50, learning_starts=10), run_dir=folder)


def test_a_text_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("w") as file:
        file.truncate(2**40)  # a sparse file
    with pytest.raises(OSError, match="larger"):
        read_text(path)
