"""The offline engine: the serial loop without environments, learning from a dataset.

A step of the clock is a transition read. The collector plays nothing; the memory returns every
transition of the dataset once per epoch, and each batch of them is one update. So schedules,
logs, evaluations and checkpoints are those of every other engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qfleet.agent.evaluation import evaluation_config
from qfleet.config.config import Config
from qfleet.config.trust import check_trust
from qfleet.core.errors import ConfigError, UserError
from qfleet.core.types import Block, Clock, Episode, StateDict
from qfleet.data.dataset_memory import DatasetMemory
from qfleet.data.manifest import Dataset, env_fields
from qfleet.engines import serial
from qfleet.engines.factories import make_learner
from qfleet.engines.loop import SameWeights
from qfleet.engines.parts import EngineHook, LoopParts, Setup
from qfleet.engines.placement import Placement
from qfleet.engines.torch_settings import set_threads
from qfleet.engines.tuning import apply_precision
from qfleet.envs.registry import check_env
from qfleet.networks.qnetwork import QNetwork

BLOCK_SAMPLES = 1024
"""Transitions per turn of the loop: enough to hide the cost of a turn."""
MAY_DIFFER = {"clip_rewards", "reward_scale", "imports", "max_episode_steps"}
"""Fields of a dataset that a run may set anew: they change neither observations nor actions."""


def dataset_fields(url: str, trust: bool) -> dict[str, Any]:
    """Return the fields of the environment that a dataset stores; they may name code to import."""
    fields = Dataset(url).manifest.origin.env if url else {}
    check_trust(Config(**fields), trust)
    return fields


def with_dataset(config: Config) -> Config:
    """Return the configuration of an offline run; of any other run, as it is."""
    if not config.data:
        return config
    manifest = Dataset(config.data).manifest
    recorded, ours = manifest.origin.env, env_fields(config)
    for name in recorded.keys() - MAY_DIFFER:
        if recorded[name] != ours[name]:
            raise ConfigError(
                f"{name} must be {recorded[name]!r}, as dataset '{config.data}' was recorded, got "
                f"{ours[name]!r}; leave it out, and use eval_env to evaluate elsewhere"
            )
    if Config(**manifest.origin.env).clip_rewards and not config.clip_rewards:
        raise ConfigError(
            f"dataset '{config.data}' has clipped rewards, whose sizes are lost; set clip_rewards"
        )
    batch_size = config.batch_size
    return config.replace(
        engine="offline" if config.engine == "auto" else config.engine,
        steps=config.epochs * manifest.transitions or config.steps,
        envs=1,
        learning_starts=0,
        train_freq=batch_size,
        gradient_steps=1,
        block_rows=max(1, BLOCK_SAMPLES // batch_size) * batch_size,
    )


def build(setup: Setup) -> LoopParts:
    """Create the parts. An environment is needed for evaluations only."""
    config, dataset = setup.config, Dataset(setup.config.data)
    spec, recorded = dataset.spec, Config(**dataset.manifest.origin.env)

    def rewards(reward: Tensor) -> Tensor:
        reward = reward / recorded.reward_scale
        return (reward.sign() if config.clip_rewards else reward) * config.reward_scale

    with contextlib.ExitStack() as made:
        place = Placement.of(config, spec, in_background=False)
        place = replace(place, replay=place.device)
        set_threads(config.threads, spec)
        clock = Clock(frame_skip=spec.frame_skip)
        timers = setup.make_timers("learner")
        memory = DatasetMemory(
            dataset, config.n_steps, config.gamma, config.data_memory_mb * 2**20,
            config.data_readers, setup.seeds.memory, place.replay, rewards,
        )  # fmt: skip
        made.callback(memory.close)
        learner = make_learner(config, spec, place, memory, clock, timers)
        apply_precision(config, learner.networks)
        if config.normalize_observations:
            _normalise(learner.online, dataset)
        notes, evaluator = list(place.notes), None
        try:
            check_env(evaluation_config(config).replace(eval_env=""))
            evaluator = setup.make_evaluator(learner.online, place.device, made)
        except UserError as error:
            notes.append(f"no evaluations: {error}")
        return LoopParts(
            setup=setup,
            spec=spec,
            device=place.device,
            env_seeds=[],
            clock=clock,
            timers=[timers],
            collector=NoCollector(),
            evaluator=evaluator,
            memory=memory,
            learner=learner,
            channel=SameWeights(),
            notes=notes,
            hooks=[EpochHook(memory)],
            closing=made.pop_all(),
        )


run = serial.run


def _normalise(network: QNetwork, dataset: Dataset) -> None:
    """Let the network normalise by the statistics of the dataset."""
    stored = dataset.manifest.statistics
    if stored is None or "obs_mean" not in stored:
        raise ConfigError(
            f"normalize_observations needs the statistics of '{dataset.url}'; run: qfleet data "
            f"stats {dataset.url}"
        )
    mean, variance = torch.tensor(stored["obs_mean"]), torch.tensor(stored["obs_variance"])
    network.set_statistics(mean, variance, stored["obs_count"])


class NoCollector:
    """A collector that plays nothing: its blocks only advance the clock."""

    def collect(self, rows: int) -> Block:
        empty = torch.empty(rows, 0)
        return Block(empty, empty, empty, empty)

    def take_episodes(self) -> list[Episode]:
        return []

    def exploration_rate(self) -> float:
        return 0.0

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, _state: StateDict) -> bool:
        return True


@dataclass
class EpochHook(EngineHook):
    """Reports how often the dataset was read."""

    memory: DatasetMemory

    def scalars(self, wall_s: float) -> Mapping[str, float | None]:  # noqa: ARG002
        done = self.memory.position / self.memory.transitions
        return {"data/epoch": self.memory.epoch + done}
