"""The whole network of a run whose ranks hold parts of it, as rank 0 evaluates and saves it.

In: the parts of the ranks that hold the first copy of the network. Out: a plain network with its
weights, and checkpoints of whole tensors, which load under any other layout.
"""

from __future__ import annotations

from qfleet.agent.evaluation import Evaluation, GiveUp
from qfleet.agent.learner import Learner
from qfleet.agent.weights import FlatWeights
from qfleet.core.types import Clock, StateDict
from qfleet.engines.all_reduce.group import Group, Order
from qfleet.engines.all_reduce.mesh import cut_state, join_states
from qfleet.engines.parts import Model, PolicyEvaluator
from qfleet.networks.parallel.layout import Layout
from qfleet.networks.qnetwork import QNetwork


class WholeModel(Model):
    """The model of rank 0, whose learner holds the first part of the network."""

    def __init__(
        self, learner: Learner, network: QNetwork, layout: Layout, group: Group, clock: Clock
    ) -> None:
        """``network`` is a plain one; the newest weights are fetched when they are needed."""
        self.online, self.layout = network, layout
        self._learner, self._group, self._clock = learner, group, clock
        self._flat, self._fetched = FlatWeights(network), -1
        self._unsent: StateDict | None = None
        """A state that this rank has loaded and that the others do not have yet."""

    @property
    def weights(self) -> FlatWeights:
        """The newest weights of all ranks."""
        self.fetch()
        return self._flat

    def fetch(self) -> None:
        """Copy the newest weights of all ranks into the network."""
        if self._fetched != self._clock.updates:
            if self._unsent is not None:
                whole = self._unsent["weights"]
            else:
                parts = [self._learner.weights.data]
                parts += [part["weights"] for part in self._ask(Order.SEND_WEIGHTS)]
                whole = self.layout.join(parts)
            self._flat.data.copy_(whole)
            self._fetched = self._clock.updates

    @property
    def lr_scale(self) -> float:
        return self._learner.lr_scale

    @lr_scale.setter
    def lr_scale(self, scale: float) -> None:
        self._learner.lr_scale = scale

    def read_metrics(self) -> dict[str, float]:
        return self._learner.read_metrics()

    def state_dict(self) -> StateDict:
        if self._unsent is not None:
            return self._unsent
        others = self._ask(Order.SEND_LEARNER)
        return join_states([self._learner.state_dict(), *others], self.layout)

    def load_state_dict(self, state: StateDict) -> None:
        """Restore this rank; the others get their parts when they are brought in step."""
        self._learner.load_state_dict(cut_state(state, self.layout, 0))
        self._unsent, self._fetched = state, -1

    def part(self, state: StateDict, rank: int) -> StateDict:
        """Return the part of a whole state that this rank of the run holds."""
        return cut_state(state, self.layout, rank % self.layout.ranks)

    def start_from(self, weights: FlatWeights) -> None:
        """Begin with copies of these weights, of a whole network."""
        self.weights.copy_from(weights)
        state = self.state_dict()
        vectors = [name for name in ("weights", "target_weights") if name in state]
        self.load_state_dict(state | {name: self._flat.data.clone() for name in vectors})

    def sent(self) -> None:
        """Called when all ranks are in step."""
        self._unsent = None

    def _ask(self, order: Order) -> list[StateDict]:
        """Return what the other ranks of the first copy send."""
        answers = []
        for rank in range(1, self.layout.ranks):
            self._group.give_order(order, rank)
            answers.append(self._group.receive_state(rank))
        return answers


class WholeEvaluator:
    """Plays evaluations with the whole network, on rank 0 alone."""

    def __init__(self, model: WholeModel, player: PolicyEvaluator) -> None:
        """``player`` plays with the network of ``model``."""
        self._model, self._player = model, player

    def play(self, give_up: GiveUp) -> Evaluation | None:
        self._model.fetch()
        return self._player.play(give_up)
