"""Rows that are recorded are read back: transitions, episodes, ends, and files that were edited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from qfleet.core.errors import DataError
from qfleet.core.types import FIRST, SKIP, TERMINATED, Block, EnvSpec
from qfleet.data.manifest import Dataset, merge
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import UniformSampler
from support.datasets import BOX, STACK, read_all, record_block, scripted_block


def key_of(obs: Any) -> tuple[float, ...]:
    return tuple(np.asarray(obs).reshape(-1).tolist())


def transitions(ring: Ring, flags: torch.Tensor) -> dict[tuple[float, ...], tuple[Any, ...]]:
    """Return every transition of a ring by its observation."""
    rows, envs = np.nonzero((flags.numpy() & SKIP) == 0)
    batch = ring.gather(torch.from_numpy(rows), torch.from_numpy(envs))
    found = {}
    for i in range(len(batch)):
        bootstraps = float(batch.discount[i]) > 0
        found[key_of(batch.obs[i])] = (
            int(batch.action[i]),
            float(batch.reward[i]),
            float(batch.discount[i]),
            key_of(batch.next_obs[i]) if bootstraps else None,
        )
    return found


def ring_of(spec: EnvSpec, rows: int, envs: int) -> Ring:
    sampler = UniformSampler(torch.Generator())
    return Ring(spec, envs, rows * envs, 1, 0.5, sampler, torch.device("cpu"))


@pytest.mark.parametrize("spec", [BOX, STACK, BOX.with_masks()], ids=["box", "stack", "masks"])
def test_recorded_rows_give_the_transitions_of_the_ring(spec: EnvSpec, tmp_path: Path) -> None:
    """Rows are cut into chunks, groups and files; stacks and next observations stay the same."""
    block = scripted_block(spec, 160, 3, mean_length=9)
    if spec.is_masked:
        allowed = (block.obs[..., -spec.num_actions :] > 100).float()
        allowed.scatter_(-1, block.action.unsqueeze(-1), 1.0)
        block.obs[..., -spec.num_actions :] = allowed
    block.flags[-1] |= SKIP  # its next observation is not there
    ours = ring_of(spec, 161, 3)
    ours.extend(block)
    dataset = record_block(tmp_path, block, spec)
    assert len(dataset.manifest.parts) > 1
    rows = read_all(dataset)
    count = len(rows.action)
    theirs = ring_of(spec, count + 1, 1)
    theirs.extend(
        Block(
            *(
                torch.from_numpy(np.array(column)).unsqueeze(1)
                for column in (rows.obs, rows.action.astype(np.int64), rows.reward, rows.flags)
            )
        )
    )
    expected = transitions(ours, block.flags)
    found = transitions(theirs, torch.from_numpy(rows.flags).unsqueeze(1))
    assert found == expected
    assert len(found) == dataset.manifest.transitions == int((block.flags & SKIP == 0).sum())


def test_a_row_that_is_changed_is_noticed(tmp_path: Path) -> None:
    """The negative control of the test above."""
    block = scripted_block(BOX, 60, 2)
    dataset = record_block(tmp_path, block)
    before = read_all(dataset)
    block.reward[7, 1] += 1
    after = read_all(record_block(tmp_path / "other", block))
    assert (before.reward != after.reward).sum() == 1


def test_episodes_steps_and_ends_are_those_that_were_played(tmp_path: Path) -> None:
    block = scripted_block(BOX, 200, 2, seed=3)
    rows = read_all(record_block(tmp_path, block))
    usable = rows.flags & SKIP == 0
    terminated = int((block.flags & TERMINATED != 0).sum())
    assert int((rows.flags & TERMINATED != 0)[usable].sum()) == terminated
    for episode in np.unique(rows.episode):
        steps = rows.step[usable & (rows.episode == episode)]
        assert steps.tolist() == list(range(len(steps)))
    ends = usable & (rows.truncated | (rows.flags & TERMINATED != 0))
    # Every episode ends once, and those of the newest rows are cut by the end of the recording.
    assert sorted(rows.episode[ends]) == sorted(np.unique(rows.episode[usable]))
    assert not (rows.truncated & (rows.flags & TERMINATED != 0)).any()


def test_a_recording_that_begins_in_an_episode_leaves_incomplete_stacks_out(tmp_path: Path) -> None:
    block = scripted_block(STACK, 40, 2)
    block.flags[0] &= ~FIRST & 0xFF
    block.flags[:3] &= ~(FIRST | SKIP | TERMINATED) & 0xFF
    rows = read_all(record_block(tmp_path, block, STACK))
    early = rows.step < STACK.frame_stack - 1
    begun = np.isin(rows.episode, rows.episode[:1])
    assert (rows.flags[early & begun] & SKIP != 0).all()
    assert (rows.flags[begun & ~early] & SKIP == 0).any()


def test_an_episode_whose_beginning_was_not_recorded_has_no_step_0(tmp_path: Path) -> None:
    block = scripted_block(BOX, 40, 2)
    block.flags[0, 0] &= ~FIRST & 0xFF  # env 1 is the negative control
    rows = read_all(record_block(tmp_path, block))
    least = {int(number): rows.step[rows.episode == number].min() for number in rows.episode}
    assert len(least) > 4
    (begun,) = (number for number, step in least.items() if step)
    steps = rows.step[rows.episode == begun]
    assert sorted({*steps}) == list(range(1, len({*steps}) + 1))


def test_unknown_probabilities_are_null(tmp_path: Path) -> None:
    block = scripted_block(BOX, 30, 1)
    assert block.probability is not None
    block.probability[3] = torch.nan
    rows = read_all(record_block(tmp_path, block))
    assert np.isnan(rows.probability).sum() >= 1
    assert np.isfinite(rows.probability).sum() > 20


def edit(dataset: Dataset, column: str, change: Any) -> None:
    """Rewrite the first file of a dataset with another column, and its checksum with it."""
    path = dataset.local(dataset.manifest.parts[0])
    file = pq.ParquetFile(path)
    groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
    index = groups[0].schema.get_field_index(column)
    edited = []
    for i, group in enumerate(groups):
        values = change(group[column].to_pylist(), i)
        edited.append(group.set_column(index, column, values))
    with pq.ParquetWriter(path, edited[0].schema) as writer:
        for group in edited:
            writer.write_table(group, row_group_size=len(group))


def set_row(row: int, value: Any, kind: Any) -> Any:
    """Return a change of one row of the second group."""

    def change(values: list[Any], group: int) -> Any:
        if group == 1:
            values[row] = value
        return pa.array(values, type=kind)

    return change


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("action", 3, pa.int32()),
        ("action", -1, pa.int32()),
        ("action", None, pa.int32()),
        ("probability", 1.5, pa.float32()),
        ("step", -2, pa.int32()),
        ("obs", np.array([np.nan, 1], np.float32).tobytes(), pa.binary(8)),
    ],
)
def test_a_wrong_value_is_named_with_file_and_row(
    column: str, value: Any, kind: Any, tmp_path: Path
) -> None:
    """Fault 33 of docs/faults.md."""
    dataset = record_block(tmp_path, scripted_block(BOX, 90, 1))
    part = dataset.manifest.parts[0]
    edit(dataset, column, set_row(4, value, kind))
    row = part.groups[0][0] + 4
    with pytest.raises(DataError, match=rf"'{part.name}', row {row}: column '{column}'"):
        read_all(dataset)


def test_an_action_that_its_mask_forbids_is_refused(tmp_path: Path) -> None:
    """Fault 33 of docs/faults.md. A row without a transition may hold any action."""
    block, spec = scripted_block(BOX, 60, 1), BOX.with_masks()
    allowed = torch.ones(60, 1, spec.num_actions)
    row = int((block.flags[:, 0] & SKIP == 0).nonzero()[5])
    allowed[block.flags & SKIP != 0] = 0.0
    block.obs = torch.cat((block.obs, allowed), dim=2)
    read_all(record_block(tmp_path / "right", block, spec))
    block.obs[row, 0, 2 + int(block.action[row, 0])] = 0.0
    with pytest.raises(DataError, match=r"column 'action' is \d, .* its mask allows"):
        read_all(record_block(tmp_path / "wrong", block, spec))


def test_a_column_of_another_type_is_named(tmp_path: Path) -> None:
    dataset = record_block(tmp_path, scripted_block(BOX, 90, 1))
    edit(dataset, "action", lambda values, _: pa.array(map(str, values)))
    with pytest.raises(DataError, match=r"row 0: column 'action' is string, and must be int32"):
        read_all(dataset)


def test_a_flipped_bit_is_noticed_while_reading(tmp_path: Path) -> None:
    dataset = record_block(tmp_path, scripted_block(BOX, 90, 1))
    path = dataset.local(dataset.manifest.parts[0])
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=path.name):
        read_all(dataset)


def test_a_killed_recording_is_merged_from_its_finished_files(tmp_path: Path) -> None:
    dataset = record_block(tmp_path, scripted_block(BOX, 300, 1))
    parts = dataset.manifest.parts
    (tmp_path / "manifest.json").unlink()
    (tmp_path / parts[-1].name).unlink()
    (tmp_path / parts[-1].name.replace(".parquet", ".json")).unlink()
    with pytest.raises(DataError, match="qfleet data merge"):
        Dataset(str(tmp_path))
    assert merge(str(tmp_path)).parts == parts[:-1]


def test_files_that_the_manifest_does_not_list_are_noticed_and_merged(tmp_path: Path) -> None:
    """A run is resumed, records more and is killed: the manifest is older than its files."""
    parts = record_block(tmp_path, scripted_block(BOX, 300, 1)).manifest.parts
    values = json.loads((tmp_path / "manifest.json").read_text())
    values["parts"] = values["parts"][:-2]
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    assert Dataset(str(tmp_path)).unlisted == 2
    merge(str(tmp_path))
    merged = Dataset(str(tmp_path))
    assert (merged.unlisted, merged.manifest.parts) == (0, parts)


def test_a_description_of_another_file_is_refused(tmp_path: Path) -> None:
    parts = record_block(tmp_path, scripted_block(BOX, 300, 1)).manifest.parts
    first, second = (tmp_path / part.name.replace(".parquet", ".json") for part in parts[:2])
    second.write_bytes(first.read_bytes())
    with pytest.raises(DataError, match=f"{second.name}.*describes '{parts[0].name}'"):
        merge(str(tmp_path))


def test_a_missing_file_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    parts = record_block(tmp_path, scripted_block(BOX, 300, 1)).manifest.parts
    (tmp_path / parts[1].name).unlink()
    with pytest.raises(DataError, match=rf"lacks 1 of .*'{parts[1].name}'.*qfleet data merge"):
        Dataset(str(tmp_path))
    assert merge(str(tmp_path)).parts == [parts[0], *parts[2:]]


PART: dict[str, Any] = {
    "name": "part-x-0.parquet",
    "size_bytes": 9,
    "sha256": "0" * 64,
    "groups": [[3, 2, 1]],
}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "x"},
        {"parts": 3},
        {"spec": {}},
        {"statistics": 3},
        {"statistics": {"obs_mean": [10**400, 1], "obs_variance": [1.0, 1.0], "obs_count": 3}},
        {"statistics": {"obs_mean": [1.0], "obs_variance": [1.0], "obs_count": 3}},
        {"statistics": {"obs_mean": [1.0, 1.0], "obs_variance": [1.0, -1.0], "obs_count": 3}},
        {"env": {"env": 3}},
        {"env": {"env": "Box-v0", "frame_stack": "many"}},
        {"env": {}},
        {"policy": 3},
        {"parts": [PART, PART]},
        *(
            {"parts": [PART | wrong]}
            for wrong in (
                {"name": "../x.parquet"},
                {"name": "part-../../x.parquet"},
                {"name": "/part-x.parquet"},
                {"name": 3},
                {"size_bytes": -1},
                {"size_bytes": 1.5},
                {"sha256": "0"},
                {"groups": [[3, 2]]},
                {"groups": [[2, 3, 1]]},
                {"groups": [[3, 2, -1]]},
                {"groups": [["3", 2, 1]]},
                {"groups": [[0, 0, 0]]},
                {"groups": 3},
                {"more": 1},
            )
        ),
    ],
)
def test_a_malformed_manifest_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    record_block(tmp_path, scripted_block(BOX, 30, 1))
    (tmp_path / PART["name"]).write_bytes(b"")
    values = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(values | {"parts": [PART]}))
    Dataset(str(tmp_path))  # the negative control
    (tmp_path / "manifest.json").write_text(json.dumps(values | change))
    with pytest.raises(DataError, match=r"manifest\.json' of .*(malformed|format)"):
        Dataset(str(tmp_path))
