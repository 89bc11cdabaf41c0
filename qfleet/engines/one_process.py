"""Config → the parts of a run in one process: serial, pipeline, device; a worker's own, too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from qfleet.accelerator.graphs import why_no_graphs
from qfleet.agent.actor import Actor
from qfleet.agent.collectors import Ahead, Inline
from qfleet.agent.device_actor import TensorActor
from qfleet.agent.device_evaluation import TensorEvaluator
from qfleet.agent.inference import HostInference
from qfleet.agent.learner import Learner
from qfleet.agent.population import Agents, agent_seeds
from qfleet.agent.schedules import rows_per_block
from qfleet.agent.weights import FlatWeights, SameWeights
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds, env_seeds, mix_seeds
from qfleet.core.types import Clock, Memory, Updater
from qfleet.engines.factories import (
    make_groups,
    make_memory,
    make_networks,
    make_objective,
    make_rollout,
    make_updater,
)
from qfleet.engines.loop import RateLimiter
from qfleet.engines.parts import Parts
from qfleet.engines.placement import Placement, inference_rate, place_inference
from qfleet.engines.recording import prepare_learner
from qfleet.engines.torch_settings import set_threads
from qfleet.engines.tuning import Choice, apply_asked, apply_choice, may_compile
from qfleet.envs.device.protocol import TensorEnv
from qfleet.envs.device.vector import check_tensor_env
from qfleet.envs.factory import make_tensors
from qfleet.memory.rollout import Rollout
from qfleet.networks.factory import make_network
from qfleet.networks.fused_cnn import fuse
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Trace

BLOCKS_AHEAD = 4
"""Blocks an actor in a thread fills in turn: one under way, the others on their way to the ring."""


def build(
    config: Config,
    faults: FaultLog,
    restarted_at: int = 0,
    trace: Trace | None = None,
    members: Sequence[int] | None = None,
    remote: Callable[[FlatWeights, Timers], Updater] | None = None,
) -> Parts:
    """See ``build``. ``remote`` makes the updater of a worker, whose weights are on servers; None:
    the one that the configuration asks for."""
    members = range(config.population) if members is None else members
    seeds = Seeds.of(config.seed)
    env_seed = seeds.envs if not restarted_at else mix_seeds(seeds.envs, restarted_at)
    with contextlib.ExitStack() as made:
        tensor_env = make_tensors(config) if config.engine == "device" else None
        envs = [] if tensor_env else make_groups(config, env_seed, faults)
        for group in envs:
            made.callback(group.close)
        spec = tensor_env.spec if tensor_env else envs[0].spec
        in_background = any(group.in_background for group in envs)
        place = Placement.of(config, spec, in_background)
        set_threads(config.threads, spec)
        memory: Memory
        if config.replay:
            memory = make_memory(config, spec, place, seeds.memory)
        else:
            # The memory asks the learner for values and the learner the memory for samples.
            memory = make_rollout(
                config, spec, place, lambda obs: learner.best_values(obs), members
            )
        made.callback(memory.close)
        clock = Clock(frame_skip=spec.frame_skip)
        timers = [Timers(trace.lane("learner") if trace else None)]
        online = make_networks(config, spec, place.device, members)
        fused = fuse(config, spec, online, place.device) if config.engine == "device" else None
        learner = Learner(
            config=config,
            online=online,
            target=make_network(config, spec, place.device, seeds.network)
            if config.replay or config.target_network
            else online,
            memory=memory,
            objective=make_objective(config, place.device, seeds.objective),
            make_updater=lambda weights: (
                remote(weights, timers[0])
                if remote
                else make_updater(config, weights, place.capturable)
            ),
            clock=clock,
            timers=timers[0],
            device=place.device,
            seed=seeds.learner,
            # A population's learning rates are a tensor wherever it learns.
            capturable=place.capturable or config.population > 1,
            fused=fused,
        )
        parts = Parts(
            config=config,
            spec=spec,
            device=place.device,
            envs=envs,
            env_seeds=[seed for group in envs for seed in group.seeds],
            memory=memory,
            learner=learner,
            limiter=RateLimiter(config, clock, memory),
            clock=clock,
            timers=timers,
            faults=faults,
            seeds=seeds,
            notes=list(place.notes),
            members=members,
        )
        if place.capturable:
            choice = prepare_learner(parts, memory)
        else:
            choice = apply_asked(config, learner.networks)
        if tensor_env is not None:
            _act_on_the_device(parts, tensor_env, place)
        elif place.ahead or (config.engine == "pipeline" and config.lockstep):
            _act_in_a_thread(parts, place, choice, trace)
        else:
            _act_in_turn(parts)
        made.pop_all()
    return parts


def _act_in_turn(parts: Parts) -> None:
    """The learner's network acts, in the learner's thread."""
    config, seed = parts.config, parts.seeds.actor
    inference = HostInference(parts.learner.online, parts.device, parts.spec.obs_dtype, seed)
    actor = Actor(
        parts.envs,
        inference,
        config,
        parts.timers[0],
        rows_per_block(config),
        seed,
        # Groups in flight have begun the next block when one is handed over.
        blocks=min(2, len(parts.envs)),
    )
    parts.channel = SameWeights()
    parts.collector = Inline(actor, parts.channel)


def _act_on_the_device(parts: Parts, env: TensorEnv, place: Placement) -> None:
    """The learner's network acts, on environments that are where it is."""
    config, device, learner = parts.config, parts.device, parts.learner
    check_tensor_env(env, device)
    every = [Seeds.of(seed) for seed in agent_seeds(config, range(config.population))]
    seeds_of_envs = [env_seeds(own.envs, config.envs) for own in every]
    # Those of agents that have stopped too: they are what the run began with.
    parts.env_seeds = [seed for own in seeds_of_envs for seed in own]
    parts.channel = SameWeights()
    started_s = time.monotonic()
    compiled = place.capturable and may_compile(config, device)
    # Steps are tried before they are recorded; a torso's own buffers must not remember that.
    kept = [(buffer, buffer.clone()) for buffer in learner.online.buffers()]
    actor = parts.collector = TensorActor(
        env,
        torch.tensor([seeds_of_envs[agent] for agent in parts.members]).view(-1),
        learner.q_values,
        config,
        device,
        [every[agent].actor for agent in parts.members],
        rows_per_block(config),
        channel=parts.channel,
        timers=parts.timers[0],
        resample_noise=learner.online.resample_noise,
        compiled=compiled,
        compile_values=not learner.is_fused,
    )
    if config.population > 1:
        assert isinstance(parts.memory, Rollout)
        parts.agents = Agents(config, parts.members, learner, parts.memory, actor)
    # All agents of a population play the same episodes.
    seed = parts.seeds.eval_envs
    parts.evaluator = TensorEvaluator(
        learner.q_values,
        env,
        torch.tensor(env_seeds(seed, config.n_eval_episodes)),
        config.eval_eps,
        device,
        seed,
        config.graphs,
        agents=len(parts.members),
    )
    if place.capturable:
        learner.online.eval()
        parts.evaluator.prepare()  # now, not in the middle of the run
        learner.online.train()
        for buffer, before in kept:
            buffer.copy_(before)
        # Where nobody waits for the device, the seconds that the host spends say nothing.
        parts.measure_collecting = actor.rate
        recorded = config.graphs and why_no_graphs(device) is None
        how = f"{rows_per_block(config)} steps a launch" if recorded else "not recorded"
        if compiled:
            failure = actor.compile_failure
            how += ", compiled" if failure is None else f", not compiled ({failure})"
        parts.notes.append(f"steps on {device}: {how} ({time.monotonic() - started_s:.0f} s)")


