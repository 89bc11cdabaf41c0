"""A trained policy, read back from a run's folder and ready to act."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.acting import make_greedy
from qfleet.build import Seeds, make_network, resolve_device
from qfleet.config import Config, read_fields
from qfleet.core import EnvSpec
from qfleet.envs import make_envs
from qfleet.errors import CheckpointError, ConfigError
from qfleet.evaluation import Evaluation, evaluate_policy
from qfleet.storage.checkpoint import load_checkpoint, load_policy
from qfleet.telemetry.faults import FaultLog
from qfleet.weights import FlatWeights


class Policy:
    """Observations in, actions out."""

    def __init__(self, config: Config, spec: EnvSpec, state: dict[str, Any]) -> None:
        self.config, self.spec = config, spec
        self._device = resolve_device(config.device, spec)
        seeds = Seeds.of(config.seed)
        self.network = make_network(config, spec, self._device, seeds.network)
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
        self._greedy = make_greedy(self.network, self._device)

    def act(self, obs: Any) -> int | NDArray[np.int64]:
        """The greedy action for one observation (an int) or for a batch of them (an array)."""
        array = np.asarray(obs, dtype=self.spec.obs_dtype)
        if array.shape == self.spec.obs_shape:
            return int(self._greedy(array[None])[0])
        if array.shape[1:] != self.spec.obs_shape:
            raise ConfigError(
                f"observation of shape {array.shape} does not fit this policy, which takes "
                f"{self.spec.obs_shape} or a batch of those"
            )
        return self._greedy(array)

    def q_values(self, obs: Any) -> NDArray[np.float32]:
        """Expected return of every action, ``[B, actions]``, for a batch of observations."""
        array = np.asarray(obs, dtype=self.spec.obs_dtype)
        with torch.inference_mode():
            values = self.network.q_values(torch.from_numpy(array).to(self._device))
        result: NDArray[np.float32] = values.cpu().numpy()
        return result

    def evaluate(self, episodes: int = 10, seed: int = 0, epsilon: float = 0.0) -> Evaluation:
        """Play episodes in environments of its own."""
        faults = FaultLog()
        count = min(episodes, 16)
        envs = make_envs(self.config, count, seed, training=False, on_fault=faults)
        try:
            return evaluate_policy(self.network, envs, episodes, epsilon, self._device, seed)
        finally:
            envs.close()


def load_run_policy(folder: Path, which: Literal["best", "last"], trust: bool) -> Policy:
    config = Config(**read_fields(folder / "config.json")).validate()
    check_trust(config, trust)
    if which == "best":
        state = load_policy(folder / "best").parts["policy"]
    else:
        checkpoint = load_checkpoint(folder / "checkpoints", None, on_alert=print)
        state = checkpoint.parts["learner"]
    envs = make_envs(config, 1, 0, training=False, on_fault=FaultLog())
    spec = envs.spec
    envs.close()
    return Policy(config, spec, state)


def check_trust(config: Config, trust: bool) -> None:
    """A run's files may be someone else's: code they name is imported only with consent."""
    plugins = config.plugins()
    if plugins and not trust:
        raise ConfigError(
            f"this run imports code of its own ({', '.join(plugins)}); "
            "if you trust it, say so with --trust (library: trust=True)"
        )
