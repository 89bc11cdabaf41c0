"""The pipeline engine: collecting goes on in a thread while the learner learns.

It is the serial loop with its parts placed otherwise: the actor works one block ahead in a thread
with a network of its own, environments step in their own threads or processes, inference runs where
it is fastest, and on an accelerator the updates of a block are one launch that the host does not
wait for. Blocks enter the memory and updates are made in the order of ``serial``, so the replay
ratio is exact.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.accelerator.compiling import switch
from qfleet.accelerator.stream_timer import StreamTimer
from qfleet.accelerator.streams import has_streams
from qfleet.agent.actor import Actor, Inline
from qfleet.agent.ahead import Ahead
from qfleet.agent.device_inference import DeviceInference
from qfleet.agent.inference import HostInference, Inference
from qfleet.agent.learner import Learner
from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.agent.schedules import rows_per_block
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds
from qfleet.core.types import (
    Clock,
    Collector,
    EnvSpec,
    Memory,
    Updater,
    VectorEnv,
    WeightsChannel,
)
from qfleet.engines import serial
from qfleet.engines.evaluators import make_host_evaluator
from qfleet.engines.factories import make_learner, make_memory
from qfleet.engines.loop import SameWeights
from qfleet.engines.parts import EngineHook, LoopParts, Setup
from qfleet.engines.placement import Acting, Placement, inference_rate, place_inference
from qfleet.engines.recording import Prepared, prepare_learner
from qfleet.engines.stage_rates import Stages, env_rate, learner_rate, make_stages
from qfleet.engines.torch_settings import set_threads
from qfleet.engines.tuning import Choice, Tuning, apply_precision
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.bottleneck import StageRates
from qfleet.telemetry.timers import Timers

BLOCKS_AHEAD = 4
"""Blocks that an actor in a thread fills in turn: one is filled while others are copied."""


@dataclass(frozen=True)
class Variant:
    """What the ranks of an all-reduce, which reuse this pipeline, replace in it."""

    place: Callable[[Config, EnvSpec, bool], Placement] = Placement.of
    memory: Callable[..., Memory] = make_memory
    updater: Callable[..., Updater] | None = None
    """``updater(weights, timers=…, capturable=…)``; None: the updater of the configuration."""
    network: Callable[[EnvSpec], QNetwork] | None = None
    """Makes the learner's networks; None: those of the configuration."""
    inference: Callable[..., HostInference] = HostInference
    """Acts in turn with learning."""
    parts: Callable[..., LoopParts] = LoopParts
    ladder: NDArray[np.float32] | None = None
    """One constant ε per env."""
    counting: Config | None = None
    """The settings by which the clock counts; None: those of the run."""
    agree: Callable[[Choice], Choice] | None = None
    """Returns the choice to record, given the one made here."""


def build(setup: Setup, variant: Variant = Variant()) -> LoopParts:  # noqa: B008 (it is frozen)
    """Create the parts."""
    config, seeds = setup.config, setup.seeds
    counting = variant.counting or config
    with contextlib.ExitStack() as made:
        envs = setup.make_envs(made)
        spec = envs[0].spec
        place = variant.place(config, spec, any(group.in_background for group in envs))
        set_threads(config.threads, spec)
        clock = Clock(frame_skip=spec.frame_skip)
        timers = [setup.make_timers("learner")]
        # A lambda, because the learner does not exist yet: a rollout calls it for its returns.
        memory = variant.memory(config, spec, place, lambda obs: learner.state_values(obs))
        made.callback(memory.close)
        updater = variant.updater and functools.partial(
            variant.updater, timers=timers[0], capturable=place.capturable
        )
        learner: Learner = make_learner(
            config, spec, place, memory, clock, timers[0],
            updater_factory=updater,
            network_factory=variant.network and functools.partial(variant.network, spec),
        )  # fmt: skip
        notes, hooks, prepared = list(place.notes), list[EngineHook](), None
        if place.capturable:
            assert isinstance(learner, RecordedLearner), "devices with streams record updates"
            prepared = prepare_learner(setup, spec, learner, memory, place.device, variant.agree)
            timers[0].load_state_dict({})  # trials are not part of the run
            notes.append(prepared.note)
            hooks.append(TuningHook(prepared.tuning))
            choice = prepared.tuning.choice
        else:
            choice = apply_precision(config, learner.networks)
            if isinstance(learner, RecordedLearner) and config.compile == "on":
                switch(learner.compilables(), True)
                choice = replace(choice, compiled=True)
        inference: Inference
        if place.ahead or (config.lockstep and not config.normalize_observations):
            sizes = [group.num_envs for group in envs]
            acting = place_inference(
                config, spec, sizes, place, learner.weights, choice, setup.thorough
            )
            timers.append(setup.make_timers("collector"))
            inference, blocks = acting.inference, BLOCKS_AHEAD
        else:
            # These environments run in this interpreter: a thread would gain nothing.
            acting = None
            inference = variant.inference(learner.online, place.device, spec.obs_dtype, seeds.actor)
            blocks = min(2, len(envs))  # groups in flight begin a block before the last is returned
        rows = rows_per_block(config)
        actor = Actor(
            envs, inference, config, timers[-1], rows, seeds.actor,
            blocks=blocks, ladder=variant.ladder, steps_per_row=counting.envs,
        )  # fmt: skip
        collector: Collector
        channel: WeightsChannel
        if acting is not None:
            channel = acting.channel
            collector = ahead = Ahead(
                actor,
                channel,
                counting,
                clock,
                timers[0],
                lockstep=config.lockstep,
                tensor_threads=_actor_threads(place),
                block_ready=acting.block_ready,
            )
            made.callback(ahead.close)
            notes.append(acting.note)
            hooks.append(
                PipelineHook(
                    config, envs, acting, ahead, timers, clock, place.device, prepared,
                    share=config.envs / counting.envs,
                )
            )  # fmt: skip
        else:
            channel = SameWeights()
            collector = Inline(actor, channel, clock)
        timers = list(timers)  # the hooks have the others
        evaluator = make_host_evaluator(setup, spec, place, learner, choice, timers, made)
        return variant.parts(
            setup=setup,
            spec=spec,
            device=place.device,
            env_seeds=[seed for group in envs for seed in group.seeds],
            clock=clock,
            timers=timers,
            collector=collector,
            evaluator=evaluator,
            memory=memory,
            learner=learner,
            channel=channel,
            notes=notes,
            hooks=hooks,
            device_times=_device_times(learner, inference),
            closing=made.pop_all(),
        )


