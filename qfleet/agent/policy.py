"""A trained policy, read back from a run's folder and ready to act."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.agent.devices import resolve_device
from qfleet.agent.evaluation import MOST_ENVS, Evaluation, evaluate_policy
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
    """Observations in, actions out, both with the environment's own numbering."""

    def __init__(
        self, config: Config, spec: EnvSpec, state: dict[str, Any], device: str | None = None
    ) -> None:
        self.config, self.spec = config, spec
        self.device = _usable_device(config, spec, device)
        # Not compiled: compiling takes minutes, and most policies act only a few times.
        plain = config.replace(compile="off")
        self.network = make_network(plain, spec, self.device, Seeds.of(config.seed).network)
        self.network.eval()
        weights = FlatWeights(self.network)
        if weights.data.shape != state["weights"].shape:
            raise CheckpointError(
                f"the saved policy has {state['weights'].numel()} weights, the network of "
                f"config.json has {weights.data.numel()}; they are of different runs"
            )
        weights.data.copy_(state["weights"])
        for name, buffer in self.network.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.greedy = make_greedy(self.network, self.device)
        """Batches of observations in, actions out, both counted from 0 as inside qfleet."""

    def act(self, obs: Any) -> int | NDArray[np.int64]:
        """Return the greedy action of one observation (int), or of a batch (int64 ``[B]``)."""
        batch, is_single = self._batch(obs)
        actions = self.greedy(batch) + self.spec.first_action
        return int(actions[0]) if is_single else actions

    def q_values(self, obs: Any) -> NDArray[np.float32]:
        """Return the expected return of every action: ``[actions]``, or ``[B, actions]``."""
        batch, is_single = self._batch(obs)
        with torch.inference_mode():
            values = self.network.q_values(torch.from_numpy(batch).to(self.device))
        result: NDArray[np.float32] = values.cpu().numpy()
        return result[0] if is_single else result

    def _batch(self, obs: Any) -> tuple[NDArray[Any], bool]:
        """Return the network's input, and whether ``obs`` was a single observation."""
        shape = self.spec.obs_shape
        if self.spec.obs_dtype == "uint8" and np.asarray(obs).dtype == np.bool_:
            raise ConfigError("observation must hold pixels of 0 to 255, got booleans; use × 255")
        array = np.asarray(obs, dtype=self.spec.obs_dtype)
        is_single = array.shape == shape
        if not is_single and array.shape[1:] != shape:
            raise ConfigError(
                f"observation must have shape {shape} or [B, *{shape}], got {array.shape}"
            )
        batch = np.ascontiguousarray(array[None] if is_single else array)
        if self.spec.num_obs_values:
            batch = batch - self.spec.first_obs_value
            if batch.size and not 0 <= batch.min() <= batch.max() < self.spec.num_obs_values:
                last = self.spec.first_obs_value + self.spec.num_obs_values - 1
                raise ConfigError(
                    f"observation must be one of {self.spec.first_obs_value} … {last}, got {obs!r}"
                )
        elif batch.dtype.kind == "f" and not np.isfinite(batch).all():
            raise ConfigError("observation must be finite, got NaN or Inf")
        return batch, is_single

    def evaluate(
        self,
        episodes: int = 10,
        seed: int = 0,
        epsilon: float | None = None,
        on_step: Callable[[int], None] = lambda _: None,
    ) -> Evaluation:
        """Play episodes in new environments. ``epsilon`` None: the run's own ``eval_eps``.

        ``on_step`` is called at every step with the number of finished episodes.
        """
        epsilon = self.config.eval_eps if epsilon is None else epsilon
        if episodes < 1 or seed < 0 or not 0 <= epsilon <= 1:
            raise ConfigError(
                f"cannot evaluate {episodes} episodes with seed {seed} and epsilon {epsilon}; "
                "episodes must be at least 1, the seed at least 0, epsilon in [0, 1]"
            )
        count = min(episodes, MOST_ENVS)
        envs = make_envs(self.config, count, seed, training=False, on_fault=FaultLog())
        with contextlib.closing(envs):
            max_steps, device = self.config.eval_max_steps, self.device
            played = evaluate_policy(
                self.network, envs, episodes, epsilon, device, seed, max_steps, on_step
            )
        assert played is not None, "an evaluation without a limit ends"
        return played


def _usable_device(config: Config, spec: EnvSpec, name: str | None) -> torch.device:
    """Return the device ``name``, else the run's own, or ``auto`` if this machine lacks it."""
    if name is not None:
        return resolve_device(name, spec)
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
    with contextlib.closing(make_envs(config, 1, 0, training=False, on_fault=FaultLog())) as envs:
        return Policy(config, envs.spec, state, device)


def _newest_policy(folder: Path, config: Config) -> StateDict:
    """Return weights and buffers of the newest checkpoint; an agent's is its population's."""
    if config.population > 1:
        raise ConfigError(
            f"'{folder}' has {config.population} newest policies; give an agent's folder, e.g. "
            f"{agent_folder(folder, 0)}, or use the best"
        )
    run = population_folder(folder)
    checkpoint = load_checkpoint((run or folder) / "checkpoints", None, on_alert=_print_alert)
    learner = checkpoint.parts["learner"]
    if run is None:
        return learner
    members = checkpoint.parts["agents"]["members"]
    if int(folder.name) not in members:
        raise CheckpointError(
            f"agent {folder.name} had stopped before the newest checkpoint of '{run}'; "
            "its best policy is kept"
        )
    # Rows are padded at their end.
    length = sum(math.prod(shape) for _, shape in checkpoint.meta["layout"])
    row = learner["weights"][members.index(int(folder.name)), :length]
    return {"weights": row, "buffers": learner["buffers"]}


def _print_alert(alert: str) -> None:
    print(f"qfleet: {alert}", file=sys.stderr)
