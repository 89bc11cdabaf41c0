"""The learner on accelerators and for populations: the steps of ``Learner``, arranged for a GPU.

- With ``capturable`` a burst has no host synchronisation, so that an accelerator can run ahead of
  the host, and ``record`` turns whole bursts into single launches (CUDA graphs).
- Targets and priorities are computed on side streams, in parallel with the forward pass.
- Functions of tensors can be compiled, and qfleet's own kernels can replace the network.
- The agents of a population learn together: batches are agent-major, and learning rates ``[K, 1]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable, switch
from qfleet.accelerator.graphs import record
from qfleet.accelerator.stream_timer import StreamTimer
from qfleet.accelerator.streams import SideStream
from qfleet.agent import schedules
from qfleet.agent.dense_gradient import DenseGradient
from qfleet.agent.gradients import Gradient, LossInfo, UpdateInfo
from qfleet.agent.learner import Learner
from qfleet.agent.recorded_gradients import CompilableGradient, FusedGradient
from qfleet.agent.weights import FlatWeights, buffers_of
from qfleet.algorithms.objective import Columns, Objective, TargetTerms
from qfleet.config.config import Config
from qfleet.core.types import Batch, Clock, Memory, StateDict, Updater
from qfleet.networks.fused_cnn import FusedCNN
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.timers import Timers


class Health(NamedTuple):
    """The state of one agent's values and gradients."""

    abs_q_max: float
    """Largest |Q| or |target| of its newest update."""
    skipped: float
    """Its gradients that were not finite, since the run began."""


