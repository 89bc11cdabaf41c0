"""Validation on a dataset after every epoch of offline training.

In: the run's network and the transitions of ``validation_data``. Out: scalars ``data/…`` in the
log, and a stop or a lower learning rate if ``plateau_metric`` is one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qfleet.config.config import Config
from qfleet.core.types import StateDict
from qfleet.data.dataset_memory import DatasetMemory
from qfleet.data.manifest import Dataset
from qfleet.engines.factories import make_objective
from qfleet.engines.offline import make_dataset_memory
from qfleet.networks.qnetwork import ILLEGAL, QNetwork
from qfleet.training.best_policy import save_best
from qfleet.training.callbacks import Hook
from qfleet.training.early_stopping import EarlyStopping
from qfleet.training.plateau import Plateau
from qfleet.training.run_state import RunState
from qfleet.training.standings import Standings

CHUNK = 1024
"""Transitions per pass through the network."""


class Validate(Hook):
    """Measures ``validation_data`` after every epoch; stops early by it if configured."""

    _memory: DatasetMemory
    _transitions: int
    """Those of the training dataset: an epoch."""

    def __init__(self, config: Config, plateau: Plateau) -> None:
        self._early_stopping, self._plateau, self._epochs = EarlyStopping(config), plateau, 0

    def on_start(self, run: RunState) -> None:
        config, parts = run.config, run.parts
        if not config.validation_data:
            return
        self._transitions = Dataset(config.data).manifest.transitions
        dataset = Dataset(config.validation_data)
        # In the device's memory if the network is there.
        self._memory = make_dataset_memory(config, dataset, config.seed, parts.device)
        parts.closing.callback(self._memory.close)

    def on_step(self, run: RunState) -> None:
        self._validate(run)

    def on_finish(self, run: RunState) -> None:
        self._validate(run)

    def _validate(self, run: RunState) -> None:
        if not run.config.validation_data:
            return
        epochs = run.parts.clock.env_steps // self._transitions
        if epochs == self._epochs:
            return
        with run.not_training("evaluate"):
            network = run.parts.model.online
            scalars = measure(run.config, network, self._memory, run.is_out_of_time)
        if scalars is None:
            return  # a resumed run measures this epoch
        passed, self._epochs = epochs - self._epochs, epochs
        run.writers.write(run.parts.clock.env_steps, dict(scalars))
        metric = run.config.plateau_metric
        if metric == "return":
            return
        sign = -1.0 if metric == "td_loss" else 1.0
        # A fleet may read several epochs of a small dataset between two looks.
        value = sign * scalars[f"data/{metric}"]
        is_best, stops, lower_rate = self._early_stopping.add(value, passed)
        if is_best:
            parts, unknown = run.parts, Standings(1)  # its return, that is
            weights, env_steps = parts.model.weights, parts.clock.env_steps
            save_best(run.folder, parts, unknown, [0], run.faults, weights, env_steps)
        if stops:
            run.stop("patience")
        if lower_rate:
            self._plateau.reached(run)

    def state_dict(self, run: RunState) -> StateDict:
        if not run.config.validation_data:
            return {}  # as in checkpoints of older versions
        own = self._early_stopping.state_dict()
        return {"validation": {"epochs": self._epochs, **own}}

    def load_state_dict(self, run: RunState, state: StateDict) -> None:
        if run.config.validation_data:
            self._epochs = state["validation"]["epochs"]
            self._early_stopping.load_state_dict(state["validation"])


@torch.no_grad()
def measure(
    config: Config,
    network: QNetwork,
    memory: DatasetMemory,
    give_up: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Return the metrics of a network on all transitions of a dataset; None if it gave up.

    ``td_loss`` has no penalty, and its targets are the network's own; of behaviour cloning it is
    the cross-entropy. ``q_spread``: the mean difference between the largest and the smallest value
    of a state's actions. Precision and recall of an action that never occurs are left out.
    """
    plain = config.replace(cql_alpha=0.0, bcq_threshold=0.0)
    objective = make_objective(plain, memory.device, config.seed)
    loss = spread = torch.zeros((), device=memory.device)
    counts = torch.zeros((network.num_actions,) * 2, dtype=torch.int64, device=memory.device)
    memory.go_to_row(0)
    with evaluating(network):
        for start in range(0, memory.transitions, CHUNK):
            if give_up():
                return None
            batch = memory.sample(min(CHUNK, memory.transitions - start), 0.0)
            terms = objective.target_terms(batch, network)
            target = objective.target(batch, terms, network, network)
            prediction = objective.predict(batch.obs, network)
            loss = loss + objective.loss(prediction, batch.action, network, target).per_sample.sum()
            values = network.q_values(batch.obs)
            smallest = torch.where(values > ILLEGAL / 2, values, torch.inf).amin(1)
            spread = spread + (values.amax(1) - smallest).sum()
            pairs = batch.action * network.num_actions + values.argmax(1)
            counts += torch.bincount(pairs, minlength=counts.numel()).view_as(counts)
    return {
        "data/td_loss": float(loss) / memory.transitions,
        "data/q_spread": float(spread) / memory.transitions,
        **agreement(counts),
    }


@contextlib.contextmanager
def evaluating(network: QNetwork) -> Iterator[None]:
    """Switch the network to evaluation, as when it acts, and back."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)


def agreement(counts: Tensor) -> dict[str, float]:
    """Return accuracy, and precision and recall per action, of counts ``[in data, chosen]``."""
    right = counts.diagonal()
    found = {"data/agreement": float(right.sum() / counts.sum())}
    for name, totals in {"precision": counts.sum(0), "recall": counts.sum(1)}.items():
        for action, (hits, total) in enumerate(zip(right.tolist(), totals.tolist(), strict=True)):
            if total:
                found[f"data/{name}_{action}"] = hits / total
    return found
