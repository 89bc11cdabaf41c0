"""The learner: batches in, gradients out, and an updater that turns them into weights.

``learn`` is asked for so many gradient steps; ``_draw`` and ``_train`` make bursts of them;
``step`` is the gradient step. With ``capturable`` nothing in a burst asks the host for a value,
so that an accelerator can run ahead of it, and ``record`` turns whole bursts into single launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable, switch
from qfleet.accelerator.graphs import record
from qfleet.accelerator.streams import SideStream
from qfleet.agent import schedules
from qfleet.agent.gradients import LossInfo, make_gradient
from qfleet.agent.weights import FlatWeights
from qfleet.algorithms.objective import Objective, Samples, TargetTerms
from qfleet.config.config import Config
from qfleet.core.seeding import restore_generator
from qfleet.core.types import Batch, Clock, Memory, StateDict, Updater
from qfleet.networks.fused_cnn import FusedCNN
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.timers import Timers

# Samples drawn at once for a burst: enough to hide per-draw overhead, little enough for the cache.
BURST_SAMPLES = 8192
# Prioritised batches drawn at once: their priorities are then at most so many updates old.
PRIORITIZED_AT_ONCE = 8


class Health(NamedTuple):
    """How an agent of a population is."""

    abs_q_max: float
    """Largest |Q| or |target| of its newest update."""
    skipped: float
    """Its gradients that were not finite, since the run began."""


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
        *,
        capturable: bool = False,
        fused: FusedCNN | None = None,
        drawing: str | None = None,
    ) -> None:
        """``target`` is ``online`` itself where there is no target network.

        ``drawing`` is the stage that drawing samples is part of, where that is more than copying.

        Where ``online`` is a population, batches are as many times larger and agent-major.
        """
        self._config, self._clock, self._device = config, clock, device
        self._copying, self._learning = timers.span("copy"), timers.span("learn")
        # A rollout's samples come with their returns, which is learning more than copying.
        self._drawing = timers.span(drawing or ("copy" if config.replay else "learn"))
        self.online, self._target_network = online, target
        self.weights = FlatWeights(online)
        self._has_target = target is not online
        self._target_weights = FlatWeights(target) if self._has_target else self.weights
        self._target_weights.data.copy_(self.weights.data)
        self._memory, self._objective = memory, objective
        weighted = config.prioritized_replay or not config.replay
        self._fused = fused
        self._gradient = make_gradient(online, objective, self.weights, weighted, fused)
        self._batch_size = config.batch_size * (self.weights.agents or 1)
        self._updater = make_updater(self.weights)
        self._noise = torch.Generator(device=device).manual_seed(seed)
        self._target_updates = 0
        self.lr_scale = 1.0
        """Lowered on a plateau, when asked."""
        at_once = PRIORITIZED_AT_ONCE if config.prioritized_replay else BURST_SAMPLES
        self._at_once = max(1, min(BURST_SAMPLES // self._batch_size, at_once))
        # Noise is drawn for each batch; a torso's own buffers (batch normalisation) tell batches
        # apart too; and a whole burst of IQN's fractions would fill gigabytes.
        has_state = any(True for _ in online.torso.buffers())
        self._looks_singly = config.noisy or has_state or config.head == "iqn"
        self._targets_at_once = not (config.double or self._looks_singly)
        self._look = Compilable(self._target_terms_of, is_sized=not self._looks_singly)
        self._find_target = Compilable(self._target_of, is_sized=self._targets_at_once)
        self._keep_noise = Compilable(online.store_noise)
        self._keep_target_noise = Compilable(target.store_noise)
        self._ahead = SideStream(device, "learner, ahead", worthwhile=not has_state)
        # Coming together costs a few µs, too many where there is nothing to do beside; and buffers
        # that both sides change would be changed in no fixed order.
        busy = config.prioritized_replay or not self._targets_at_once
        self._beside = SideStream(device, "learner, beside", worthwhile=busy and not has_state)
        self._draws_recorded = capturable and memory.device.type == device.type
        self._capturable = capturable
        # What a burst reads besides its batches. On an accelerator they are tensors, so that a
        # recorded burst sees new values.
        self._learning_rate: Tensor | float = config.learning_rate
        self._beta: Tensor | float = config.prioritized_replay_beta0
        self._target_move: Tensor | float = 0.0
        self._skipped: Tensor | float = 0.0
        if capturable:
            each = () if self.weights.agents is None else (self.weights.agents, 1)
            self._learning_rate = torch.zeros(each, device=device)
            self._beta = torch.zeros((), device=device)
            self._target_move = torch.zeros((), device=device)
            self._skipped = torch.zeros(each, device=device)
        self.relative_rates: Tensor | None = None
        """A population's: learning rates of its agents, ``[K, 1]``, as multiples of the run's."""
        self._newest: tuple[LossInfo, Tensor, Tensor | float] | None = None
        self._recorded: dict[int, Callable[[], None]] = {}
        self._newest_of: dict[int, tuple[LossInfo, Tensor, Tensor | float] | None] = {}

    def learn(self, updates: int) -> None:
        """Take so many gradient steps."""
        self._read_schedules()
        while updates > 0:
            count = self._chunk(updates)
            self.burst(count)
            self._clock.updates += count
            updates -= count

    def burst(self, count: int) -> None:
        """Gradient steps on samples drawn together, by one launch where that was recorded."""
        recorded = self._recorded.get(count)
        if recorded is None:
            self._train(self._draw(count))
        else:
            recorded()

    def _chunk(self, updates: int) -> int:
        """How many of these updates to make at once; recorded bursts come in two sizes."""
        if not self._recorded:
            return min(updates, self._at_once)
        return self._at_once if updates >= self._at_once else 1

    def limit_bursts(self, updates_at_once: int) -> None:
        """Make bursts of at most so many updates."""
        self._at_once = updates_at_once

    def _read_schedules(self) -> None:
        """Bring what depends on the clock up to now."""
        rate = self._read_rate()
        beta = schedules.importance_exponent(self._config, self._clock.progress)
        move = self._target_move_due()
        if self._capturable:
            # Kernel arguments, not copies from host memory that could change before they happen.
            assert isinstance(self._beta, Tensor)
            assert isinstance(self._target_move, Tensor)
            self._beta.fill_(beta)
            if move:
                self._target_move.fill_(move)
        else:
            self._learning_rate, self._beta, self._target_move = rate, beta, move

    def _read_rate(self) -> float:
        """The run's learning rate now; where a tensor holds the agents', it is brought up to it."""
        rate = schedules.learning_rate(self._config, self._clock.progress) * self.lr_scale
        if isinstance(self._learning_rate, Tensor):
            self._learning_rate.fill_(rate)
            if self.relative_rates is not None:
                self._learning_rate.mul_(self.relative_rates)
        return rate

    def _target_move_due(self) -> float:
        """How far the target network moves now, its interval having passed k times on the clock.

        k moves towards the same weights by τ are one move by 1 − (1 − τ)^k.
        """
        due = self._clock.progress // self._config.target_update_interval - self._target_updates
        self._target_updates += max(due, 0)
        return 1.0 - (1.0 - self._config.tau) ** max(due, 0)

    def _draw(self, count: int) -> Batch:
        """Samples for so many gradient steps: within a burst the memory does not change."""
        if self._has_target and not self._config.replay:
            self._move_target()  # first, for samples of a rollout come with their returns
        with self._drawing:
            return self._memory.sample(count * self._batch_size, self._beta)

    def _train(self, samples: Batch) -> None:
        """A burst of gradient steps on samples that were drawn together."""
        if self._config.replay:
            self._move_target()
        with self._copying:
            samples = samples.to(self._device)
        batches = samples.split(self._batch_size)
        with self._learning:
            targets = self._targets(samples, batches)
            remembering = [
                self.step(batch, find_target)
                for batch, find_target in zip(batches, targets, strict=True)
            ]
            remembering[-1]()

    def _targets(self, samples: Batch, batches: list[Batch]) -> list[Callable[[], Tensor]]:
        """For every batch a function that finds its targets.

        Within a burst the target network does not change. So its terms are found for all batches
        at once, and whole targets too where they need nothing else; or, where batches must be kept
        apart, one after another and ahead of its use. Without replay they are in the samples.
        """
        if not self._config.replay:
            return [functools.partial(_same, batch.reward) for batch in batches]
        if self._looks_singly:
            every_terms = [
                self._ahead.start(functools.partial(self._single_target_terms, batch))
                for batch in batches
            ]
            return [
                functools.partial(self._target_later, batch, target_terms)
                for batch, target_terms in zip(batches, every_terms, strict=True)
            ]
        size = self._batch_size
        target_terms = self._target_terms(samples)
        if self._targets_at_once:
            targets = torch.split(self._target(samples, target_terms), size)
            return [functools.partial(_same, target) for target in targets]
        aheads = torch.split(target_terms.ahead, size)
        heres = (
            [None] * len(aheads)
            if target_terms.here is None
            else torch.split(target_terms.here, size)
        )
        return [
            functools.partial(self._target, batch, TargetTerms(ahead, here))
            for batch, ahead, here in zip(batches, aheads, heres, strict=True)
        ]

    def step(self, batch: Batch, find_target: Callable[[], Tensor]) -> Callable[[], None]:
        """One gradient step. What comes back waits until new priorities are in place."""
        if self._config.noisy:
            self._keep_noise(self.online.draw_noise(self._noise))
        target_found = self._beside.start(find_target)
        predicted = self._gradient.predict(batch)
        target = target_found()
        loss_info = self._gradient(predicted, batch, target)
        remember = functools.partial(self._remember, batch, loss_info)
        on_host = self._memory.device.type != self._device.type
        # A memory on the host makes the host wait for the gradient: launch the optimiser before.
        remembered = None if on_host else self._beside.start(remember)
        applied = self._updater.apply(self._learning_rate, loss_info.loss)
        self._skipped += applied["skipped"]
        self._newest = (loss_info, target, applied["grad_norm"])
        return self._beside.start(remember) if remembered is None else remembered

    def _remember(self, batch: Batch, loss_info: LossInfo) -> None:
        if self._config.prioritized_replay:
            self._memory.update_priorities(batch.index, loss_info.priority)

    @torch.no_grad()
    def best_values(self, obs: Tensor) -> Tensor:
        """What each observation is worth, for returns, ``[B]``.

        By the target network, or by the newest weights where there is none.
        """
        network, weights = self._target_network, self._target_weights
        if self._config.noisy:
            self._keep_target_noise(network.draw_noise(self._noise))
        there = obs.to(self._device)
        if self._fused is not None and self._fused.takes(len(obs)):
            return self._fused.q_values(weights.data, there).amax(1).to(obs.device)
        return network.state_values(there).to(obs.device)

    @property
    def is_fused(self) -> bool:
        """Whether kernels of our own stand in for the network."""
        return self._fused is not None

    def q_values(self, obs: Tensor) -> Tensor:
        """Values ``[B, A]`` by the newest weights, for acting; no gradient goes through them."""
        if self._fused is not None and self._fused.takes(len(obs)):
            return self._fused.q_values(self.weights.data, obs)
        return self.online.q_values(obs)

    def _move_target(self) -> None:
        if isinstance(self._target_move, Tensor):
            # Exact at both ends: a weight of 0 keeps, a weight of 1 copies.
            self._target_weights.data.lerp_(self.weights.data, self._target_move)
            self._target_move.zero_()
        elif self._target_move == 1.0:
            self._target_weights.data.copy_(self.weights.data)
        elif self._target_move > 0:
            self._target_weights.data.lerp_(self.weights.data, self._target_move)
        if not self._capturable:
            self._target_move = 0.0

    def _single_target_terms(self, batch: Batch) -> TargetTerms:
        if self._config.noisy:
            self._keep_target_noise(self._target_network.draw_noise(self._noise))
        return self._target_terms(batch)

    def _target_later(self, batch: Batch, target_terms: Callable[[], TargetTerms]) -> Tensor:
        return self._target(batch, target_terms())

    def _target_terms(self, batch: Batch) -> TargetTerms:
        target_terms: TargetTerms = self._look(*_samples(batch))
        return target_terms

    def _target_terms_of(self, *columns: Tensor) -> TargetTerms:
        return self._objective.target_terms(Samples(*columns), self._target_network)

    def _target(self, batch: Batch, target_terms: TargetTerms) -> Tensor:
        target: Tensor = self._find_target(target_terms, *_samples(batch))
        return target

    def _target_of(self, target_terms: TargetTerms, *columns: Tensor) -> Tensor:
        return self._objective.target(
            Samples(*columns), target_terms, self.online, self._target_network
        )

    def set_batch_size(self, samples: int) -> None:
        """So many samples per update from now on; never more than were configured."""
        self._batch_size = samples

    def adopt_weights(self) -> None:
        """The online weights came from elsewhere: the target network begins with them too."""
        self._target_weights.data.copy_(self.weights.data)

    # --- recording --------------------------------------------------------------------------

    @property
    def networks(self) -> list[QNetwork]:
        return [network for _, _, network in self._copies()]

    def _copies(self) -> list[tuple[str, FlatWeights, QNetwork]]:
        """The networks there are, by the prefix of their names in a checkpoint."""
        online = ("", self.weights, self.online)
        target = ("target_", self._target_weights, self._target_network)
        return [online, target] if self._has_target else [online]

    @property
    def most_at_once(self) -> int:
        """Gradient steps that one burst may make."""
        return self._at_once

    def compilables(self) -> list[Compilable]:
        """What torch.compile may be switched on for."""
        looks = self._config.replay and self._objective.head != "iqn"
        ours = [self._look, self._find_target] if looks else []
        theirs = [*self._gradient.compilables(), *self._updater.compilables()]
        ours += [self._keep_noise, self._keep_target_noise] if self._config.noisy else []
        return [*ours, *theirs, *(self._memory.compilables() if self._draws_recorded else [])]

    def record(self, updates_at_once: int, samples: Batch | None = None) -> None:
        """Turn bursts into single launches. The bursts run a few times here: restore the state.

        ``samples``, where the memory is on the host, is a burst's worth of them on the device: only
        learning from them is recorded, and every burst's samples are copied there first.
        """
        assert self._capturable, "only a learner that never asks the host can be recorded"
        drawn_from = [self._noise, self._objective.generator]
        drawn_from += self._memory.generators() if self._draws_recorded else []
        self.limit_bursts(updates_at_once)
        self._recorded.clear()
        sized = [function for function in self.compilables() if function.is_sized]
        compiled = any(function.on for function in sized)
        # Without replay all updates of a rollout are one burst: no other is ever asked for.
        for count in sorted({updates_at_once, 1} if self._config.replay else {updates_at_once}):
            part = samples and samples.split(count * self._batch_size)[0]
            # Single updates are rare: what depends on their number is not compiled for them.
            switch(sized, compiled and count == updates_at_once)
            once = functools.partial(self._replayed, count, part)
            launch = record(once, self._device, drawn_from, "learner")
            self._recorded[count] = functools.partial(self._launch, count, part, launch)
            self._newest_of[count] = self._newest
        self._newest = None

    def _replayed(self, count: int, samples: Batch | None) -> None:
        self._train(self._draw(count) if samples is None else samples)

    def _launch(self, count: int, samples: Batch | None, launch: Callable[[], None]) -> None:
        if samples is not None:
            drawn = self._draw(count)
            with self._copying:
                samples.copy_(drawn)
        self._newest = None
        with self._learning:
            launch()
        if (
            self._newest is None
        ):  # a replay runs no Python: its numbers are where they were recorded
            self._newest = self._newest_of[count]

    def read_metrics(self) -> dict[str, float]:
        """Numbers of the newest update; the only place where the host waits for them."""
        if self._newest is None:
            return {}
        loss_info, _, grad_norm = self._newest
        return {
            "loss": float(loss_info.loss()),
            "grad_norm": float(torch.as_tensor(grad_norm).max()),
            "q_mean": float(loss_info.prediction.mean()),
            "abs_q_max": float(self._largest(1).max()),
            "skipped": float(torch.as_tensor(self._skipped).sum()),
            **{name: float(value) for name, value in loss_info.numbers().items()},
        }

    def _largest(self, agents: int) -> Tensor:
        """Largest |Q| or |target| of the newest update, ``[agents]``; NaN where there is one."""
        assert self._newest is not None
        loss_info, target, _ = self._newest
        largest = loss_info.prediction.abs().view(agents, -1).amax(1)
        if self._objective.head == "c51":  # C51's targets are probabilities
            return largest
        return torch.maximum(largest, target.abs().view(agents, -1).amax(1))

    # --- a population's agents ----------------------------------------------------------------

    def read_agents(self) -> list[Health]:
        """Of each agent how its values and gradients are; none before the first update."""
        agents = self.weights.agents
        if self._newest is None or agents is None:
            return []
        skipped = torch.as_tensor(self._skipped).view(-1).tolist()
        largest = self._largest(agents).tolist()
        return [Health(*each) for each in zip(largest, skipped, strict=True)]

    def rates_in_force(self) -> list[float]:
        """The agents' values of ``learning_rate``, by the tensor that kernels read.

        The schedule is taken out of it again; where that has come to 0, by what it multiplied.
        """
        rate = self._read_rate()
        assert isinstance(self._learning_rate, Tensor)
        assert self.relative_rates is not None
        relative = self._learning_rate.double() / rate if rate > 0 else self.relative_rates
        return [value * self._config.learning_rate for value in relative.view(-1).tolist()]

    def take_over(self, loser: int, winner: int) -> None:
        """Give a row the weights of another, and all that its optimiser knows."""
        for rows in (self.weights.data, *self._updater.state_dict().values()):
            rows[loser].copy_(rows[winner])

    @staticmethod
    def select(state: StateDict, rows: list[int]) -> StateDict:
        """The state of these agents alone."""
        moments = {name: tensor[rows] for name, tensor in state["optimiser"].items()}
        return {
            **state,
            "weights": state["weights"][rows],
            "optimiser": moments,
            "skipped": [state["skipped"][row] for row in rows],
        }

    # --- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        copies = self._copies()
        return {
            **{f"{prefix}weights": weights.data for prefix, weights, _ in copies},
            **{f"{prefix}buffers": dict(_flat_names(network)) for prefix, _, network in copies},
            "optimiser": self._updater.state_dict(),
            "noise": self._noise.get_state(),
            "objective": self._objective.generator.get_state(),
            "target_updates": self._target_updates,
            "target_move": float(self._target_move),
            "lr_scale": self.lr_scale,
            # A number, or one of each agent.
            "skipped": torch.as_tensor(self._skipped).squeeze(-1).tolist(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._newest = None
        for prefix, weights, network in self._copies():
            weights.data.copy_(state[f"{prefix}weights"])
            for name, buffer in _flat_names(network):
                buffer.copy_(state[f"{prefix}buffers"][name])
        self._updater.load_state_dict(state["optimiser"])
        restore_generator(self._noise, state["noise"])
        restore_generator(self._objective.generator, state["objective"])
        self._target_updates = state["target_updates"]
        self.lr_scale = state["lr_scale"]
        for name in ("target_move", "skipped"):
            held = getattr(self, f"_{name}")
            if isinstance(held, Tensor):
                held.copy_(torch.tensor(state[name]).view_as(held))
            else:
                setattr(self, f"_{name}", state[name])


def _samples(batch: Batch) -> Samples:
    """What targets are made of; compiled functions take its tensors, not batches."""
    return Samples(batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs)


def _same(value: Tensor) -> Tensor:
    return value


def _flat_names(network: QNetwork) -> list[tuple[str, Tensor]]:
    return [(name.replace("/", "."), buffer) for name, buffer in network.named_buffers()]
