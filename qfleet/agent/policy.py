"""A trained policy, read back from a run's folder and ready to act."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.agent.devices import resolve_device
from qfleet.agent.evaluation import Evaluation, evaluate_policy
from qfleet.agent.inference import make_greedy
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config, read_fields
from qfleet.config.trust import check_trust
from qfleet.config.validation import validate
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.seeding import Seeds
from qfleet.core.types import EnvSpec, StateDict
from qfleet.envs.factory import make_envs
from qfleet.networks.factory import make_network
from qfleet.storage.checkpoint import load_checkpoint, load_policy
from qfleet.storage.rundir import agent_folder, population_folder
from qfleet.telemetry.faults import FaultLog


class Policy:
    """Observations in, actions out, both as the environment itself numbers them."""

    def __init__(
        self, config: Config, spec: EnvSpec, state: dict[str, Any], device: str | None = None
    ) -> None:
        self.config, self.spec = config, spec
        self.device = _usable_device(config, spec, device)
        # Not compiled: a policy that is asked a few times never earns the minutes back.
        plain = config.replace(compile="off")
        self.network = make_network(plain, spec, self.device, Seeds.of(config.seed).network)
        self.network.eval()
        weights = FlatWeights(self.network)
        if weights.data.shape != state["weights"].shape:
            raise CheckpointError(
                f"the saved policy has {state['weights'].numel()} weights, the network of "
                f"config.json has {weights.data.numel()}; the two do not belong together"
            )
        weights.data.copy_(state["weights"])
        for name, buffer in self.network.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.greedy = make_greedy(self.network, self.device)
        """Batches in, actions out, both counted from 0 as inside qfleet."""

    def act(self, obs: Any) -> int | NDArray[np.int64]:
        """The greedy action for one observation (an int) or for a batch of them (an array)."""
        batch, is_single = self._batch(obs)
        actions = self.greedy(batch) + self.spec.first_action
        return int(actions[0]) if is_single else actions

    def q_values(self, obs: Any) -> NDArray[np.float32]:
        """Expected return of every action: ``[actions]`` or, for a batch, ``[B, actions]``."""
        batch, is_single = self._batch(obs)
        with torch.inference_mode():
            values = self.network.q_values(torch.from_numpy(batch).to(self.device))
        result: NDArray[np.float32] = values.cpu().numpy()
        return result[0] if is_single else result

    def _batch(self, obs: Any) -> tuple[NDArray[Any], bool]:
        """A batch as the network takes it, and whether it was a single observation."""
        shape = self.spec.obs_shape
        if self.spec.obs_dtype == "uint8" and np.asarray(obs).dtype == np.bool_:
            raise ConfigError("this policy takes pixels of 0 to 255, not booleans: times 255")
        array = np.asarray(obs, dtype=self.spec.obs_dtype)
        is_single = array.shape == shape
        if not is_single and array.shape[1:] != shape:
            raise ConfigError(
                f"observation of shape {array.shape} does not fit this policy, which takes "
                f"{shape} or a batch of those"
            )
        batch = np.ascontiguousarray(array[None] if is_single else array)
        if self.spec.num_obs_values:
            batch = batch - self.spec.first_obs_value
            if batch.size and not 0 <= batch.min() <= batch.max() < self.spec.num_obs_values:
                last = self.spec.first_obs_value + self.spec.num_obs_values - 1
                raise ConfigError(
                    f"observation {obs!r} is not one of {self.spec.first_obs_value} … {last}"
                )
        elif batch.dtype.kind == "f" and not np.isfinite(batch).all():
            raise ConfigError("the observation holds NaN or Inf; no action follows from it")
        return batch, is_single

    def evaluate(self, episodes: int = 10, seed: int = 0, epsilon: float = 0.0) -> Evaluation:
        """Play episodes in environments of its own."""
        if episodes < 1 or seed < 0 or not 0 <= epsilon <= 1:
            raise ConfigError(
                f"cannot evaluate {episodes} episodes with seed {seed} and epsilon {epsilon}; "
                "episodes must be at least 1, the seed at least 0, epsilon in [0, 1]"
            )
        count = min(episodes, 16)
        envs = make_envs(self.config, count, seed, training=False, on_fault=FaultLog())
        try:
            played = evaluate_policy(self.network, envs, episodes, epsilon, self.device, seed)
        finally:
            envs.close()
        assert played is not None  # nobody gave up
        return played


def _usable_device(config: Config, spec: EnvSpec, asked: str | None) -> torch.device:
    """The device asked for; else the run's own, or whatever this machine has instead."""
    if asked is not None:
        return resolve_device(asked, spec)
    try:
        return resolve_device(config.device, spec)
    except ConfigError:
        return resolve_device("auto", spec)


def load_run_policy(
    folder: Path, which: Literal["best", "last"], trust: bool, device: str | None = None
) -> Policy:
    config = validate(Config(**read_fields(folder / "config.json")))
    check_trust(config, trust, training=False)
    if which == "best":
        state = load_policy(folder / "best").parts["policy"]
    else:
        state = _newest_policy(folder, config)
    envs = make_envs(config, 1, 0, training=False, on_fault=FaultLog())
    spec = envs.spec
    envs.close()
    return Policy(config, spec, state, device)


def _newest_policy(folder: Path, config: Config) -> StateDict:
    """Weights and buffers of the newest checkpoint; an agent's lie in its population's."""
    if config.population > 1:
        raise ConfigError(
            f"'{folder}' has {config.population} newest policies; name an agent, such as "
            f"{agent_folder(folder, 0)}, or take the best"
        )
    run = population_folder(folder)
    checkpoint = load_checkpoint((run or folder) / "checkpoints", None, on_alert=_say)
    learner = checkpoint.parts["learner"]
    if run is None:
        return learner
    members = checkpoint.parts["agents"]["members"]
    if int(folder.name) not in members:
        raise CheckpointError(
            f"agent {folder.name} had stopped before the newest checkpoint of '{run}'; "
            "its best policy is kept"
        )
    # Rows are filled up; what belongs to the network comes first.
    length = sum(math.prod(shape) for _, shape in checkpoint.meta["layout"])
    row = learner["weights"][members.index(int(folder.name)), :length]
    return {"weights": row, "buffers": learner["buffers"]}


def _say(alert: str) -> None:
    print(f"qfleet: {alert}", file=sys.stderr)
