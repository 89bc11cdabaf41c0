"""K networks of one shape as one module: agent-major batches in, agent-major outputs out.

In a batch of K·B observations the first B are agent 0's, the next B agent 1's, and so on. Every
parameter is held K times, ``[K, …]``, and ``torch.func.vmap`` turns the network's operations into
batched ones, so that K agents cost as many launches as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from qfleet.core.errors import ConfigError
from qfleet.networks.plainly import plainly
from qfleet.networks.qnetwork import QNetwork

_STATEFUL = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"}


class Population(QNetwork):
    """What a learner and an actor ask of a ``QNetwork``, for K of them."""

    def __init__(self, networks: Sequence[QNetwork]) -> None:
        # Not QNetwork's: that one builds a torso and a head, and here they are all given.
        nn.Module.__init__(self)
        first = networks[0]
        kinds = {type(module).__name__ for module in first.torso.modules()}
        if kinds & _STATEFUL or any(True for _ in first.torso.buffers()):
            raise ConfigError(
                "a population cannot have a network that keeps numbers besides its weights, or "
                "draws some (batch normalisation, dropout); use layer_norm, or population 1"
            )
        self.agents = len(networks)
        self.head_kind, self.num_actions = first.head_kind, first.num_actions
        self.allows_shortcuts, self.autocast_dtype = False, None
        self._noisy_layers = []
        # In a list, so that its own parameters are not taken for the population's.
        self._template = [first]
        self._names = [name for name, _ in first.named_parameters()]
        each = [dict(network.named_parameters()) for network in networks]
        for name in self._names:
            stacked = torch.stack([parameters[name].detach() for parameters in each])
            self.register_parameter(name.replace(".", "/"), nn.Parameter(stacked))
        # Constants, the same for all: a saved policy wants them.
        for name, buffer in first.named_buffers():
            self.register_buffer(name.replace(".", "/"), buffer)

    @property
    def torso(self) -> nn.Module:  # type: ignore[override]
        return self.template.torso

    @property
    def template(self) -> QNetwork:
        """A network of this shape; its weights mean nothing."""
        return self._template[0]

    def forward(self, obs: Tensor, fractions: Tensor | None = None) -> Tensor:
        assert fractions is None, "populations have no head that takes fractions"
        template = self.template
        template.autocast_dtype = self.autocast_dtype
        parameters: dict[str, Tensor] = {
            name: self.get_parameter(name.replace(".", "/")) for name in self._names
        }

        def one(parameters: dict[str, Tensor], obs: Tensor) -> Any:
            return functional_call(template, parameters, (obs,))

        with plainly():
            output: Tensor = vmap(one)(parameters, obs.view(self.agents, -1, *obs.shape[1:]))
        return output.flatten(0, 1)
