"""Record a dataset with a policy that does not learn. In: a policy and ε. Out: a dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from qfleet.agent.actor import Actor
from qfleet.agent.inference import HostInference
from qfleet.agent.policy import Policy
from qfleet.config.config import OPTIONS, Config
from qfleet.core.errors import DataError, require
from qfleet.core.types import Block
from qfleet.data.manifest import Dataset, Origin, open_store, staging_folder
from qfleet.data.recorder import Recorder
from qfleet.data.writer import Writer, check_target
from qfleet.envs.factory import make_envs
from qfleet.storage.locks import RunLock
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timers import Timers

BLOCK_ROWS = 64
"""Steps of every environment between two calls of the recorder."""


class FixedInference(HostInference):
    """The inference of a policy that does not learn: its statistics stay as they are."""

    def deliver(self, _number: int, block: Block) -> Block:
        return block


def record(
    policy: Policy,
    url: str,
    *,
    steps: int = 10_000,
    epsilon: float = 0.0,
    envs: int = 8,
    seed: int = 0,
    on_step: Callable[[int], None] = lambda _: None,
) -> Dataset:
    """Play ``steps`` env steps with a policy, ε-greedily, and record them at ``url``.

    Rewards are recorded as the environment gives them, and losing a life ends no episode.
    ``on_step`` is called with the env steps made.
    """
    require(0 <= epsilon <= 1, "epsilon", epsilon, "≥ 0 and ≤ 1")
    require(envs > 0, "envs", envs, "> 0")
    # The next observation of the newest step of each env is not known.
    require(steps > envs, "steps", steps, f"> envs ({envs})")
    require(seed >= 0, "seed", seed, "≥ 0")
    policy.check_trust()
    check_target(url)
    config = _config(policy.env_config, url, envs)
    faults = FaultLog()
    made = make_envs(config, envs, seed, training=False, on_fault=faults)
    with contextlib.closing(made), RunLock(staging_folder(open_store(url))):
        check_target(url)  # again: another recording may have ended meanwhile
        policy.check_spec(made.spec)
        inference = FixedInference(policy.network, policy.device, made.spec.obs_dtype, seed)
        ladder = np.full(envs, epsilon, dtype=np.float32)
        actor = Actor([made], inference, config, Timers(), BLOCK_ROWS, seed, ladder=ladder)
        acted = {"training": False, "algo": config.algo, "epsilon": epsilon, "seed": seed}
        writer = Writer(url, Origin.of(config, made.spec, acted), "0")
        recorder = Recorder(writer, made.spec, envs, faults)
        rows = -(-steps // envs)
        with contextlib.closing(recorder):  # what was played before an interrupt is kept
            for row in range(0, rows, BLOCK_ROWS):
                recorder.add(actor.collect(min(BLOCK_ROWS, rows - row), 0, row * envs))
                on_step(min(row + BLOCK_ROWS, rows) * envs)
                if recorder.failure:
                    break
    if recorder.failure:
        raise DataError(recorder.failure)
    return Dataset(url)


def _config(config: Config, url: str, envs: int) -> Config:
    """Return the settings of the environments and of the actor that records.

    Those of training are left out: they may need an engine or a dataset that is not here.
    """
    kept = ("algo", "head", "noisy", *(n for n, o in OPTIONS.items() if o.group == "environment"))
    plain = {"clip_rewards": False, "reward_scale": 1.0, "episodic_life": False}
    own = {**{name: getattr(config, name) for name in kept}, **plain}
    return Config(**{**own, "engine": "serial", "envs": envs, "record": url})
