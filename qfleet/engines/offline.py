"""The offline engine: the serial loop without environments, learning from a dataset.

A step of the clock is a transition read. The collector plays nothing; the memory returns every
transition of the dataset once per epoch, and each batch of them is one update. So schedules,
logs, evaluations and checkpoints are those of every other engine.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qfleet.agent.evaluation import HostEvaluator, evaluation_config
from qfleet.config.config import Config
from qfleet.config.trust import check_trust
from qfleet.core.errors import ConfigError, EnvironmentFault, UserError
from qfleet.core.seeding import Seeds
from qfleet.core.types import Block, Clock, EnvSpec, Episode, StateDict, Updater
from qfleet.data.dataset_memory import BatchShare, DatasetMemory
from qfleet.data.manifest import Dataset, Manifest, Origin, env_fields
from qfleet.engines import serial
from qfleet.engines.factories import make_learner
from qfleet.engines.loop import SameWeights
from qfleet.engines.parts import EngineHook, LoopParts, Setup
from qfleet.engines.placement import Placement
from qfleet.engines.torch_settings import set_threads
from qfleet.engines.tuning import apply_precision
from qfleet.envs.factory import make_envs
from qfleet.envs.registry import check_env
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.faults import FaultLog

BLOCK_SAMPLES = 1024
"""Transitions per turn of the loop: enough to hide the cost of a turn."""
LOOP = {"envs": 1, "learning_starts": 0, "gradient_steps": 1}
"""Fields of the loop that are set by a run with a dataset, besides ``train_freq``."""
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
    manifest, batch_size = check_datasets(config), config.batch_size
    return config.replace(
        engine="offline" if config.engine in ("auto", "serial") else config.engine,
        steps=config.epochs * manifest.transitions or config.steps,
        **{**LOOP, "train_freq": batch_size},
        # At most an epoch, because runs look at their metrics between blocks.
        block_rows=max(1, min(BLOCK_SAMPLES, manifest.transitions) // batch_size) * batch_size,
    )


def check_datasets(config: Config) -> Manifest:
    """Raise unless the run can use both datasets; return the manifest of ``data``."""
    data, ours = Dataset(config.data).manifest, env_fields(config)
    for name, recorded in sorted(data.origin.env.items()):
        if name not in MAY_DIFFER and recorded != ours[name]:
            raise ConfigError(
                f"{name} must be {recorded!r}, as dataset '{config.data}' was recorded, got "
                f"{ours[name]!r}; leave it out, and use eval_env to evaluate elsewhere"
            )
    if Config(**data.origin.env).clip_rewards and not config.clip_rewards:
        raise ConfigError(
            f"dataset '{config.data}' has clipped rewards, whose sizes are lost; set clip_rewards"
        )
    if config.validation_data:
        _check_split(config, data.origin, Dataset(config.validation_data).manifest.origin)
    return data


def _check_split(config: Config, data: Origin, validation: Origin) -> None:
    """Raise ConfigError unless both datasets are of one environment."""
    ours, recorded = env_fields(config), validation.env
    others = [n for n in sorted(recorded.keys() - MAY_DIFFER) if recorded[n] != ours[n]]
    others += ["observations or actions"] if validation.spec != data.spec else []
    others += ["clip_rewards"] if recorded.get("clip_rewards") and not config.clip_rewards else []
    if others:
        raise ConfigError(
            f"validation_data '{config.validation_data}' has other {others[0]} than data "
            f"'{config.data}'; use a split of the same dataset"
        )


def with_given(config: Config, given: Collection[str]) -> Config:
    """Refuse ``given`` options without an effect; given steps replace a stored ``epochs``."""
    if not config.data:
        return config
    own = {**LOOP, "train_freq": config.batch_size}
    for name in (*own, "replay_dir", "replay_device", "replay_compression"):
        value = getattr(config, name)
        if name in given and value not in (getattr(Config(), name), own.get(name)):
            raise ConfigError(
                f"{name} {value} has no effect with data, where every batch is an update and the "
                "dataset is the replay memory; leave it out"
            )
    both = "steps" in given and config.epochs > 0
    if both and "epochs" in given:
        raise ConfigError(
            f"steps {config.steps} and epochs {config.epochs} both set the length; give one of them"
        )
    return config.replace(epochs=0) if both else config


def make_dataset_memory(
    config: Config,
    dataset: Dataset,
    seed: int,
    device: torch.device,
    share: BatchShare | None = None,
) -> DatasetMemory:
    """Return the memory of a dataset; rewards are clipped and scaled as configured."""
    recorded = Config(**dataset.manifest.origin.env)

    def rewards(reward: Tensor) -> Tensor:
        reward = reward / recorded.reward_scale
        return (reward.sign() if config.clip_rewards else reward) * config.reward_scale

    memory_bytes = config.data_memory_mb * 2**20
    return DatasetMemory(
        dataset, config.n_steps, config.gamma, memory_bytes, config.data_readers, seed, device,
        rewards, share,
    )  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """What workers and ranks, which reuse this engine, replace in it."""

    place: Callable[[Config, EnvSpec, bool], Placement] = Placement.of
    updater: Callable[..., Updater] | None = None
    """``updater(weights, timers=…)``; None: the updater of the configuration."""
    parts: Callable[..., LoopParts] = LoopParts
    order_seed: int | None = None
    """Seed of the order, which all of them share; None: that of the configuration."""
    share: BatchShare | None = None


def build(setup: Setup, variant: Variant = Variant()) -> LoopParts:  # noqa: B008 (it is frozen)
    """Create the parts. An environment is needed for evaluations only."""
    config, dataset = setup.config, Dataset(setup.config.data)
    spec = dataset.spec
    with contextlib.ExitStack() as made:
        place = variant.place(config, spec, False)
        place = replace(place, replay=place.device)
        set_threads(config.threads, spec)
        clock = Clock(frame_skip=spec.frame_skip)
        timers = setup.make_timers("learner")
        seed = Seeds.of(config.seed if variant.order_seed is None else variant.order_seed).memory
        memory = make_dataset_memory(config, dataset, seed, place.replay, variant.share)
        made.callback(memory.close)
        updater = variant.updater and functools.partial(variant.updater, timers=timers)
        learner = make_learner(config, spec, place, memory, clock, timers, updater_factory=updater)
        apply_precision(config, learner.networks)
        if config.normalize_observations:
            _normalise(learner.online, dataset)
        notes = list(place.notes)
        may_centre = config.engine == "offline" and ":" not in config.network
        if spec.obs_dtype == "uint8" and may_centre and not config.normalize_observations:
            notes.append(
                "pixels with a constant background are learnt from much faster without their "
                f"mean: qfleet data stats {dataset.url}, then train with --normalize-observations"
            )
        evaluator = make_evaluator_if_possible(
            setup, spec, learner.online, place.device, made, notes
        )
        return variant.parts(
            setup=setup,
            spec=spec,
            device=place.device,
            env_seeds=[],
            clock=clock,
            timers=[timers],
            collector=NoCollector(config.step_latency_s),
            evaluator=evaluator,
            memory=memory,
            learner=learner,
            channel=SameWeights(),
            notes=notes,
            hooks=[EpochHook(clock, memory.transitions)],
            closing=made.pop_all(),
        )


run = serial.run


def make_evaluator_if_possible(
    setup: Setup,
    spec: EnvSpec,
    network: QNetwork,
    device: torch.device,
    made: contextlib.ExitStack,
    notes: list[str],
) -> HostEvaluator | None:
    """Return the evaluator; None and a note if the environment cannot be made, or is another."""
    config = evaluation_config(setup.config).replace(eval_env="")
    try:
        check_env(config)
        with contextlib.closing(
            make_envs(config, 1, 0, training=False, on_fault=FaultLog())
        ) as envs:
            played = envs.spec.spaces
        if played != spec.spaces:
            raise ConfigError(
                f"environment '{config.env}' has observations {played}; the dataset {spec.spaces}"
            )
    except (UserError, EnvironmentFault) as error:
        notes.append(f"no evaluations: {error}")
        return None
    return setup.make_evaluator(network, device, made)


def _normalise(network: QNetwork, dataset: Dataset) -> None:
    """Let the network normalise by the statistics of the dataset."""
    stored = dataset.manifest.statistics
    if stored is None or "obs_mean" not in stored:
        raise ConfigError(
            f"normalize_observations needs the statistics of '{dataset.url}'; run: qfleet data "
            f"stats {dataset.url}"
        )
    network.set_statistics(stored)


class NoCollector:
    """A collector that plays nothing: its blocks only advance the clock."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self._latency_s = latency_s
        self.rows_left: int | None = None
        """Most rows that further blocks have together; None: no limit."""

    def collect(self, rows: int) -> Block:
        if self.rows_left is not None:
            rows = min(rows, self.rows_left)
            self.rows_left -= rows
        if self._latency_s:
            time.sleep(rows * self._latency_s)
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

    clock: Clock
    transitions: int

    def scalars(self, wall_s: float) -> Mapping[str, float | None]:  # noqa: ARG002
        return {"data/epoch": self.clock.env_steps / self.transitions}