run = serial.run


def _device_times(learner: Learner, inference: Inference) -> dict[str, StreamTimer]:
    times = {"act": inference.device_time} if isinstance(inference, DeviceInference) else {}
    if isinstance(learner, RecordedLearner) and has_streams(learner.weights.data.device):
        times["learn"] = learner.device_time
    return times


def _actor_threads(place: Placement) -> int | None:
    """Torch threads of the actor's thread; None leaves torch's default.

    Two threads that each use every core disturb each other: on two cores Pong's updates ran at 0.94
    of their rate beside inference on two threads, and at 1.01 beside inference on one.
    """
    if place.ahead and place.device.type == "cpu":
        return max(1, torch.get_num_threads() // 2)
    return None


@dataclass
class TuningHook(EngineHook):
    """Keeps the measured choices for the accelerator, for ``qfleet doctor``."""

    tuning: Tuning


@dataclass
class PipelineHook(EngineHook):
    """Reports how well collecting and learning overlap, and the traffic to the device."""

    config: Config
    envs: Sequence[VectorEnv]
    acting: Acting
    collector: Ahead
    timers: Sequence[Timers]
    clock: Clock
    device: torch.device
    prepared: Prepared | None
    """The learner's own rate, if it was measured at the start."""
    share: float = 1.0
    """This process's part of the run's env steps."""

    def scalars(self, wall_s: float) -> Mapping[str, float | None]:
        learner, collector = (timers.shares(wall_s)["idle"] for timers in self.timers)
        lag, traffic = self.acting.channel.lag, self.acting.traffic
        scalars = {
            "pipeline/idle_learner": learner,
            "pipeline/idle_collector": collector,
            "pipeline/version_lag_mean": lag.mean,
            "pipeline/version_lag_max": float(lag.largest),
        }
        if traffic is not None:
            scalars["pipeline/bytes_to_device"] = float(traffic.bytes_to_device)
            scalars["pipeline/copy_bytes_per_s"] = traffic.bandwidth_bytes_per_s
        return scalars

    def result(self) -> Mapping[str, Any]:
        traffic = self.acting.traffic
        if traffic is None:
            return {}
        return {
            "communication": {
                "bytes_sent": traffic.bytes_to_device,
                "bytes_received": traffic.bytes_to_host,
                "messages": traffic.copies,
            }
        }

    def measure(self, end_to_end: float) -> Stages:
        end_to_end *= self.share
        if self.prepared is not None:
            learner_only: float | None = self.prepared.learner_rate(self.config, agents=1)
        else:
            learner_only = learner_rate(self.config, self.clock, self.timers[0])
            # The first updates are slow; a stage is never slower than the whole.
            learner_only = learner_only and max(learner_only, end_to_end)
        self.collector.land()
        inference = self.acting.inference
        spec, group = self.envs[0].spec, self.envs[0].num_envs
        rates = StageRates(
            env_only=env_rate(self.envs, Seeds.of(self.config.seed).actor),
            inference_only=inference_rate(inference, spec, group),
            learner_only=learner_only,
            end_to_end=end_to_end,
        )
        return make_stages(rates, self.config, self.device)
