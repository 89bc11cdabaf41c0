"""Operations on whole datasets, one row group at a time: check, describe, split, shard."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qfleet.core.errors import ConfigError, DataError
from qfleet.core.types import SKIP
from qfleet.data.manifest import MANIFEST, Dataset, check_file
from qfleet.data.rows import PartFile, Rows
from qfleet.data.writer import Writer, check_target

SPLITS = ("train", "validation", "test")
STRATA = 10
"""Equal parts of the episodes, by return, that are split alike when splits are stratified."""
GOLDEN = (5**0.5 - 1) / 2


class EpisodeInfo(NamedTuple):
    reward: float
    """Sum of its rewards, as they are recorded."""
    length: int


def read_groups(dataset: Dataset) -> Iterator[Rows]:
    """Yield the rows of every row group, in the order of the files."""
    for part in dataset.manifest.parts:
        file = PartFile(part, dataset.local(part), dataset.spec)
        for group in range(len(part.groups)):
            yield file.read(group)


def validate(dataset: Dataset) -> None:
    """Raise DataError at the first file whose checksum, or row whose value, is wrong."""
    for part in dataset.manifest.parts:
        check_file(part, dataset.local(part))
    for _ in read_groups(dataset):
        pass


def read_episodes(dataset: Dataset) -> dict[int, EpisodeInfo]:
    """Return the episodes by number, without reading observations."""
    found: dict[int, EpisodeInfo] = {}
    for part in dataset.manifest.parts:
        file = PartFile(part, dataset.local(part), dataset.spec)
        for group in range(len(part.groups)):
            episode, reward, skip = file.read_columns(group, ("episode", "reward", "skip"))
            numbers, which = np.unique(episode[~skip], return_inverse=True)
            sums = np.bincount(which, reward[~skip].astype(np.float64))
            lengths = np.bincount(which)
            for number, total, length in zip(numbers, sums, lengths, strict=True):
                before = found.get(int(number), EpisodeInfo(0.0, 0))
                found[int(number)] = EpisodeInfo(
                    before.reward + float(total), before.length + int(length)
                )
    return found


def fit_statistics(dataset: Dataset) -> dict[str, Any]:
    """Return what the transitions are: observations, rewards, actions, and episodes."""
    spec = dataset.spec
    if not dataset.manifest.transitions:
        raise DataError(f"dataset '{dataset.url}' has no transitions; record more steps")
    actions, rewards = np.zeros(spec.num_actions, np.int64), list[np.ndarray[Any, Any]]()
    count, mean, spread = 0, np.zeros(1), np.zeros(1)
    for rows in read_groups(dataset):
        usable = rows.take(rows.flags & SKIP == 0)
        if not len(usable.action):
            continue
        actions += np.bincount(usable.action, minlength=spec.num_actions)
        rewards.append(usable.reward)
        if not spec.num_obs_values:
            shape = spec.unmasked.frame_shape  # without masks, which are behind the frames
            frames = usable.obs.reshape(len(usable.obs), -1)[:, : math.prod(shape)]
            # Sums of a row group's pixels are exact in float32, and take a third of the time.
            wide = np.float32 if spec.obs_dtype == "uint8" else np.float64
            obs = frames.reshape(-1, *shape).astype(wide)
            # Chan et al. 1979: one pass, for any number of groups.
            distance = obs.mean(axis=0) - mean
            count += len(obs)
            share = len(obs) / count
            mean = mean + distance * share
            within = obs.var(axis=0) * len(obs)
            spread = spread + within + distance**2 * len(obs) * (1 - share)
    episodes = list(read_episodes(dataset).values())
    statistics: dict[str, Any] = {
        "reward": _describe(np.concatenate(rewards)),
        "actions": actions.tolist(),
        "return": _describe([episode.reward for episode in episodes]),
        "length": _describe([episode.length for episode in episodes]),
    }
    if not spec.num_obs_values:
        statistics |= {
            "obs_mean": mean.tolist(),
            "obs_variance": (spread / count).tolist(),
            "obs_count": count,
        }
    return statistics


def _describe(values: Any) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    return {
        "mean": float(array.mean()),
        "std": float(array.std()),
        "min": float(array.min()),
        "max": float(array.max()),
    }


def store_statistics(dataset: Dataset, statistics: dict[str, Any]) -> None:
    dataset.manifest = dataclasses.replace(dataset.manifest, statistics=statistics)
    dataset.store.write(MANIFEST, dataset.manifest.to_json().encode())


def split(
    dataset: Dataset, url: str, fractions: Sequence[float], stratify: bool
) -> dict[str, Dataset]:
    """Copy every episode into one of ``url``/train, /validation and /test; return these.

    An episode's number decides, so that the same episodes are always together and later ones move
    none. ``stratify``: the splits have episodes of all returns in equal shares; then an episode's
    place also depends on the other episodes. Statistics are those of the training split, in all.
    """
    if len(fractions) != 3 or not (min(fractions) >= 0 and abs(sum(fractions) - 1) <= 1e-6):
        raise ConfigError(f"fractions must be three numbers ≥ 0 that add up to 1, got {fractions}")
    edges = np.cumsum(fractions)[:2]
    episodes = read_episodes(dataset)
    draws = {number: _draw(number) for number in episodes}
    if stratify:
        by_return = sorted(episodes, key=lambda number: (episodes[number].reward, number))
        strata = np.array_split(np.array(by_return), STRATA)
        ordered = [n for stratum in strata for n in sorted(stratum.tolist(), key=_draw)]
        # Multiples of the golden ratio are spread evenly, within strata and over all of them.
        draws = {number: ((i + 0.5) * GOLDEN) % 1 for i, number in enumerate(ordered)}
    places = {n: int(np.searchsorted(edges, draw, side="right")) for n, draw in draws.items()}
    for place, (name, fraction) in enumerate(zip(SPLITS, fractions, strict=True)):
        if fraction > 0 and place not in places.values():
            raise ConfigError(
                f"none of the {len(episodes)} episodes is in '{name}'; record more episodes, "
                "or set its fraction to 0"
            )
    made = _distribute(dataset, url, SPLITS, places)
    if "train" in made:
        statistics = fit_statistics(made["train"])
        for one in made.values():
            store_statistics(one, statistics)
    return made


def shard(dataset: Dataset, url: str, speeds: Sequence[float]) -> dict[str, Dataset]:
    """Copy the episodes into ``url``/0, /1 …, with transitions in proportion to ``speeds``."""
    if len(speeds) < 1 or min(speeds) <= 0:
        raise ConfigError(f"speeds must be numbers > 0, one per shard, got {list(speeds)}")
    loads, places = np.zeros(len(speeds)), dict[int, int]()
    episodes = read_episodes(dataset)
    # The longest first: the rest then evens out what they leave.
    for number in sorted(episodes, key=lambda number: (-episodes[number].length, number)):
        places[number] = int(np.argmin((loads + episodes[number].length) / speeds))
        loads[places[number]] += episodes[number].length
    if empty := sorted(set(range(len(speeds))) - set(places.values())):
        raise ConfigError(
            f"shard {empty[0]} of {len(speeds)} would get none of the {len(episodes)} episodes; "
            "give fewer or more similar speeds"
        )
    made = _distribute(dataset, url, [str(k) for k in range(len(speeds))], places)
    if dataset.manifest.statistics is not None:
        for one in made.values():
            store_statistics(one, dataset.manifest.statistics)
    return made


def _draw(episode: int) -> float:
    """Return a number in [0, 1) that depends on nothing but the episode's number."""
    digest = hashlib.sha256(str(episode).encode()).digest()
    return int.from_bytes(digest[:6], "little") / 2**48


def _distribute(
    dataset: Dataset, url: str, names: Sequence[str], places: Mapping[int, int]
) -> dict[str, Dataset]:
    """Copy each episode to the dataset below ``url`` whose name's place ``places`` gives it.

    Return the datasets that got rows, by name.
    """
    urls = [f"{url.rstrip('/')}/{name}" for name in names]
    for one in urls:
        check_target(one)
    writers = [Writer(one, dataset.manifest.origin, "0") for one in urls]
    for rows in read_groups(dataset):
        for piece in by_episode(rows):
            place = places.get(int(piece.episode[0]))
            if place is not None:  # None: an episode without transitions
                writers[place].add(piece)
    for writer in writers:  # before a store may fail: `qfleet data merge` then completes each
        writer.finish_file()
    closed = [writer.close() for writer in writers]
    return {
        name: Dataset(one)
        for name, one, manifest in zip(names, urls, closed, strict=True)
        if manifest is not None
    }


def by_episode(rows: Rows) -> Iterator[Rows]:
    """Yield consecutive rows with the same episode number; SKIP copies have that of theirs."""
    cuts = np.flatnonzero(np.diff(rows.episode)) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(rows.episode)], strict=True):
        yield rows.take(slice(start, stop))
