"""The learner: batches in, gradients out, and an updater that turns them into weights.

``learn`` takes gradient steps in bursts: the samples of a burst are drawn at once, the target
network is evaluated on all of them at once, then every batch gets one gradient and one update
(``step``). ``RecordedLearner`` does the same on accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qfleet.agent import schedules
from qfleet.agent.dense_gradient import make_gradient
from qfleet.agent.gradients import Gradient, UpdateInfo
from qfleet.agent.loss_scale import ScaledGradient
from qfleet.agent.weights import FlatWeights
from qfleet.algorithms.objective import Objective, TargetTerms
from qfleet.config.config import Config
from qfleet.core.seeding import restore_generator
from qfleet.core.types import Batch, Clock, Memory, StateDict, Updater
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.timers import Timers

BURST_SAMPLES = 8192
"""Samples drawn at once: enough to hide the cost of a draw, few enough for the cache."""
PRIORITIZED_BURST = 8
"""Prioritised batches drawn at once: the priorities of the last one are 7 updates old."""


class Learner:
    """Draws samples, computes targets and gradients, has them applied (one agent, on a CPU)."""

    def __init__(
        self,
        config: Config,
        online: QNetwork,
        target: QNetwork,
        memory: Memory,
        objective: Objective,
        updater_factory: Callable[[FlatWeights], Updater],
        clock: Clock,
        timers: Timers,
        device: torch.device,
        seed: int,
        *,
        draw_stage: str | None = None,
    ) -> None:
        """``target`` is ``online`` itself if there is no target network.

        ``draw_stage``: the stage of drawing samples; "copy", or "learn" where it computes returns.
        """
        self._config, self._clock, self._learn_span = config, clock, timers.span("learn")
        self._draw_span = timers.span(draw_stage or ("copy" if config.replay else "learn"))
        self.online, self._target_network = online, target
        self._has_target = target is not online
        self.networks = [online, target] if self._has_target else [online]
        self.weights = FlatWeights(online)
        self._target_weights = FlatWeights(target) if self._has_target else self.weights
        copies = [("", self.weights), ("target_", self._target_weights)]
        self._flat = dict(copies if self._has_target else copies[:1])  # by prefix in a checkpoint
        self.move_target(1.0)
        self._memory, self._objective = memory, objective
        self._gradient = self._make_gradient(config.prioritized_replay or not config.replay)
        self._updater = updater_factory(self.weights)
        self._noise_generator = torch.Generator(device=device).manual_seed(seed)
        self.batch_size = config.batch_size * (self.weights.agents or 1)
        """Samples per update."""
        # With replay, an agent of a population draws as many at once as it would alone.
        most = max(1, BURST_SAMPLES // (config.batch_size if config.replay else self.batch_size))
        self.burst_updates = min(most, PRIORITIZED_BURST) if config.prioritized_replay else most
        """Most gradient steps in a burst."""
        # Each batch needs its own noise; a torso's buffers (batch normalisation) depend on the
        # batch; IQN's fractions of a whole burst would take gigabytes; and a population takes one
        # agent-major batch at a time.
        self._has_buffers = any(True for _ in online.torso.buffers())
        alone = config.noisy or self._has_buffers or config.head == "iqn"
        self._terms_per_batch = alone or self.weights.agents is not None
        self._target_follows = self._has_target and config.target_update_interval == 0
        """Whether the target network moves before every gradient."""
        if self._target_follows:
            self.burst_updates = 1
        self._target_updates = 0
        """Number of target update intervals that had passed at the last ``learn``."""
        self.lr_scale = 1.0
        """Factor of the learning rate, lowered on a plateau."""
        self._learning_rate: Tensor | float = config.learning_rate
        self._beta: Tensor | float = config.prioritized_replay_beta0
        self._skipped: Tensor | float = 0.0
        """Gradients that were not finite, since the run began."""
        self._newest: UpdateInfo | None = None

    def _make_gradient(self, weighted: bool) -> Gradient:
        """Return the gradient. ``weighted``: whether samples can have weights other than 1."""
        if self._config.precision != "fp16":
            return self._plain_gradient(weighted)
        return ScaledGradient(self._plain_gradient(weighted=True), self.weights)

    def _plain_gradient(self, weighted: bool) -> Gradient:
        return make_gradient(self.online, self._objective, self.weights, weighted)

    def learn(self, updates: int) -> None:
        """Take ``updates`` gradient steps."""
        config, progress = self._config, self._clock.progress
        self._learning_rate = schedules.learning_rate(config, progress) * self.lr_scale
        self._beta = schedules.importance_exponent(config, progress)
        while updates > 0:
            count = min(updates, self.burst_updates)
            if self._target_follows:
                with self._learn_span:
                    self._updater.before_gradient()  # it follows the newest weights
            self.move_target(self._take_target_move())
            with self._draw_span:
                samples = self._memory.sample(count * self.batch_size, self._beta)
            batches = samples.split(self.batch_size)
            with self._learn_span:
                for batch, terms in zip(batches, self._terms(samples, batches), strict=True):
                    self.step(batch, terms)
            self._clock.updates += count
            updates -= count

    def step(self, batch: Batch, terms: TargetTerms | Tensor) -> None:
        """Take one gradient step. ``terms``: target values, or what they are computed from."""
        self._updater.before_gradient()
        if self._config.noisy:
            self.online.store_noise(self.online.draw_noise(self._noise_generator))
        target = terms if isinstance(terms, Tensor) else self._target(batch, terms)
        prediction = self._gradient.predict(batch)
        loss_info = self._gradient.backward(prediction, batch, target)  # into weights.grad
        if self._config.sum_gradients:
            self.weights.grad.mul_(self.batch_size // (self.weights.agents or 1))
        if self._config.prioritized_replay:
            self._memory.update_priorities(batch.index, loss_info.priority)
        applied = self._updater.apply(self._learning_rate, loss_info.loss)
        self._skipped += applied["skipped"] * self._gradient.is_fault
        self._newest = UpdateInfo(loss_info, target, applied["grad_norm"])

    def _terms(self, samples: Batch, batches: list[Batch]) -> Sequence[TargetTerms | Tensor]:
        """Return what the target network contributes to the targets of every batch.

        The target network does not change within a burst, so it is evaluated once for all batches.
        Unless double Q-learning needs the newest online weights, the targets are then complete.
        """
        if not self._config.replay:
            return [batch.reward for batch in batches]  # the returns of a rollout are its targets
        if self._terms_per_batch:
            return [self._terms_of(batch) for batch in batches]
        terms = self._objective.target_terms(samples, self._target_network)
        if self._config.double:
            return terms.split(self.batch_size)
        return torch.split(self._target(samples, terms), self.batch_size)

    def _terms_of(self, batch: Batch) -> TargetTerms:
        if self._config.noisy:
            self._target_network.store_noise(self._target_network.draw_noise(self._noise_generator))
        return self._objective.target_terms(batch, self._target_network)

    def _target(self, batch: Batch, terms: TargetTerms) -> Tensor:
        return self._objective.target(batch, terms, self.online, self._target_network)

    def _take_target_move(self) -> float:
        """Return how far the target network moves now: by 1 − (1 − τ)^k after k more intervals."""
        if self._config.target_update_interval == 0:
            return self._config.tau
        due = self._clock.progress // self._config.target_update_interval - self._target_updates
        self._target_updates += max(due, 0)
        return 1.0 - (1.0 - self._config.tau) ** max(due, 0)

    def move_target(self, share: float) -> None:
        """Move the target network, if any, by this share of the way to the online weights."""
        if share == 1.0:
            self._target_weights.data.copy_(self.weights.data)
        elif share > 0 and self._has_target:
            self._target_weights.data.lerp_(self.weights.data, share)

    @torch.no_grad()
    def state_values(self, obs: Tensor) -> Tensor:
        """Return the value of each observation, ``[B]``, for the returns of a rollout."""
        if self._config.noisy:
            self._target_network.store_noise(self._target_network.draw_noise(self._noise_generator))
        return self._target_network.state_values(obs)

    def q_values(self, obs: Tensor) -> Tensor:
        """Return the values ``[B, A]`` by the newest weights, for acting, without a gradient."""
        return self.online.q_values(obs)

    def read_metrics(self) -> dict[str, float]:
        """Return metrics of the newest update; only this call makes the host wait for a device."""
        if self._newest is None:
            return {}
        skipped = float(torch.as_tensor(self._skipped).sum())
        return {**self._newest.metrics(self._objective.head), "skipped": skipped}

    def state_dict(self) -> StateDict:
        return {
            **{f"{prefix}weights": flat.data for prefix, flat in self._flat.items()},
            **{f"{prefix}buffers": flat.buffers() for prefix, flat in self._flat.items()},
            "optimiser": self._updater.state_dict(),
            **self._gradient.state_dict(),
            "noise": self._noise_generator.get_state(),
            "objective": self._objective.generator.get_state(),
            "target_updates": self._target_updates,
            "target_move": 0.0,  # always made at once; RecordedLearner may make one later
            "lr_scale": self.lr_scale,
            # One number; RecordedLearner has one per agent.
            "skipped": torch.as_tensor(self._skipped).squeeze(-1).tolist(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._newest = None
        for prefix, flat in self._flat.items():
            flat.data.copy_(state[f"{prefix}weights"])
            for name, buffer in flat.buffers().items():
                buffer.copy_(state[f"{prefix}buffers"][name])
        self._updater.load_state_dict(state["optimiser"])
        self._gradient.load_state_dict(state)
        restore_generator(self._noise_generator, state["noise"])
        restore_generator(self._objective.generator, state["objective"])
        self._target_updates = state["target_updates"]
        self.lr_scale = state["lr_scale"]
        self._skipped = state["skipped"]
