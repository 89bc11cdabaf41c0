"""K networks of the same shape as one module, with agent-major batches and outputs.

In a batch of K·B observations the first B belong to agent 0, the next B to agent 1, and so on.
Every parameter is stored for all agents, ``[K, …]``, and ``torch.func.vmap`` batches the network's
operations, so that K agents need as many kernel launches as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from qfleet.core.errors import ConfigError
from qfleet.networks.noisy import NOISE, shape_noise
from qfleet.networks.plainly import plainly
from qfleet.networks.qnetwork import QNetwork

_STATEFUL = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"}


class Population(QNetwork):
    """K networks with the interface of one ``QNetwork``, for learners and actors."""

    def __init__(self, networks: Sequence[QNetwork]) -> None:
        # Not QNetwork.__init__, which builds a head: the networks are already built.
        nn.Module.__init__(self)
        first = networks[0]
        kinds = {type(module).__name__ for module in first.torso.modules()}
        if kinds & _STATEFUL or any(True for _ in first.torso.buffers()):
            raise ConfigError(
                "a population does not support networks with state other than their weights "
                "(batch normalisation) or with dropout; use layer_norm, or population 1"
            )
        self.agents = len(networks)
        self.head_kind, self.num_actions = first.head_kind, first.num_actions
        self.allows_shortcuts, self.autocast_dtype, self.masked = False, None, first.masked
        self.imitation = None
        self._noisy_layers = list(first._noisy_layers)
        # In a list, so that its parameters are not registered as parameters of the population.
        self._template = [first]
        self._names = [name for name, _ in first.named_parameters()]
        each = [dict(network.named_parameters()) for network in networks]
        for name in self._names:
            stacked = torch.stack([parameters[name].detach() for parameters in each])
            self.register_parameter(name.replace(".", "/"), nn.Parameter(stacked))
        buffers = [dict(network.named_buffers()) for network in networks]
        self._noise = [name for name in buffers[0] if name.rpartition(".")[2] in NOISE]
        for name, buffer in buffers[0].items():
            # Others are constants, equal for all agents; a saved policy needs them.
            stacked = torch.stack([own[name] for own in buffers]) if name in self._noise else buffer
            self.register_buffer(name.replace(".", "/"), stacked)

    @property
    def torso(self) -> nn.Module:  # type: ignore[override]
        return self.template.torso

    @property
    def torsos(self) -> list[nn.Module]:
        return self.template.torsos

    @property
    def template(self) -> QNetwork:
        """A network of this shape; its own weights are not used."""
        return self._template[0]

    def forward(self, obs: Tensor, fractions: Tensor | None = None) -> Tensor:
        assert fractions is None, "a population does not support heads with fractions (iqn)"
        template = self.template
        template.autocast_dtype = self.autocast_dtype
        parameters: dict[str, Tensor] = {
            name: self.get_parameter(name.replace(".", "/")) for name in self._names
        }
        if self._noise:
            parameters |= self._stored_noise()

        def one(parameters: dict[str, Tensor], obs: Tensor) -> Any:
            return functional_call(template, parameters, (obs,))

        with plainly():
            output: Tensor = vmap(one)(parameters, obs.view(self.agents, -1, *obs.shape[1:]))
        return output.flatten(0, 1)

    def train(self, mode: bool = True) -> Population:
        """Noisy layers use their noise in training mode."""
        self.template.train(mode)
        super().train(mode)
        return self

    def draw_noise(self, generator: torch.Generator) -> Tensor:
        """Return normal random numbers, ``[K, …]``, for the noisy layers of all agents."""
        size = sum(buffer.shape[1] for buffer in self._stored_noise().values())
        shape = (self.agents, size)
        return torch.randn(shape, generator=generator, device=generator.device)

    @torch.no_grad()
    def store_noise(self, draw: Tensor) -> None:
        buffers = list(self._stored_noise().values())
        sizes = [buffer.shape[1] for buffer in buffers]
        torch._foreach_copy_(buffers, torch.split(shape_noise(draw), sizes, dim=1))

    def _stored_noise(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name.replace(".", "/")) for name in self._noise}
