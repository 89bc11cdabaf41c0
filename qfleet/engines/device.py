"""The device engine: environments, acting, replay and learning on one device.

It is the serial loop with its parts placed otherwise: the actor steps tensor environments on the
learner's device, and the memory is there too. Everything is queued in the order of ``serial``. On
an accelerator the host only launches, and waits for the device where something is read: logs,
evaluations, checkpoints, and at the end. Populations train here: their agents are one batch.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from qfleet.accelerator.fused_radam import why_no_kernels
from qfleet.accelerator.graphs import why_not_recorded
from qfleet.accelerator.stream_timer import StreamTimer
from qfleet.agent.background_evaluation import BackgroundEvaluator
from qfleet.agent.device_actor import TensorActor
from qfleet.agent.device_evaluation import TensorEvaluator
from qfleet.agent.evaluation import Evaluation, GiveUp
from qfleet.agent.population import Agents, agent_seeds
from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.agent.schedules import rows_per_block
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds, env_seeds
from qfleet.core.types import Clock, StateDict
from qfleet.engines import serial
from qfleet.engines.factories import (
    copy_network,
    evaluates_in_background,
    make_learner,
    make_memory,
)
from qfleet.engines.loop import SameWeights
from qfleet.engines.parts import EngineHook, LoopParts, Setup
from qfleet.engines.placement import Placement
from qfleet.engines.recording import prepare_learner
from qfleet.engines.stage_rates import Stages, make_stages
from qfleet.engines.torch_settings import set_threads
from qfleet.engines.tuning import SAVED_PER_STEP_S, apply_precision, may_compile
from qfleet.envs.device.vector import check_tensor_env
from qfleet.envs.factory import make_tensors
from qfleet.memory.agent_rings import AgentRings
from qfleet.memory.rollout import Rollout
from qfleet.networks.fused_cnn import FusedCNN, fits, fuse
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.bottleneck import StageRates


def build(setup: Setup) -> LoopParts:
    """Create the parts. Tensor environments always have a stored state to continue from."""
    config, seeds = setup.config, setup.seeds
    members = range(config.population) if setup.members is None else setup.members
    with contextlib.ExitStack() as made:
        env = make_tensors(config)
        spec = env.spec
        place = Placement.of(config, spec, in_background=False)
        device = place.device
        check_tensor_env(env, device)
        saved_s = config.steps / config.envs * SAVED_PER_STEP_S
        compiled = place.capturable and may_compile(config, device, saved_s)
        set_threads(config.threads, spec)
        clock = Clock(frame_skip=spec.frame_skip)
        timers = setup.make_timers("learner")
        # A lambda, because the learner does not exist yet: a rollout calls it for its returns.
        memory = make_memory(config, spec, place, lambda obs: learner.state_values(obs), members)
        made.callback(memory.close)
        learner = make_learner(
            config, spec, place, memory, clock, timers, members=members, use_kernels=True
        )
        notes, hooks = list(place.notes), list[EngineHook]()
        is_fused = isinstance(learner, RecordedLearner) and learner.is_fused
        if place.capturable and not is_fused and fits(config, spec, learner.online):
            notes.append(f"torch's kernels instead of our own: {why_no_kernels(device)}")
        learner_only = 0.0
        if place.capturable:
            assert isinstance(learner, RecordedLearner), "devices with streams record updates"
            prepared = prepare_learner(setup, spec, learner, memory, device)
            timers.load_state_dict({})  # trials are not part of the run
            notes.append(prepared.note)
            learner_only = prepared.learner_rate(config, len(members))
            choice = prepared.tuning.choice
        else:
            choice = apply_precision(config, learner.networks)
        channel = SameWeights()
        started_s = time.monotonic()
        # Steps are tried before they are recorded; a torso's own buffers must not keep the effects.
        buffers = [(buffer, buffer.clone()) for buffer in learner.online.buffers()]
        # The seeds of all agents: those of agents that have stopped are part of the run's record.
        every = [Seeds.of(seed) for seed in agent_seeds(config, range(config.population))]
        seeds_of_envs = [env_seeds(own.envs, config.envs) for own in every]
        if compiled:
            setup.report(f"preparing steps on {device}: compiled")
        actor = TensorActor(
            env,
            torch.tensor([seeds_of_envs[agent] for agent in members]).view(-1),
            learner.q_values,
            config,
            device,
            [every[agent].actor for agent in members],
            rows_per_block(config),
            channel=channel,
            clock=clock,
            timers=timers,
            resample_noise=learner.online.resample_noise,
            compiled=compiled,
            compile_values=not is_fused,
        )
        if config.population > 1:
            assert isinstance(learner, RecordedLearner)
            assert isinstance(memory, Rollout | AgentRings)
            hooks.append(PopulationHook(Agents(config, members, learner, memory, actor)))
        q_values, copy = learner.q_values, cast("FlatWeights | None", None)
        if evaluates_in_background(config, device):
            network, copy = copy_network(config, spec, learner.weights, choice, members)
            # Kernels of its own: the others' scratch memory is in use at the same time.
            fused = fuse(config, spec, network, device) if is_fused else None
            q_values = functools.partial(_q_values, network, copy, fused)
        is_greedy = config.head != "actor-critic"
        shares_step = compiled and is_greedy and config.n_eval_episodes <= config.envs
        episodes = TensorEvaluator(
            q_values,
            env,
            # All agents of a population play the same episodes.
            torch.tensor(env_seeds(seeds.eval_envs, config.n_eval_episodes)),
            config.eval_eps,
            device,
            seeds.eval_envs,
            config.eval_max_steps,
            config.graphs,
            agents=len(members),
            # Compiled once for both: for as many environments, with greedy actions.
            step=actor.step if shares_step else None,
            envs=config.envs if shares_step else 0,
        )
        all_timers, device_times = [timers], dict[str, StreamTimer]()
        evaluator: BackgroundEvaluator | DeviceEvaluator = DeviceEvaluator(episodes, learner.online)
        if copy is not None:
            all_timers.append(setup.make_timers("evaluator"))
            evaluator = BackgroundEvaluator(episodes.play, learner.weights, copy, all_timers[-1])
            made.callback(evaluator.close)
        if place.capturable:
            assert isinstance(learner, RecordedLearner)
            device_times = {"env": actor.device_time, "learn": learner.device_time}
            device_times["evaluate"] = episodes.device_time
            actor.device_time.reset()
            for buffer, before in buffers:
                buffer.copy_(before)
            hooks.append(StagesHook(config, device, actor, learner_only))
            how = f"{rows_per_block(config)} steps a launch"
            if refused := why_not_recorded(config.graphs, device, "actor"):
                how = f"not recorded ({refused})"
            if compiled:
                failure = actor.compile_failure
                how += ", compiled" if failure is None else f", not compiled ({failure})"
            notes.append(f"steps on {device}: {how} ({time.monotonic() - started_s:.0f} s)")
        return LoopParts(
            setup=setup,
            spec=spec,
            device=device,
            env_seeds=[seed for own in seeds_of_envs for seed in own],
            clock=clock,
            timers=all_timers,
            collector=actor,
            evaluator=evaluator,
            memory=memory,
            learner=learner,
            channel=channel,
            notes=notes,
            hooks=hooks,
            device_times=device_times,
            members=members,
            closing=made.pop_all(),
        )


run = serial.run


def _q_values(
    network: QNetwork, weights: FlatWeights, fused: FusedCNN | None, obs: Tensor
) -> Tensor:
    """Return the values by a copy of the learner's network."""
    if fused is not None and fused.takes(len(obs)):
        return fused.q_values(weights.data, obs)
    return network.q_values(obs)


@dataclass
class DeviceEvaluator:
    """Plays the evaluations of a run on its device."""

    episodes: TensorEvaluator
    network: nn.Module

    def play(self, give_up: GiveUp) -> Evaluation | None:
        self.network.eval()
        try:
            return self.episodes.play(give_up)
        finally:
            self.network.train()


@dataclass
class StagesHook(EngineHook):
    """Measures collecting alone: on an accelerator the host's timers only see launches."""

    config: Config
    device: torch.device
    actor: TensorActor
    learner_only: float
    """Env steps per second that learning alone allows."""

    def measure(self, end_to_end: float) -> Stages:
        # Environments and inference are one launch and cannot be measured separately.
        rates = StageRates(self.actor.rate(), None, self.learner_only, end_to_end)
        return make_stages(rates, self.config, self.device, share_a_device=True)


@dataclass
class PopulationHook(EngineHook):
    """Keeps the agents of a population and their hyper-parameters."""

    agents: Agents

    def state_dict(self) -> Mapping[str, StateDict]:
        return {"agents": self.agents.state_dict()}

    def load_state_dict(self, state: Mapping[str, StateDict]) -> None:
        self.agents.load_state_dict(state["agents"])
