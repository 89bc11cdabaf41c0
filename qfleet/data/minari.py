"""Minari datasets (Farama Foundation) in and out; the package minari is imported at first use.

Minari stores whole episodes of an environment's own observations and actions. Probabilities of
actions have no place there.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, DataError, one_line
from qfleet.core.types import FIRST, SKIP, TERMINATED, EnvSpec
from qfleet.data.manifest import Dataset, Origin
from qfleet.data.operations import by_episode, read_episodes, read_groups
from qfleet.data.rows import Rows, concatenate
from qfleet.data.writer import Writer, check_target
from qfleet.envs.spaces import describe


def _minari(module: str = "minari") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            "Minari datasets need the package minari, which is not installed; pip install "
            "'qfleet[data]'"
        ) from None


def import_minari(name: str, url: str) -> Dataset:
    """Copy a Minari dataset of this machine (``minari download NAME``) to ``url``."""
    check_target(url)
    try:
        source = _minari().load_dataset(name)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"cannot load Minari dataset '{name}': {one_line(error)}") from None
    env = source.env_spec
    env_id = name if env is None else env.id
    spec = describe(env_id, source.observation_space, source.action_space)
    kwargs = {} if env is None else dict(env.kwargs)
    config = Config(env=env_id, env_kwargs=json.dumps(kwargs, default=str))
    writer = Writer(url, Origin.of(config, spec, {"minari": name}), "0")
    for number, episode in enumerate(source.iterate_episodes()):
        rows = _rows_of(episode, spec, writer.first_episode + number)
        if not (np.isfinite(rows.obs).all() and np.isfinite(rows.reward).all()):
            raise DataError(
                f"episode {number} of Minari dataset '{name}' has an observation or a reward that "
                "is not finite (as float32); it cannot be learnt from"
            )
        writer.add(rows)
    if writer.close() is None:
        raise DataError(f"Minari dataset '{name}' has no episodes")
    return Dataset(url)


def _rows_of(episode: Any, spec: EnvSpec, number: int) -> Rows:
    """Return the rows of an episode: one per action, and one with the last observation."""
    count = len(episode.rewards)
    obs = np.asarray(episode.observations)
    obs = (obs - spec.first_obs_value if spec.num_obs_values else obs).astype(spec.obs_dtype)
    flags = np.zeros(count + 1, np.uint8)
    flags[:count] = np.asarray(episode.terminations) * np.uint8(TERMINATED)
    flags[0] |= FIRST
    flags[count] |= SKIP
    return Rows(
        obs=obs.reshape(count + 1, *spec.frame_shape),
        action=np.append(np.asarray(episode.actions) - spec.first_action, 0),
        reward=np.append(episode.rewards, 0.0).astype(np.float32),
        flags=flags,
        truncated=np.append(np.asarray(episode.truncations, dtype=np.bool_), False),
        episode=np.full(count + 1, number),
        step=np.arange(count + 1),
        probability=np.full(count + 1, np.nan, np.float32),
    )


def export_minari(dataset: Dataset, name: str) -> int:
    """Copy a dataset into a new Minari dataset of this machine; return its episodes."""
    spec, collector = dataset.spec, _minari("minari.data_collector")
    if spec.raw_obs or spec.raw_actions:
        raise ConfigError(
            f"dataset '{dataset.url}' holds converted observations or actions, which Minari cannot "
            "take; export datasets of Box or Discrete spaces"
        )
    bare, count = spec.unmasked, 0
    is_bytes = bare.obs_dtype == "uint8"
    low, high = (0.0, 255.0) if is_bytes else (-np.inf, np.inf)
    space: Any = Box(low, high, bare.obs_shape, np.dtype(bare.obs_dtype).type)
    if spec.num_obs_values:
        space = Discrete(spec.num_obs_values, start=spec.first_obs_value)

    def episodes() -> Iterator[Any]:
        nonlocal count
        for count, (rows, last) in enumerate(_whole_episodes(dataset), 1):
            terminated = rows.flags & TERMINATED != 0
            truncated = np.zeros(len(terminated), np.bool_)
            truncated[-1] = not terminated[-1]
            yield collector.EpisodeBuffer(
                id=count - 1,
                observations=_observations(np.concatenate((rows.obs, last)), spec),
                actions=rows.action + spec.first_action,
                rewards=rows.reward,
                terminations=terminated,
                truncations=truncated,
                infos={},
            )

    env_id, kwargs = spec.env_id, json.loads(dataset.manifest.origin.env.get("env_kwargs", "{}"))
    known = gymnasium.spec(env_id) if env_id in gymnasium.registry and not kwargs else None
    try:
        with warnings.catch_warnings(action="ignore"):  # about authors, code and descriptions
            _minari().create_dataset_from_buffers(
                name,
                episodes(),  # it says a list, and reads one episode at a time
                env=known,
                observation_space=space,
                action_space=Discrete(spec.num_actions, start=spec.first_action),
                algorithm_name=str(dataset.manifest.origin.policy.get("algo", "unknown")),
                data_format="arrow",
            )
    except (OSError, ValueError, AssertionError, ImportError) as error:
        raise DataError(f"cannot write Minari dataset '{name}': {one_line(error)}") from None
    return count


def _whole_episodes(dataset: Dataset) -> Iterator[tuple[Rows, NDArray[Any]]]:
    """Yield the transitions of every episode, and the observation after the last one."""
    lengths = {number: one.length for number, one in read_episodes(dataset).items()}
    waiting: dict[int, list[Rows]] = {}
    for rows in read_groups(dataset):
        for piece in by_episode(rows):
            number = int(piece.episode[0])
            usable = piece.flags & SKIP == 0
            if not usable.any():
                continue
            waiting.setdefault(number, []).append(piece.take(usable))
            if sum(len(one.action) for one in waiting[number]) == lengths[number]:
                whole = concatenate(waiting.pop(number))
                if (np.diff(whole.step) != 1).any():
                    raise DataError(
                        f"episode {number} of '{dataset.url}' lacks a step, whose reward was not "
                        "finite; Minari datasets cannot say so"
                    )
                after = piece.obs[piece.step == whole.step[-1] + 1]
                # After a termination the last observation may be missing; it is never used.
                yield whole, after[:1] if len(after) else whole.obs[-1:]


def _observations(frames: NDArray[Any], spec: EnvSpec) -> NDArray[Any]:
    """Return the environment's own observations: without masks, and with stacks of frames."""
    if spec.is_masked:
        frames = frames.reshape(len(frames), -1)[:, : -spec.num_actions]
    frames = frames.reshape(len(frames), *spec.unmasked.frame_shape)
    if spec.num_obs_values:
        return frames + spec.first_obs_value
    if spec.frame_stack == 1:
        return frames
    blank = np.zeros((spec.frame_stack - 1, *frames.shape[1:]), frames.dtype)
    padded = np.concatenate((blank, frames))
    return np.stack([padded[i : i + len(frames)] for i in range(spec.frame_stack)], axis=1)
