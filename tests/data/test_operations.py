"""Validate, statistics, split and shard: whole datasets in, files or numbers out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qfleet.core.errors import ConfigError, DataError
from qfleet.core.types import SKIP, Block, EnvSpec
from qfleet.data.manifest import Dataset
from qfleet.data.operations import (
    fit_statistics,
    read_episodes,
    shard,
    split,
    store_statistics,
    validate,
)
from support.datasets import BOX, STACK, read_all, record_block, scripted_block


def transitions(dataset: Dataset) -> set[tuple[float, ...]]:
    rows = read_all(dataset)
    usable = rows.take(rows.flags & SKIP == 0)
    found = [tuple(obs.reshape(-1).tolist()) for obs in usable.obs]
    assert len(found) == len(set(found))
    return set(found)


def test_a_good_dataset_is_valid_and_an_edited_file_is_not(tmp_path: Path) -> None:
    dataset = record_block(tmp_path, scripted_block(BOX, 200, 2))
    validate(dataset)
    path = dataset.local(dataset.manifest.parts[1])
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(DataError, match=path.name):
        validate(dataset)
    path.unlink()
    with pytest.raises(DataError, match=path.name):
        validate(dataset)


@pytest.mark.parametrize("spec", [BOX, STACK], ids=["floats", "pixels"])
def test_episodes_and_statistics_are_those_of_the_transitions(
    spec: EnvSpec, tmp_path: Path
) -> None:
    block = scripted_block(spec, 300, 2, seed=1)
    block.flags[-1] |= SKIP
    dataset = record_block(tmp_path, block, spec)
    usable = (block.flags & SKIP == 0).numpy()
    obs, reward = block.obs.numpy()[usable], block.reward.numpy()[usable]
    episodes = read_episodes(dataset)
    assert sum(one.length for one in episodes.values()) == usable.sum()
    np.testing.assert_allclose(sum(one.reward for one in episodes.values()), reward.sum(), 1e-4)
    found = fit_statistics(dataset)
    np.testing.assert_allclose(found["obs_mean"], obs.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found["obs_variance"], obs.var(axis=0), rtol=1e-4)
    assert found["obs_count"] == usable.sum()
    assert found["actions"] == np.bincount(block.action.numpy()[usable]).tolist()
    assert found["reward"]["max"] == pytest.approx(reward.max())


def test_masks_are_no_part_of_the_statistics(tmp_path: Path) -> None:
    block = scripted_block(BOX.with_masks(), 100, 1)
    block.obs[..., -BOX.num_actions :] = 1
    found = fit_statistics(record_block(tmp_path, block, BOX.with_masks()))
    assert len(found["obs_mean"]) == 2


@pytest.mark.parametrize("stratify", [False, True])
def test_splits_hold_every_transition_once_and_whole_episodes(
    stratify: bool, tmp_path: Path
) -> None:
    dataset = record_block(tmp_path / "all", scripted_block(STACK, 900, 2), STACK)
    parts = split(dataset, str(tmp_path / "split"), (0.6, 0.2, 0.2), stratify)
    episodes = [set(read_episodes(one)) for one in parts.values()]
    assert not set.intersection(*episodes)
    assert set.union(*episodes) == set(read_episodes(dataset))
    assert set.union(*map(transitions, parts.values())) == transitions(dataset)
    total = dataset.manifest.transitions
    assert sum(one.manifest.transitions for one in parts.values()) == total
    assert 0.5 < parts["train"].manifest.transitions / total < 0.7
    if stratify:
        means = [np.mean([e.reward for e in read_episodes(one).values()]) for one in parts.values()]
        assert max(means) - min(means) < 0.5


def test_a_split_does_not_move_episodes_when_others_are_added(tmp_path: Path) -> None:
    block = scripted_block(BOX, 600, 1)
    few = record_block(tmp_path / "few", Block(*(c[:300] for c in _columns(block))))
    many = record_block(tmp_path / "many", block)
    places = [
        {number: name for name, one in parts.items() for number in read_episodes(one)}
        for parts in (
            split(few, str(tmp_path / "a"), (0.5, 0.25, 0.25), stratify=False),
            split(many, str(tmp_path / "b"), (0.5, 0.25, 0.25), stratify=False),
        )
    ]
    assert places[0].items() <= places[1].items()
    assert len(places[1]) > len(places[0])


def _columns(block: Block) -> list[torch.Tensor]:
    return [block.obs, block.action, block.reward, block.flags]


def test_statistics_of_splits_are_those_of_the_training_split(tmp_path: Path) -> None:
    dataset = record_block(tmp_path / "all", scripted_block(BOX, 400, 2))
    parts = split(dataset, str(tmp_path / "split"), (0.5, 0.25, 0.25), stratify=False)
    fitted = fit_statistics(parts["train"])
    assert all(one.manifest.statistics == fitted for one in parts.values())
    assert fitted != fit_statistics(parts["test"])  # the negative control


def test_shards_are_in_proportion_to_speeds(tmp_path: Path) -> None:
    dataset = record_block(tmp_path / "all", scripted_block(BOX, 900, 2))
    shards = shard(dataset, str(tmp_path / "shards"), (1.0, 1.0, 2.0))
    counts = np.array([one.manifest.transitions for one in shards.values()])
    assert counts.sum() == dataset.manifest.transitions
    np.testing.assert_allclose(counts / counts.sum(), (0.25, 0.25, 0.5), atol=0.01)
    assert set.union(*map(transitions, shards.values())) == transitions(dataset)


def test_wrong_fractions_and_taken_folders_are_refused(tmp_path: Path) -> None:
    dataset = record_block(tmp_path / "all", scripted_block(BOX, 60, 1))
    with pytest.raises(ConfigError, match="fractions"):
        split(dataset, str(tmp_path / "x"), (0.5, 0.2, 0.2), stratify=False)
    with pytest.raises(ConfigError, match="speeds"):
        shard(dataset, str(tmp_path / "x"), (1.0, 0.0))
    shard(dataset, str(tmp_path / "x"), (1.0,))
    with pytest.raises(ConfigError, match="holds a dataset already"):
        shard(dataset, str(tmp_path / "x"), (1.0,))


@pytest.mark.parametrize("rows", [200, 420])
def test_a_stratified_split_of_few_episodes_has_its_shares(rows: int, tmp_path: Path) -> None:
    dataset = record_block(tmp_path / "all", scripted_block(BOX, rows, 2))
    total = len(read_episodes(dataset))
    parts = split(dataset, str(tmp_path / "split"), (0.6, 0.2, 0.2), stratify=True)
    counts = [len(read_episodes(one)) for one in parts.values()]
    assert sum(counts) == total
    np.testing.assert_allclose(counts, np.array((0.6, 0.2, 0.2)) * total, atol=2)


def test_a_split_without_an_episode_is_refused(tmp_path: Path) -> None:
    dataset = record_block(tmp_path / "all", scripted_block(BOX, 20, 1))
    assert len(read_episodes(dataset)) < 9
    with pytest.raises(ConfigError, match="none of the"):
        split(dataset, str(tmp_path / "split"), (0.98, 0.01, 0.01), stratify=True)


def test_shards_keep_the_statistics_and_their_numbers(tmp_path: Path) -> None:
    dataset = record_block(tmp_path / "data", scripted_block(BOX, 100, 1))
    store_statistics(dataset, fit_statistics(dataset))
    made = shard(dataset, f"{tmp_path}/shards/", (1.0, 2.0))
    assert [one.url for one in made.values()] == [f"{tmp_path}/shards/{k}" for k in range(2)]
    for k in range(2):
        found = Dataset(str(tmp_path / "shards" / str(k)))
        assert found.manifest.statistics == dataset.manifest.statistics is not None


@pytest.mark.parametrize("speeds", [(1.0,) * 200, (1.0, 1e9)])
def test_a_shard_without_episodes_is_refused(speeds: tuple[float, ...], tmp_path: Path) -> None:
    dataset = record_block(tmp_path / "data", scripted_block(BOX, 100, 1))
    with pytest.raises(ConfigError, match=r"none of the \d+ episodes"):
        shard(dataset, str(tmp_path / "shards"), speeds)
    assert not (tmp_path / "shards").exists()
