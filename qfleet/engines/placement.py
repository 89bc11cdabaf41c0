"""The devices of a run: which one learns, holds the replay memory, chooses the actions.

In: a configuration, an environment's spec and this machine's devices. Out: a ``Placement``, and for
the pipeline engine an ``Acting``, chosen by measuring the real network at the real group size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from qfleet.accelerator.streams import has_streams
from qfleet.agent.device_inference import DeviceInference, Traffic
from qfleet.agent.devices import resolve_device
from qfleet.agent.inference import HostInference, Inference
from qfleet.agent.weights import DeviceMailbox, FlatWeights, Mailbox
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.seeding import Seeds
from qfleet.core.types import EnvSpec
from qfleet.engines.measured_cache import recall, remember
from qfleet.engines.tuning import Choice, apply_choice
from qfleet.memory.sizing import USABLE_PERCENT, replay_bytes
from qfleet.networks.factory import make_network

RESERVED_BYTES = 2 * 2**30
"""Device memory left to networks, bursts and recorded graphs beside a replay memory."""
CLEARLY = 2.0
"""Factor above which a faster device is remembered: envs are created while it is measured."""
MEASURE_S = 0.15
"""Seconds that inference is timed."""


def learner_device(config: Config, spec: EnvSpec) -> torch.device:
    """Return the learner's device. ``auto`` on the device engine: an accelerator for any obs."""
    if config.engine != "device":
        return resolve_device(config.device, spec)
    if config.device != "auto":
        device = resolve_device(config.device, spec)
        if device.type != "cpu" and not has_streams(device):
            raise ConfigError(f"--engine device was never tried on {device.type}; use --device cpu")
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator and has_streams(accelerator) else torch.device("cpu")


def _same(one: torch.device, other: torch.device) -> bool:
    return (one.type, one.index or 0) == (other.type, other.index or 0)


def free_device_bytes(device: torch.device) -> int:
    """Return the free memory of an accelerator with streams."""
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free)


@dataclass(frozen=True)
class Placement:
    device: torch.device
    """The learner's device."""
    replay: torch.device
    ahead: bool
    """Whether collecting goes on while the learner learns."""
    capturable: bool
    """Whether bursts of updates never synchronise with the host, so that they can be recorded."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, spec: EnvSpec, in_background: bool) -> Placement:
        """``in_background``: the envs step outside this process's interpreter."""
        device = learner_device(config, spec)
        if device.type == "cpu" and config.precision in ("tf32", "fp16"):
            raise ConfigError(
                f"precision '{config.precision}' is for accelerators; use bf16 or fp32 on a CPU"
            )
        if config.precision == "fp16" and config.population > 1:
            raise ConfigError("precision 'fp16' is for one agent; use bf16 for a population")
        if config.precision == "fp64" and (device.type != "cpu" or config.population > 1):
            raise ConfigError(
                "precision 'fp64' is for one agent on a CPU; use --device cpu or leave it out"
            )
        if config.engine == "device":
            _refuse_other_replay(config, spec, device)
            return cls(device, device, ahead=False, capturable=has_streams(device))
        on_gpu_rank = config.engine == "all-reduce" and device.type != "cpu"
        on_pipeline = config.engine == "pipeline" or on_gpu_rank or config.has_learner_replay
        replay, why = _place_replay(config, spec, device if on_pipeline else torch.device("cpu"))
        ahead = on_pipeline and not config.lockstep and (in_background or device.type != "cpu")
        notes = [why] if why else []
        if ahead and config.normalize_observations:
            ahead = False
            notes.append("collecting in turn with learning: normalize_observations needs that")
        elif on_pipeline and not config.lockstep and not ahead:
            notes.append("collecting in turn with learning: these envs need the same interpreter")
        capturable = on_pipeline and has_streams(device)
        if on_pipeline and device.type != "cpu" and not capturable:
            notes.append(f"updates are not recorded: torch queues nothing on {device.type}")
        has_lockstep = config.lockstep and not config.normalize_observations
        in_a_thread = ahead or (on_pipeline and has_lockstep)
        if not in_a_thread and config.inference_device != "auto":
            raise ConfigError(
                f"inference_device '{config.inference_device}' is for a pipeline that collects "
                "while it learns; here the learner's network acts, so leave it out"
            )
        if capturable and config.prioritized_replay and replay.type == "cpu":
            capturable = False
            notes.append("updates are not recorded: priorities are kept on the host")
        return cls(device, replay, ahead, capturable, tuple(notes))


def _refuse_other_replay(config: Config, spec: EnvSpec, device: torch.device) -> None:
    """Refuse a replay memory that is not on the device, for the device engine."""
    asked = config.replay_device
    if asked != "auto" and not _same(resolve_device(asked, spec), device):
        raise ConfigError(
            f"replay_device '{asked}' does not go with --engine device on {device}, which keeps "
            "replay beside the learner; leave it out or use --engine pipeline"
        )
    if device.type != "cpu" and (config.replay_dir or config.replay_compression != "none"):
        raise ConfigError(
            f"replay in files or compressed is on the host, and --engine device on {device} keeps "
            "it there; leave replay_dir and replay_compression out or use --engine pipeline"
        )