def _act_in_a_thread(parts: Parts, place: Placement, choice: Choice, trace: Trace | None) -> None:
    """A network of the actor's own acts, in a thread, while the learner learns."""
    config, seeds = parts.config, parts.seeds

    def network_on(device: torch.device) -> QNetwork:
        network = make_network(config, parts.spec, device, seeds.network)
        if device.type != "cpu":
            apply_choice(choice, [network], [])
        return network

    acting = place_inference(
        config,
        parts.spec,
        [group.num_envs for group in parts.envs],
        place,
        parts.learner.weights,
        network_on,
        choice.compiled,
        seeds.actor,
    )
    timers = Timers(trace.lane("collector") if trace else None)
    parts.timers.append(timers)
    parts.channel, parts.traffic = acting.channel, acting.traffic
    parts.notes.append(acting.note)
    parts.measure_inference = lambda: inference_rate(
        acting.inference, parts.spec, parts.envs[0].num_envs
    )
    actor = Actor(
        parts.envs,
        acting.inference,
        config,
        timers,
        rows_per_block(config),
        seeds.actor,
        blocks=BLOCKS_AHEAD,
    )
    parts.collector = Ahead(
        actor,
        acting.channel,
        config,
        parts.clock,
        parts.timers[0],
        lockstep=config.lockstep,
        # Two threads that each take every core get in each other's way: on two cores Pong's updates
        # ran at 0.94 of their rate beside inference on two, and at 1.01 beside inference on one.
        tensor_threads=max(1, torch.get_num_threads() // 2)
        if place.ahead and place.device.type == "cpu"
        else None,
        block_ready=acting.block_ready,
    )
