"""The learner: batches in, gradients out, and an updater that turns them into weights.

``step`` is the gradient step; ``batches`` draws what a burst of them learns from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qfleet import schedules
from qfleet.algorithms.objective import Objective
from qfleet.config import Config
from qfleet.core import Batch, Clock, Memory, StateDict, Updater
from qfleet.gradients import Graded, make_gradient
from qfleet.networks import QNetwork
from qfleet.telemetry.timers import Timers
from qfleet.weights import FlatWeights

# Samples drawn at once for a burst: enough to hide per-draw overhead, little enough for the cache.
BURST_SAMPLES = 8192


class Learner:
    def __init__(
        self,
        config: Config,
        online: QNetwork,
        target: QNetwork,
        memory: Memory,
        objective: Objective,
        make_updater: Callable[[FlatWeights], Updater],
        clock: Clock,
        timers: Timers,
        device: torch.device,
        seed: int,
    ) -> None:
        self._config, self._clock, self._device = config, clock, device
        self._copying, self._learning = timers.span("copy"), timers.span("learn")
        self.online, self._target_network = online, target
        self.weights, self._target_weights = FlatWeights(online), FlatWeights(target)
        self._target_weights.data.copy_(self.weights.data)
        self._memory, self._objective = memory, objective
        self._gradient = make_gradient(
            online, objective, self.weights, weighted=config.prioritized_replay
        )
        self._updater = make_updater(self.weights)
        self._noise = torch.Generator(device=device).manual_seed(seed)
        self._target_updates = 0
        self._learning_rate = config.learning_rate
        self.lr_scale = 1.0
        """Lowered on a plateau, when asked."""
        self._draws_at_once = not config.prioritized_replay
        self._targets_at_once = self._draws_at_once and not (config.double or config.noisy)
        self._newest: tuple[Graded, Tensor, Tensor | float] | None = None
        self._skipped: Tensor | float = 0.0

    def batches(self, updates: int) -> Iterator[tuple[Batch, Tensor | None]]:
        """Batches for a burst of gradient steps, with their targets where those can be had early.

        Within a burst neither the memory nor the target network changes, so uniform samples are
        drawn all at once; and so are targets that need the target network alone.
        """
        self._update_target()
        rate = schedules.learning_rate(self._config, self._clock.env_steps)
        self._learning_rate = rate * self.lr_scale
        beta = schedules.importance_exponent(self._config, self._clock.env_steps)
        size = self._config.batch_size
        at_once = max(1, BURST_SAMPLES // size) if self._draws_at_once else 1
        while updates > 0:
            count = min(updates, at_once)
            updates -= count
            with self._copying:
                samples = self._memory.sample(count * size, beta).to(self._device)
            batches = samples.split(size)
            if not self._targets_at_once:
                yield from ((batch, None) for batch in batches)
                continue
            with self._learning:
                target = self._objective.target(samples, self.online, self._target_network)
            yield from zip(batches, torch.split(target, size), strict=True)

    def step(self, batch: Batch, target: Tensor | None) -> None:
        """One gradient step."""
        with self._learning:
            if self._config.noisy:
                self.online.resample_noise(self._noise)
                self._target_network.resample_noise(self._noise)
            if target is None:
                target = self._objective.target(batch, self.online, self._target_network)
            graded = self._gradient(batch, target)
            applied = self._updater.apply(self._learning_rate)
            if self._config.prioritized_replay:
                self._memory.update_priorities(batch.index, graded.priority)
        self._clock.updates += 1
        self._skipped = self._skipped + applied["skipped"]
        self._newest = (graded, target, applied["grad_norm"])

    def _update_target(self) -> None:
        """Move the target network as often as its interval has passed on the clock.

        k moves towards the same weights by τ are one move by 1 − (1 − τ)^k.
        """
        due = self._clock.env_steps // self._config.target_update_interval - self._target_updates
        if due <= 0:
            return
        self._target_updates += due
        if self._config.tau == 1.0:
            self._target_weights.data.copy_(self.weights.data)
        else:
            move = 1.0 - (1.0 - self._config.tau) ** due
            self._target_weights.data.lerp_(self.weights.data, move)

    def read_metrics(self) -> dict[str, float]:
        """Numbers of the newest update; the only place where the host waits for them."""
        if self._newest is None:
            return {}
        graded, target, grad_norm = self._newest
        largest = float(graded.prediction.abs().max())
        if self._objective.head != "c51":  # C51's targets are probabilities
            largest = max(largest, float(target.abs().max()))
        return {
            "loss": float(graded.loss()),
            "grad_norm": float(grad_norm),
            "q_mean": float(graded.prediction.mean()),
            "abs_q_max": largest,
            "skipped": float(self._skipped),
        }

    def state_dict(self) -> StateDict:
        return {
            "weights": self.weights.data,
            "target_weights": self._target_weights.data,
            "buffers": dict(_flat_names(self.online)),
            "target_buffers": dict(_flat_names(self._target_network)),
            "optimiser": self._updater.state_dict(),
            "noise": self._noise.get_state(),
            "objective": self._objective.generator.get_state(),
            "target_updates": self._target_updates,
            "lr_scale": self.lr_scale,
            "skipped": float(self._skipped),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.weights.data.copy_(state["weights"])
        self._target_weights.data.copy_(state["target_weights"])
        for network, key in ((self.online, "buffers"), (self._target_network, "target_buffers")):
            for name, buffer in _flat_names(network):
                buffer.copy_(state[key][name])
        self._updater.load_state_dict(state["optimiser"])
        self._noise.set_state(state["noise"])
        self._objective.generator.set_state(state["objective"])
        self._target_updates = state["target_updates"]
        self.lr_scale = state["lr_scale"]
        self._skipped = state["skipped"]


def _flat_names(network: QNetwork) -> list[tuple[str, Tensor]]:
    return [(name.replace("/", "."), buffer) for name, buffer in network.named_buffers()]
