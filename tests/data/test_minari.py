"""Minari datasets in and out: the same episodes, with the environment's own numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qfleet.core.errors import ConfigError, DataError, UnsupportedEnvError
from qfleet.core.types import SKIP, TERMINATED, EnvSpec
from qfleet.data.manifest import Dataset
from qfleet.data.minari import export_minari, import_minari
from qfleet.data.operations import read_episodes, read_groups, validate
from qfleet.data.rows import Rows
from support.datasets import BOX, STACK, read_all, record_block, scripted_block

minari = pytest.importorskip("minari")
DISCRETE = EnvSpec(
    "Discrete-v0", (), "int64", 3, num_obs_values=300, first_obs_value=5, first_action=2
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def recorded(tmp_path: Path, spec: EnvSpec) -> Dataset:
    block = scripted_block(spec, 130, 2)
    if spec.num_obs_values:
        block.obs = block.obs.remainder(300)
    return record_block(tmp_path / "data", block, spec)


@pytest.mark.parametrize("spec", [BOX, DISCRETE], ids=["box", "discrete"])
def test_episodes_survive_the_way_out_and_back(spec: EnvSpec, tmp_path: Path) -> None:
    dataset = recorded(tmp_path, spec)
    assert export_minari(dataset, "test/episodes-v0") == len(read_episodes(dataset))
    back = import_minari("test/episodes-v0", str(tmp_path / "back"))
    validate(back)
    assert back.spec.num_actions == spec.num_actions
    assert back.spec.first_action == spec.first_action
    ours, theirs = read_all(dataset), read_all(back)

    def transitions(rows: object) -> list[tuple[object, ...]]:
        usable = rows.take(rows.flags & SKIP == 0)  # type: ignore[attr-defined]
        columns = (usable.action, usable.reward, usable.flags & TERMINATED, usable.step)
        obs = [tuple(np.atleast_1d(one).tolist()) for one in usable.obs]
        return sorted(zip(obs, *(column.tolist() for column in columns), strict=True))

    assert transitions(ours) == transitions(theirs)
    lengths = [sorted(e.length for e in read_episodes(one).values()) for one in (dataset, back)]
    assert lengths[0] == lengths[1]


def test_minari_holds_the_numbers_of_the_environment(tmp_path: Path) -> None:
    export_minari(recorded(tmp_path, DISCRETE), "test/own-v0")
    source = minari.load_dataset("test/own-v0")
    actions = np.concatenate([episode.actions for episode in source.iterate_episodes()])
    assert set(actions.tolist()) == {2, 3, 4}


def test_stacks_of_frames_are_exported_whole(tmp_path: Path) -> None:
    dataset = recorded(tmp_path, STACK)
    export_minari(dataset, "test/stacks-v0")
    for episode in minari.load_dataset("test/stacks-v0").iterate_episodes():
        observations = np.asarray(episode.observations)
        assert observations.shape == (len(episode) + 1, *STACK.obs_shape)
        assert not observations[0, :-1].any()  # nothing is before the first frame
        assert np.array_equal(observations[1:, :-1], observations[:-1, 1:])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    dataset = recorded(tmp_path, BOX)
    export_minari(dataset, "test/twice-v0")
    with pytest.raises(DataError, match="test/twice-v0"):
        export_minari(dataset, "test/twice-v0")
    with pytest.raises(DataError, match="test/missing-v0"):
        import_minari("test/missing-v0", str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="holds a dataset already"):
        import_minari("test/twice-v0", str(tmp_path / "data"))


def test_episodes_are_exported_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, groups = recorded(tmp_path, BOX), list[int]()
    total = sum(len(part.groups) for part in dataset.manifest.parts)

    def noted(dataset: Dataset) -> Iterator[Rows]:
        for rows in read_groups(dataset):
            groups.append(len(rows.action))
            yield rows

    def create(_name: str, episodes: Iterator[object], **_: object) -> None:
        next(episodes)
        assert 0 < len(groups) < total / 2  # the rest is still in the files
        assert sum(1 for _ in episodes) == len(read_episodes(dataset)) - 1

    monkeypatch.setattr("qfleet.data.minari.read_groups", noted)
    monkeypatch.setattr(minari, "create_dataset_from_buffers", create)
    assert export_minari(dataset, "test/lazy-v0") == len(read_episodes(dataset))
    assert len(groups) == total


def test_continuous_actions_are_refused(tmp_path: Path) -> None:
    from gymnasium.spaces import Box
    from minari.data_collector import EpisodeBuffer

    episode = EpisodeBuffer(
        id=0,
        observations=np.zeros((3, 2), np.float32),
        actions=np.zeros((2, 1), np.float32),
        rewards=np.zeros(2),
        terminations=np.array([False, True]),
        truncations=np.zeros(2, np.bool_),
        infos={},
    )
    with warnings.catch_warnings(action="ignore"):
        minari.create_dataset_from_buffers(
        "test/box-v0", [episode], observation_space=Box(-1, 1, (2,)),
        action_space=Box(-1, 1, (1,)), data_format="arrow",
        )  # fmt: skip
    with pytest.raises(UnsupportedEnvError, match="action space"):
        import_minari("test/box-v0", str(tmp_path / "new"))


def test_a_known_environment_is_named(tmp_path: Path) -> None:
    spec = EnvSpec("CartPole-v1", (4,), "float32", 2)
    dataset = record_block(tmp_path / "data", scripted_block(spec, 60, 1), spec)
    export_minari(dataset, "test/known-v0")
    assert import_minari("test/known-v0", str(tmp_path / "back")).spec == spec