def _place_replay(
    config: Config, spec: EnvSpec, learner: torch.device
) -> tuple[torch.device, str | None]:
    """Return the replay memory's device, and why it is not the learner's if it is not."""
    host = torch.device("cpu")
    if config.replay_device != "auto":
        device = resolve_device(config.replay_device, spec)
        if device.type != "cpu" and not _same(device, learner):
            raise ConfigError(
                f"replay_device '{config.replay_device}' must be the learner's device "
                f"({learner}) or cpu; serial keeps replay on the cpu"
            )
        return device, None
    if not has_streams(learner):
        return host, None
    if not config.replay:
        return learner, None  # a rollout is small, and the network computes its returns
    if config.replay_dir or config.replay_compression != "none":
        return host, "replay on the host: it is kept in files or compressed"
    needed = replay_bytes(spec, config.envs, config.replay_capacity, config.prioritized_replay)
    free = free_device_bytes(learner)
    free = min(free - RESERVED_BYTES, free * USABLE_PERCENT // 100)
    if needed > free:
        return host, (
            f"replay on the host: {needed / 2**30:.1f} GiB do not fit beside the learner "
            f"({max(free, 0) / 2**30:.1f} GiB left on {learner})"
        )
    return learner, None


class Acting(NamedTuple):
    """The actor's side of the pipeline."""

    inference: Inference
    channel: Mailbox | DeviceMailbox
    block_ready: Callable[[], None]
    traffic: Traffic | None
    env_steps_per_s: float
    """Rate of inference alone."""
    note: str


def place_inference(
    config: Config,
    spec: EnvSpec,
    group_sizes: list[int],
    place: Placement,
    source: FlatWeights,
    choice: Choice,
    thorough: bool = False,
) -> Acting:
    """Return the actor's own network on the fastest device, measured at this group size.

    ``thorough``: also measure what is known.
    """
    asked, known = config.inference_device, None
    devices = [torch.device("cpu")]
    key = {"layout": source.describe(), "groups": group_sizes, "choice": str(choice)}
    if asked != "auto":
        devices = [resolve_device(asked, spec)]
    elif place.device.type != "cpu":
        devices.append(place.device)
        known = None if thorough else recall("inference", key)
        devices = [device for device in devices if known in (None, device.type)] or devices
    options = []
    for device in devices:
        if device.type != "cpu" and not _same(device, place.device):
            raise ConfigError(
                f"inference_device '{asked}' must be the learner's device ({place.device}) or cpu"
            )
        acting = _acting_on(device, config, spec, group_sizes, place, source, choice)
        options.append((acting, device))
    best, device = max(options, key=lambda option: option[0].env_steps_per_s)
    rates = ", ".join(f"{d} {a.env_steps_per_s:,.0f}/s" for a, d in options)
    how = "asked for" if asked != "auto" else "known" if known else "no accelerator"
    if len(options) > 1:
        how = "measured"
        slowest = min(acting.env_steps_per_s for acting, _ in options)
        if best.env_steps_per_s > CLEARLY * slowest:
            remember("inference", key, device.type)
    return best._replace(note=f"inference on {device} ({how}: {rates})")


def _acting_on(
    device: torch.device,
    config: Config,
    spec: EnvSpec,
    group_sizes: list[int],
    place: Placement,
    source: FlatWeights,
    choice: Choice,
) -> Acting:
    seeds = Seeds.of(config.seed)
    network = make_network(config, spec, device, seeds.network)
    if device.type == place.device.type:
        apply_choice(choice, [network], [])
    reader = FlatWeights(network)
    if not has_streams(device):
        host = HostInference(network, device, spec.obs_dtype, seeds.actor)
        rate = inference_rate(host, spec, group_sizes[0])
        # A block on the host is ready when it is complete.
        return Acting(host, Mailbox(source, reader), lambda: None, None, rate, "")
    on_device = DeviceInference(
        network,
        spec,
        group_sizes,
        device,
        seeds.actor,
        frames_stay=place.replay.type != "cpu",
        compiled=choice.compiled,
    )
    rate = inference_rate(on_device, spec, group_sizes[0])
    on_device.forget()

    earlier, newest = torch.Event(device), torch.Event(device)

    def block_ready() -> None:
        """Let the learner's kernels read the block, and the actor's kernels overwrite an old one.

        The learner's kernels wait for the actor's writes. The actor's kernels wait for the work
        that the learner had queued two blocks ago, when it received that old block; waiting for its
        newest work would make collecting wait for learning.
        """
        nonlocal earlier, newest
        learner_stream = torch.accelerator.current_stream(device)
        learner_stream.wait_stream(on_device.stream)
        on_device.stream.wait_event(newest)
        earlier, newest = newest, earlier
        newest.record(learner_stream)

    channel = DeviceMailbox(source, reader, on_device.stream)
    return Acting(on_device, channel, block_ready, on_device.traffic, rate, "")


def inference_rate(inference: Inference, spec: EnvSpec, envs: int) -> float:
    """Return the env steps per second of inference alone, for one group."""
    obs = np.zeros((envs, *spec.obs_shape), dtype=spec.obs_dtype)
    opened = np.zeros(envs, dtype=np.bool_)
    inference.host_frames((1, 1, envs, *spec.frame_shape))
    all_envs = slice(0, envs)
    noise = inference.noise_state()
    for _ in range(3):
        inference.choose(0, 0, 0, all_envs, obs, opened, needed=True)
    calls, start = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start) < MEASURE_S:
        inference.choose(0, 0, 0, all_envs, obs, opened, needed=True)
        calls += 1
    inference.load_noise_state(noise)  # the number of calls must not change the run's numbers
    return calls * envs / elapsed_s
