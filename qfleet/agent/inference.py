"""Actions: a batch of observations in, the best action of each out, or one drawn from a policy.

Everyone who acts — actors, evaluation, policies read back from disk — comes through here, so all of
them see the same Q-values to the last bit. An ``Inference`` is how an actor asks; the one here
takes whole observations, the one in ``qfleet/agent/device_inference.py`` keeps the stacks on the
device and is sent only the newest frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.accelerator.graphs import record, why_no_graphs
from qfleet.algorithms.exploration import sample_actions
from qfleet.core.seeding import restore_generator
from qfleet.core.types import Block
from qfleet.networks.qnetwork import QNetwork

Greedy: TypeAlias = Callable[[NDArray[Any]], NDArray[np.int64]]


class Inference(Protocol):
    """What an actor needs to choose actions for its groups of environments."""

    def host_frames(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Memory ``[blocks, rows, envs, *frame]`` into which the actor writes newest frames."""
        ...

    def begin_block(self) -> None:
        """New weights may be in place, and new noise is due."""
        ...

    def choose(
        self,
        group: int,
        block: int,
        row: int,
        columns: slice,
        obs: NDArray[Any],
        opened: NDArray[np.bool_],
        needed: bool,
    ) -> NDArray[np.int64] | None:
        """Greedy actions of a group; ``needed`` False says that all will explore.

        Those of an actor-critic are drawn from its policy.

        The newest frames are in ``host_frames[block, row, columns]``, whole observations in
        ``obs``; ``opened`` marks those that open an episode.
        """
        ...

    def deliver(self, number: int, block: Block) -> Block:
        """A finished block, given on the host, where it is wanted; ``number`` is its place."""
        ...

    def noise_state(self) -> Tensor: ...

    def load_noise_state(self, state: Tensor) -> None: ...


class HostInference:
    """The network is handed whole observations, and only when their actions matter."""

    def __init__(self, network: QNetwork, device: torch.device, dtype: str, seed: int) -> None:
        self._network, self._dtype = network, dtype
        self._noise = torch.Generator(device=device).manual_seed(seed)
        self._greedy = (
            _Sampled(network, device, self._noise)
            if network.head_kind == "actor-critic"
            else make_greedy(network, device)
        )

    def host_frames(self, shape: tuple[int, ...]) -> NDArray[Any]:
        return np.zeros(shape, dtype=self._dtype)

    def begin_block(self) -> None:
        self._network.resample_noise(self._noise)

    def choose(
        self,
        _group: int,
        _block: int,
        _row: int,
        _columns: slice,
        obs: NDArray[Any],
        _opened: NDArray[np.bool_],
        needed: bool,
    ) -> NDArray[np.int64] | None:
        return self._greedy(obs) if needed else None

    def deliver(self, _number: int, block: Block) -> Block:
        return block

    def noise_state(self) -> Tensor:
        return self._noise.get_state()

    def load_noise_state(self, state: Tensor) -> None:
        restore_generator(self._noise, state)


def make_greedy(
    network: QNetwork, device: torch.device, batch: tuple[int, ...] | None = None
) -> Greedy:
    """The quickest way to act with this network; it follows the network's weights in place.

    ``batch`` is the shape of all observations to come, where it is known and they will be many.
    """
    if device.type == "cpu" and network.is_plain_mlp:
        return _HostMLP(network)
    if batch is not None and why_no_graphs(device) is None:
        return _RecordedNetwork(network, device, batch)
    return _Network(network, device)


class _Network:
    def __init__(self, network: QNetwork, device: torch.device) -> None:
        self._network, self._device = network, device

    def __call__(self, obs: NDArray[Any]) -> NDArray[np.int64]:
        with torch.inference_mode():
            values = self._network.q_values(torch.from_numpy(obs).to(self._device))
            actions: NDArray[np.int64] = values.argmax(dim=1).cpu().numpy()
        return actions


class _Sampled:
    """Actions drawn from a policy, as training asks for them."""

    def __init__(self, network: QNetwork, device: torch.device, generator: torch.Generator) -> None:
        self._network, self._device, self._generator = network, device, generator
        quick = device.type == "cpu" and network.is_plain_mlp
        self._quick = _HostMLP(network) if quick else None

    def __call__(self, obs: NDArray[Any]) -> NDArray[np.int64]:
        with torch.inference_mode():
            if self._quick is not None:
                logits = torch.from_numpy(self._quick.values(obs))
            else:
                logits = self._network.q_values(torch.from_numpy(obs).to(self._device))
            chance = torch.rand(len(obs), generator=self._generator, device=self._device)
            actions: NDArray[np.int64] = sample_actions(logits, chance).cpu().numpy()
        return actions


class _RecordedNetwork:
    """The same as one launch, for observations that come in one shape, thousands of times."""

    def __init__(self, network: QNetwork, device: torch.device, batch: tuple[int, ...]) -> None:
        self._network, self._device, self._batch = network, device, batch
        self._obs = self._actions = torch.empty(0)
        self._launch: Callable[[], None] | None = None

    def __call__(self, obs: NDArray[Any]) -> NDArray[np.int64]:
        if self._launch is None:
            self._obs = torch.from_numpy(obs).to(self._device)
            self._actions = torch.zeros(self._batch[0], dtype=torch.int64, device=self._device)
            self._launch = record(self._choose, self._device, (), "evaluation")
        self._obs.copy_(torch.from_numpy(obs))
        self._launch()
        actions: NDArray[np.int64] = self._actions.cpu().numpy()
        return actions

    @torch.no_grad()
    def _choose(self) -> None:
        self._actions.copy_(self._network.q_values(self._obs).argmax(dim=1))


class _HostMLP:
    """A plain MLP in numpy, on the very memory of the network's weights.

    For one observation torch spends 120 µs around 20 µs of arithmetic; numpy needs 25 µs in all.
    """

    def __init__(self, network: QNetwork) -> None:
        arrays = [parameter.detach().numpy() for parameter in network.parameters()]
        self._layers = list(zip(arrays[::2], arrays[1::2], strict=True))
        self._num_actions = network.num_actions

    def __call__(self, obs: NDArray[Any]) -> NDArray[np.int64]:
        actions: NDArray[np.int64] = self.values(obs).argmax(axis=1)
        return actions

    def values(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        """What ``q_values`` gives: an actor-critic's last output is left out."""
        x = obs
        *hidden, (last_weight, last_bias) = self._layers
        for weight, bias in hidden:
            x = x @ weight
            x += bias
            np.maximum(x, 0.0, out=x)
        values: NDArray[np.float32] = (x @ last_weight + last_bias)[:, : self._num_actions]
        return values