class RecordedLearner(Learner):
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
        capturable: bool = False,
        fused: FusedCNN | None = None,
    ) -> None:
        self._fused = fused
        super().__init__(
            config, online, target, memory, objective, updater_factory, clock, timers, device, seed,
            draw_stage=draw_stage,
        )  # fmt: skip
        self._device, self._copying = device, timers.span("copy")
        self._targets_at_once = not (config.double or self._terms_per_batch)
        self._target_terms = Compilable(self._terms_from, is_sized=not self._terms_per_batch)
        self._find_target = Compilable(self._target_from, is_sized=self._targets_at_once)
        self._store_noise = Compilable(online.store_noise)
        self._store_target_noise = Compilable(target.store_noise)
        # Two streams would change the same buffers in no fixed order. And joining streams takes a
        # few µs, too long if the second stream has nothing to compute.
        busy = config.prioritized_replay or not self._targets_at_once
        self._ahead = SideStream(device, "learner, ahead", worthwhile=not self._has_buffers)
        self._beside = SideStream(
            device, "learner, beside", worthwhile=busy and not self._has_buffers
        )
        self.device_time = StreamTimer(device)
        self._capturable = capturable
        self._draws_recorded = capturable and memory.device.type == device.type
        self._target_move: Tensor | float = 0.0
        """How far the target network moves at the start of the next burst."""
        if capturable:
            # Tensors, so that a recorded burst reads new values.
            each = () if self.weights.agents is None else (self.weights.agents, 1)
            self._learning_rate = torch.zeros(each, device=device)
            self._skipped = torch.zeros(each, device=device)
            self._beta = torch.zeros((), device=device)
            self._target_move = torch.zeros((), device=device)
        self.relative_rates: Tensor | None = None
        """Learning rates of a population's agents, ``[K, 1]``, as multiples of the run's."""
        self._recorded: dict[int, Callable[[], None]] = {}
        """Launch of a burst, by its number of updates."""
        self._newest_of: dict[int, UpdateInfo | None] = {}

    def _plain_gradient(self, weighted: bool) -> Gradient:
        if self._fused is not None:
            return FusedGradient(self._fused, self._objective, self.weights)
        gradient = super()._plain_gradient(weighted)
        if isinstance(gradient, DenseGradient):
            return gradient
        return CompilableGradient(self.online, self._objective, self.weights, weighted)

    # --- bursts -------------------------------------------------------------------------------

    def learn(self, updates: int) -> None:
        self._read_schedules()
        while updates > 0:
            count = min(updates, self.burst_updates)
            if self._recorded and count < self.burst_updates:
                count = 1  # bursts are recorded in two sizes
            if self._target_follows:
                self._updater.before_gradient()  # it follows the newest weights
            self.burst(count)
            self._clock.updates += count
            updates -= count
            if self._target_follows and updates:
                self._read_schedules()

    def burst(self, count: int) -> None:
        """Take ``count`` gradient steps on samples drawn at once, by one launch if recorded."""
        recorded = self._recorded.get(count)
        with self.device_time:
            if recorded is None:
                self._train(self._draw(count))
            else:
                recorded()

    def _read_schedules(self) -> None:
        """Update what depends on the clock."""
        rate = self._read_rate()
        beta = schedules.importance_exponent(self._config, self._clock.progress)
        move = self._take_target_move()
        if self._capturable:
            # Kernel arguments, not copies from host memory, which could change before they happen.
            assert isinstance(self._beta, Tensor)
            assert isinstance(self._target_move, Tensor)
            self._beta.fill_(beta)
            if move:
                self._target_move.fill_(move)
        else:
            self._learning_rate, self._beta, self._target_move = rate, beta, move

    def _read_rate(self) -> float:
        """Return the run's learning rate now; write the agents' rates to their tensor."""
        rate = schedules.learning_rate(self._config, self._clock.progress) * self.lr_scale
        if isinstance(self._learning_rate, Tensor):
            self._learning_rate.fill_(rate)
            if self.relative_rates is not None:
                self._learning_rate.mul_(self.relative_rates)
        return rate

    def _draw(self, count: int) -> Batch:
        if self._has_target and not self._config.replay:
            self._make_target_move()  # first, because the samples of a rollout have returns
        with self._draw_span:
            return self._memory.sample(count * self.batch_size, self._beta)

    def _make_target_move(self) -> None:
        if isinstance(self._target_move, Tensor):
            if self._target_move.is_cpu and not self._target_move:
                return  # on a device, to look would make the host wait
            # Exact at both ends: a weight of 0 keeps, a weight of 1 copies.
            self._target_weights.data.lerp_(self.weights.data, self._target_move)
            self._target_move.zero_()
        else:
            self.move_target(self._target_move)
            self._target_move = 0.0

    def _train(self, samples: Batch) -> None:
        if self._config.replay:
            self._make_target_move()
        with self._copying:
            samples = samples.to(self._device)
        batches = samples.split(self.batch_size)
        with self._learn_span:
            targets = self._targets(samples, batches)
            waits = [
                self._step(batch, compute_target)
                for batch, compute_target in zip(batches, targets, strict=True)
            ]
            waits[-1]()

    def _targets(self, samples: Batch, batches: list[Batch]) -> list[Callable[[], Tensor]]:
        """Return for every batch a function that computes its targets; see ``Learner._terms``.

        If batches need terms of their own, these are computed on a side stream ahead of their use.
        """
        if not self._config.replay:
            return [functools.partial(_same, batch.reward) for batch in batches]
        if self._terms_per_batch:
            waits = [
                self._ahead.start(functools.partial(self._terms_of, batch)) for batch in batches
            ]
            return [
                functools.partial(self._target_later, batch, wait)
                for batch, wait in zip(batches, waits, strict=True)
            ]
        terms = self._target_terms(*_columns(samples))
        if self._targets_at_once:
            target: Tensor = self._find_target(terms, *_columns(samples))
            return [functools.partial(_same, own) for own in torch.split(target, self.batch_size)]
        return [
            functools.partial(self._find_target, own, *_columns(batch))
            for batch, own in zip(batches, terms.split(self.batch_size), strict=True)
        ]

    def _step(self, batch: Batch, compute_target: Callable[[], Tensor]) -> Callable[[], None]:
        """Take one gradient step; return a function that waits for the new priorities."""
        self._updater.before_gradient()
        if self._config.noisy:
            self._store_noise(self.online.draw_noise(self._noise_generator))
        target_ready = self._beside.start(compute_target)
        predicted = self._gradient.predict(batch)
        target = target_ready()
        loss_info = self._gradient.backward(predicted, batch, target)
        if self._config.sum_gradients:
            self.weights.grad.mul_(self.batch_size // (self.weights.agents or 1))
        set_priorities = functools.partial(self._set_priorities, batch, loss_info)
        on_host = self._memory.device.type != self._device.type
        # A memory on the host makes the host wait for the gradient: launch the optimiser before.
        wait = None if on_host else self._beside.start(set_priorities)
        applied = self._updater.apply(self._learning_rate, loss_info.loss)
        self._skipped += applied["skipped"] * self._gradient.is_fault
        self._newest = UpdateInfo(loss_info, target, applied["grad_norm"])
        return self._beside.start(set_priorities) if wait is None else wait

    def _set_priorities(self, batch: Batch, loss_info: LossInfo) -> None:
        if self._config.prioritized_replay:
            self._memory.update_priorities(batch.index, loss_info.priority)

    def _terms_of(self, batch: Batch) -> TargetTerms:
        if self._config.noisy:
            self._store_target_noise(self._target_network.draw_noise(self._noise_generator))
        terms: TargetTerms = self._target_terms(*_columns(batch))
        return terms

    def _target_later(self, batch: Batch, wait: Callable[[], TargetTerms]) -> Tensor:
        target: Tensor = self._find_target(wait(), *_columns(batch))
        return target

    def _terms_from(self, *columns: Tensor) -> TargetTerms:
        return self._objective.target_terms(Columns(*columns), self._target_network)

    def _target_from(self, terms: TargetTerms, *columns: Tensor) -> Tensor:
        return self._objective.target(Columns(*columns), terms, self.online, self._target_network)

    @torch.no_grad()
    def state_values(self, obs: Tensor) -> Tensor:
        if self._config.noisy:
            self._store_target_noise(self._target_network.draw_noise(self._noise_generator))
        there = obs.to(self._device)
        if self._fused is not None and self._fused.takes(len(obs)):
            values = self._fused.q_values(self._target_weights.data, there).amax(1)
        else:
            values = self._target_network.state_values(there)
        return values.to(obs.device)

    def q_values(self, obs: Tensor) -> Tensor:
        if self._fused is not None and self._fused.takes(len(obs)):
            return self._fused.q_values(self.weights.data, obs)
        return self.online.q_values(obs)

    # --- recording ----------------------------------------------------------------------------

    @property
    def is_fused(self) -> bool:
        """Whether qfleet's own kernels replace the network."""
        return self._fused is not None

    def compilables(self) -> list[Compilable]:
        """Return the functions that torch.compile may be switched on for."""
        has_terms = self._config.replay and self._objective.head != "iqn"
        own = [self._target_terms, self._find_target] if has_terms else []
        own += [*self._gradient.compilables(), *self._updater.compilables()]
        own += [self._store_noise, self._store_target_noise] if self._config.noisy else []
        return [*own, *(self._memory.compilables() if self._draws_recorded else [])]

    def record(self, updates_at_once: int, samples: Batch | None = None) -> None:
        """Turn bursts into single launches. This runs bursts: the caller restores the state.

        ``samples``, if the memory is on the host, is a burst's worth of samples on the device: only
        learning from them is recorded, and every burst's samples are copied there first.
        """
        assert self._capturable, "only a capturable learner can be recorded"
        drawn_from = [self._noise_generator, self._objective.generator]
        drawn_from += self._memory.generators() if self._draws_recorded else []
        self.burst_updates = updates_at_once
        self._recorded.clear()
        sized = [function for function in self.compilables() if function.is_sized]
        compiled = any(function.on for function in sized)
        # Without replay all updates of a rollout are one burst: no other size is needed.
        for count in sorted({updates_at_once, 1} if self._config.replay else {updates_at_once}):
            part = samples and samples.split(count * self.batch_size)[0]
            # Single updates are rare: functions that depend on the size are not compiled for them.
            switch(sized, compiled and count == updates_at_once)
            once = functools.partial(self._replayed, count, part)
            launch = record(once, self._device, drawn_from, "learner")
            self._recorded[count] = functools.partial(self._launch, count, part, launch)
            self._newest_of[count] = self._newest
        self._newest = None

    def forget_recordings(self) -> None:
        """Take bursts step by step from now on; what the recordings used may then be closed."""
        self._recorded.clear()

    def _replayed(self, count: int, samples: Batch | None) -> None:
        self._train(self._draw(count) if samples is None else samples)

    def _launch(self, count: int, samples: Batch | None, launch: Callable[[], None]) -> None:
        if samples is not None:
            drawn = self._draw(count)
            with self._copying:
                samples.copy_(drawn)
        self._newest = None
        with self._learn_span:
            launch()
        if self._newest is None:  # a replay runs no Python, but writes to the recorded tensors
            self._newest = self._newest_of[count]

    # --- the agents of a population -----------------------------------------------------------

    def read_agents(self) -> list[Health]:
        """Return the health of each agent; an empty list before the first update."""
        agents = self.weights.agents
        if self._newest is None or agents is None:
            return []
        skipped = torch.as_tensor(self._skipped).view(-1).tolist()
        largest = self._newest.largest_value(self._objective.head, agents).tolist()
        return [Health(*each) for each in zip(largest, skipped, strict=True)]

    def rates_in_force(self) -> list[float]:
        """Return the agents' values of ``learning_rate``, from the tensor that kernels read.

        The schedule's factor is divided out; if it is 0, the agents' own factors are used.
        """
        rate = self._read_rate()
        assert isinstance(self._learning_rate, Tensor)
        assert self.relative_rates is not None
        relative = self._learning_rate.double() / rate if rate > 0 else self.relative_rates
        return [value * self._config.learning_rate for value in relative.view(-1).tolist()]

    def copy_agent(self, loser: int, winner: int) -> None:
        """Copy the weights, also the target's, and the optimiser state of one row to another."""
        own = (self.weights.data, self._target_weights.data)
        for rows in (*own, *self._updater.state_dict().values()):
            rows[loser].copy_(rows[winner])

    @staticmethod
    def select(state: StateDict, rows: list[int]) -> StateDict:
        """Return the state of these agents alone."""
        moments = {name: tensor[rows] for name, tensor in state["optimiser"].items()}
        own: StateDict = {}
        for prefix in ("", "target_") if "target_weights" in state else ("",):
            own[f"{prefix}weights"] = state[f"{prefix}weights"][rows]
            own[f"{prefix}buffers"] = buffers_of(state[f"{prefix}buffers"], rows)
        return {
            **state,
            **own,
            "optimiser": moments,
            "skipped": [state["skipped"][row] for row in rows],
        }

    # --- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        return {**super().state_dict(), "target_move": float(self._target_move)}

    def load_state_dict(self, state: StateDict) -> None:
        skipped = self._skipped
        super().load_state_dict(state)
        if isinstance(skipped, Tensor):  # in place: recorded kernels write to it
            self._skipped = skipped.copy_(torch.tensor(state["skipped"]).view_as(skipped))
        if isinstance(self._target_move, Tensor):
            self._target_move.fill_(state["target_move"])
        else:
            self._target_move = state["target_move"]


def _columns(batch: Batch) -> Columns:
    return Columns(batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs)


def _same(value: Tensor) -> Tensor:
    return value
