"""Checkpoints give back what they were given, share what did not change, and keep their number."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from qfleet.core import files
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.storage import tensor_files
from qfleet.storage.checkpoint import (
    diff_meta,
    list_checkpoints,
    load_checkpoint,
    load_policy,
    save_checkpoint,
    save_policy,
)
from qfleet.storage.segments import Segments, Streamed
from qfleet.storage.tensor_files import read_tensors, write_tensors
from support.messages import says


def no_alert(message: str) -> None:
    raise AssertionError(f"unexpected alert: {message}")


def assert_same(found: Any, given: Any) -> None:
    """Bit-equal tensors, equal JSON of equal types, nothing missing and nothing more."""
    assert type(found) is type(given)
    if isinstance(given, torch.Tensor):
        assert (found.dtype, found.shape) == (given.dtype, given.shape)
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, given)]
        assert torch.equal(*raw)
    elif isinstance(given, Segments):
        assert found.versions == given.versions
        assert_same(found.tensors, given.tensors)
    elif isinstance(given, dict):
        assert found.keys() == given.keys()
        for key, value in given.items():
            assert_same(found[key], value)
    elif isinstance(given, list):
        assert len(found) == len(given)
        for a, b in zip(found, given, strict=True):
            assert_same(a, b)
    elif isinstance(given, float) and math.isnan(given):
        assert math.isnan(found)
    else:
        assert found == given


def every_kind() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 5, generator=generator)
    nan_payload = torch.tensor([0x7FC00123, -1], dtype=torch.int32).view(torch.float32)
    return {
        "learner": {
            "flat": base,
            "transposed": base.t(),
            "alias": base,
            "overlapping": base[1:4, ::2],
            "expanded": torch.ones(1, 3).expand(4, 3),
            "with_grad": torch.nn.Parameter(torch.ones(2)).detach(),
            "bf16": base.to(torch.bfloat16),
            "f16": base.half(),
            "f64": base.double(),
            "frames": torch.arange(256, dtype=torch.uint8).reshape(2, 128),
            "flags": torch.tensor([True, False, True]),
            "steps": torch.tensor([2**62 + 1, -(2**63)]),
            "i8": torch.tensor([-128, 127], dtype=torch.int8),
            "scalar": torch.tensor(3, dtype=torch.int64),
            "scalar_bf16": torch.tensor(1.5, dtype=torch.bfloat16),
            "scalar_bool": torch.tensor(True),
            "empty": torch.empty(0, 7),
            "empty_bool": torch.empty(0, dtype=torch.bool),
            "odd_bits": nan_payload,
            "nested": {"deep": {"w": torch.tensor([-0.0, 0.0]), "n": 1}, "hollow": {}},
            "": torch.tensor([1.0]),
            "ключ.with dot": torch.tensor([2.0]),
        },
        "rng": {
            "big": 2**127 + 3,
            "float": 0.1,
            "inf": -math.inf,
            "nan": math.nan,
            "none": None,
            "yes": True,
            "text": 'a\n"ü\ud800',
            "list": [1, [2.5, None, {"a": [False]}], "x"],
        },
        "hollow": {},
        "memory": {
            "cursor": 7,
            "ring": {
                "obs": Segments(
                    [torch.arange(4, dtype=torch.uint8) + i for i in range(3)], [1, 2, 3]
                ),
                "none": Segments([], []),
            },
        },
    }


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    meta = {"config": {"gamma": 0.99, "net_arch": (64, 64)}, "note": "ü"}
    path = save_checkpoint(tmp_path, 1000, every_kind(), meta, keep=2)
    assert path == tmp_path / "1000"
    loaded = load_checkpoint(tmp_path, on_alert=no_alert)
    assert (loaded.env_steps, loaded.path) == (1000, path)
    assert loaded.meta == {"config": {"gamma": 0.99, "net_arch": [64, 64]}, "note": "ü"}
    assert_same(loaded.parts, every_kind())


def test_aliases_are_independent_after_loading(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, every_kind(), {}, keep=1)
    learner = load_checkpoint(tmp_path, on_alert=no_alert).parts["learner"]
    learner["flat"].zero_()
    assert learner["alias"].abs().sum() > 0
    # and the file is not mapped behind the tensor
    assert_same(load_checkpoint(tmp_path, on_alert=no_alert).parts, every_kind())


def test_files_are_plain_safetensors_with_slash_keys(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, every_kind(), {}, keep=1)
    stored = load_file(path / "learner.safetensors")
    assert torch.equal(stored["nested/deep/w"], torch.tensor([-0.0, 0.0]))
    assert sorted(p.name for p in path.iterdir()) == [
        "learner.safetensors",
        "manifest.json",
        "memory.ring.obs.0.safetensors",
        "memory.ring.obs.1.safetensors",
        "memory.ring.obs.2.safetensors",
    ]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["env_steps"] == 1
    assert manifest["qfleet_version"]
    assert manifest["parts"]["rng"]["float"] == 0.1
    size = manifest["files"]["learner.safetensors"]["bytes"]
    assert size == (path / "learner.safetensors").stat().st_size


DTYPES = st.sampled_from([torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool])
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    DTYPES,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
KEYS = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), max_size=6)
STATES = st.recursive(
    st.dictionaries(KEYS, TENSORS | JSON, max_size=3),
    lambda inner: st.dictionaries(KEYS, inner | TENSORS | JSON, max_size=3),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(state=STATES)
def test_any_state_comes_back(state: dict[str, Any], tmp_path_factory: Any) -> None:
    root = tmp_path_factory.mktemp("run")
    save_checkpoint(root, 5, {"part": state}, {}, keep=1)
    assert_same(load_checkpoint(root, on_alert=no_alert).parts, {"part": state})


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a/b": 1}, "a/b"),
        ({"a": {0: torch.ones(1)}}, "0"),
        ({"a": [torch.ones(1)]}, r"a\[0\]"),
        ({"a": [{1: 2}]}, "1"),
        ({"a": (1, 2)}, "tuple"),
        ({"a": object()}, "object"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"a": torch.ones(2).to_sparse()}, "sparse"),
        ({"__metadata__": torch.ones(1)}, "__metadata__"),
        ({"\ud800": torch.ones(1)}, "Unicode"),
        ({"a.b": Segments([torch.ones(1)], [0])}, r"a\.b"),
    ],
)
def test_state_that_cannot_be_stored_is_refused(
    tmp_path: Path, state: dict[Any, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        save_checkpoint(tmp_path, 1, {"part": state}, {}, keep=1)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_part_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="part name"):
        save_checkpoint(tmp_path, 1, {"../x": {"a": 1}}, {}, keep=1)


def test_segments_need_a_version_each() -> None:
    with pytest.raises(ValueError, match=says("2", "1", "versions")):
        Segments([torch.ones(1), torch.ones(1)], [0])


def test_numbers_sort_as_numbers_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (9, 10, 100, 1000):
        save_checkpoint(tmp_path, number, {"p": {"n": number}}, {}, keep=2)
    assert list_checkpoints(tmp_path) == [100, 1000]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["100", "1000"]
    assert load_checkpoint(tmp_path, 100, no_alert).parts == {"p": {"n": 100}}
    with pytest.raises(CheckpointError, match=says("checkpoint 9", "100", "1000")):
        load_checkpoint(tmp_path, 9, no_alert)
    with pytest.raises(ConfigError, match=says("keep", "0")):
        save_checkpoint(tmp_path, 1001, {}, {}, keep=0)


def test_strangers_in_the_folder_are_neither_listed_nor_removed(tmp_path: Path) -> None:
    folder = tmp_path
    for name in ("notes", "007", "-3", "²"):
        (folder / name).mkdir(parents=True)
    (folder / ".tmp-5-1").mkdir()
    (folder / "12").write_text("a file")
    assert list_checkpoints(tmp_path) == []
    save_checkpoint(tmp_path, 20, {}, {}, keep=1)
    assert list_checkpoints(tmp_path) == [20]
    names = {p.name for p in folder.iterdir()}
    assert names == {"notes", "007", "-3", "²", "12", "20"}


def test_the_same_number_is_replaced(tmp_path: Path) -> None:
    for value in (1, 2):
        save_checkpoint(tmp_path, 50, {"p": {"v": value}}, {}, keep=2)
    assert load_checkpoint(tmp_path, on_alert=no_alert).parts == {"p": {"v": 2}}
    assert [p.name for p in tmp_path.iterdir()] == ["50"]


def test_none_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(tmp_path, on_alert=no_alert)


def ring(values: list[int], versions: list[int]) -> dict[str, Any]:
    tensors = [torch.full((8,), value, dtype=torch.uint8) for value in values]
    return {"memory": {"obs": Segments(tensors, versions)}}


def inodes(root: Path, number: int) -> list[int]:
    folder = root / str(number)
    return [(folder / f"memory.obs.{i}.safetensors").stat().st_ino for i in range(2)]


def stored_values(root: Path, number: int | None = None) -> list[int]:
    pieces = load_checkpoint(root, number, no_alert).parts["memory"]["obs"]
    return [int(tensor[0]) for tensor in pieces.tensors]


def test_unchanged_segments_are_hard_linked(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, ring([10, 20], [1, 1]), {}, keep=1)
    first = inodes(tmp_path, 1)
    # What was promised to be unchanged is not even looked at, so 99 must not be seen.
    save_checkpoint(tmp_path, 2, ring([99, 21], [1, 2]), {}, keep=2)
    second = inodes(tmp_path, 2)
    assert second[0] == first[0]
    assert second[1] != first[1]
    save_checkpoint(tmp_path, 3, ring([99, 99], [1, 2]), {}, keep=1)
    assert inodes(tmp_path, 3) == second
    assert stored_values(tmp_path) == [10, 21]  # though the checkpoints they came from are gone


def test_links_survive_a_restart_through_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, ring([10, 20], [1, 1]), {}, keep=1)
    first = inodes(tmp_path, 1)
    monkeypatch.setattr("qfleet.storage.checkpoint._lineage", {})  # a new process
    save_checkpoint(tmp_path, 2, ring([10, 20], [1, 1]), {}, keep=2)
    assert set(inodes(tmp_path, 2)).isdisjoint(first)
    monkeypatch.setattr("qfleet.storage.checkpoint._lineage", {})
    load_checkpoint(tmp_path, 1, no_alert)
    save_checkpoint(tmp_path, 3, ring([10, 20], [1, 1]), {}, keep=3)
    assert inodes(tmp_path, 3) == first


def test_going_back_never_links_to_the_abandoned_history(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 100, ring([10, 20], [1, 1]), {}, keep=3)
    save_checkpoint(tmp_path, 150, ring([11, 20], [2, 1]), {}, keep=3)
    save_checkpoint(tmp_path, 200, ring([12, 20], [3, 1]), {}, keep=3)
    load_checkpoint(tmp_path, 100, no_alert)
    # Version 2 again, with other contents than version 2 had in checkpoint 150.
    save_checkpoint(tmp_path, 180, ring([77, 20], [2, 1]), {}, keep=3)
    assert stored_values(tmp_path) == [77, 20]
    assert list_checkpoints(tmp_path) == [100, 150, 180]


def test_where_links_are_refused_segments_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, ring([10, 20], [1, 1]), {}, keep=1)

    def refuse_links(name: str) -> None:
        if name.startswith("link"):
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(files, "write_point", refuse_links)
    save_checkpoint(tmp_path, 2, ring([10, 20], [1, 1]), {}, keep=2)
    assert set(inodes(tmp_path, 2)).isdisjoint(inodes(tmp_path, 1))
    assert stored_values(tmp_path) == [10, 20]


def test_a_truncated_segment_is_written_anew_instead_of_linked(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, ring([10, 20], [1, 1]), {}, keep=1)
    (path / "memory.obs.0.safetensors").write_bytes(b"")
    save_checkpoint(tmp_path, 2, ring([10, 20], [1, 1]), {}, keep=1)
    assert stored_values(tmp_path) == [10, 20]


def test_policy_round_trip_and_replacement(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "best"
    with pytest.raises(CheckpointError, match="no policy"):
        load_policy(folder)
    for value in (1.0, 2.0):
        save_policy(folder, {"network": {"w": torch.tensor([value])}}, {"score": value})
        policy = load_policy(folder)
        assert policy.meta == {"score": value}
        assert_same(policy.parts, {"network": {"w": torch.tensor([value])}})
    assert [p.name for p in folder.parent.iterdir()] == ["best"]


def test_a_reader_between_the_two_renames_finds_the_old_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "best"
    save_policy(folder, {}, {"score": 1})
    seen: dict[str, int] = {}

    def read_now(name: str) -> None:
        monkeypatch.setattr(files, "write_point", lambda _: None)
        seen[name] = load_policy(folder).meta["score"]
        monkeypatch.setattr(files, "write_point", read_now)

    monkeypatch.setattr(files, "write_point", read_now)
    save_policy(folder, {}, {"score": 2})
    assert seen["rename .tmp-best to best"] == 1
    assert seen["remove .old-best"] == 2


def test_a_policy_swapped_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "best"
    save_policy(folder, {"n": {"w": torch.tensor([1.0])}}, {"score": 1})
    reads = 0
    original = tensor_files.read_tensors

    def swap_first(path: Path, record: tensor_files.FileRecord) -> dict[str, torch.Tensor]:
        nonlocal reads
        reads += 1
        if reads == 1:
            save_policy(folder, {"n": {"w": torch.tensor([2.0])}}, {"score": 2})
        return original(path, record)

    monkeypatch.setattr("qfleet.storage.snapshot.read_tensors", swap_first)
    policy = load_policy(folder)
    assert (policy.meta["score"], float(policy.parts["n"]["w"])) == (2, 2.0)


def test_a_damaged_policy_is_an_error(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "best", {"n": {"w": torch.ones(3)}}, {})
    (folder / "n.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=says("damaged", "n.safetensors", "size")):
        load_policy(folder)


def test_diff_meta_names_key_and_both_values() -> None:
    saved = {"gamma": 0.99, "net_arch": [64, 64], "env": "A", "old": 1, "x": {"y": 1, "z": 2}}
    current = {"gamma": 0.95, "net_arch": (64, 64), "env": "B", "new": None, "x": {"y": 3, "z": 2}}
    assert diff_meta(saved, current, {"env"}) == [
        "gamma: 0.99 in the checkpoint, 0.95 now",
        "old: 1 in the checkpoint, gone now",
        "x.y: 1 in the checkpoint, 3 now",
        "new: not in the checkpoint, None now",
    ]
    assert diff_meta({"a": math.nan, "b": 1}, {"a": math.nan, "b": 1.0}, set()) == []


def test_an_empty_tensor_with_any_strides_comes_back(tmp_path: Path) -> None:
    # As they come from an empty array of another process.
    empty = torch.zeros(4, dtype=torch.int64).as_strided((0,), (0,))
    save_checkpoint(tmp_path, 1, {"part": {"empty": empty, "one": torch.ones(1)}}, {}, keep=1)
    part = load_checkpoint(tmp_path).parts["part"]
    assert part["empty"].shape == (0,)
    assert part["empty"].dtype == torch.int64
    assert part["one"].tolist() == [1.0]


def test_a_streamed_tensor_is_stored_as_the_whole_one(tmp_path: Path) -> None:
    """Byte for byte, though its pieces are made one after the other."""
    whole, made = torch.arange(10.0), list[int]()

    def pieces() -> Iterator[Tensor]:
        for part in whole.split(3):
            made.append(len(part))
            yield part

    streamed = Streamed(torch.empty(10, device="meta"), pieces)
    other = torch.ones(2, dtype=torch.int64)
    record = write_tensors(tmp_path / "streamed.safetensors", {"a": streamed, "b": other})
    assert made == [3, 3, 3, 1]
    assert record == write_tensors(tmp_path / "whole.safetensors", {"a": whole, "b": other})
    found = read_tensors(tmp_path / "streamed.safetensors", record)
    assert torch.equal(found["a"], whole)
    assert record != write_tensors(tmp_path / "other.safetensors", {"a": whole + 1, "b": other})
