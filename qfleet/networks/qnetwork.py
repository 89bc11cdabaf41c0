"""The Q-network: a torso and a head as one module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qfleet.config.config import Config, Head
from qfleet.core.types import EnvSpec
from qfleet.networks.fused import Dense
from qfleet.networks.heads import ActionHead, ImplicitQuantileHead, Style
from qfleet.networks.noisy import NoisyLinear, draw_noise, store_noise
from qfleet.networks.normalizer import NormalizedTorso
from qfleet.networks.torsos import MLP

ILLEGAL = -1e30
"""Value of illegal actions. It is finite, because 0 × ∞ in the mean of a policy would be NaN; its
exponential is 0."""


class QNetwork(nn.Module):
    """A network that maps observations to values or distributions per action, or to a policy.

    ``support`` holds the atoms' values (c51) and ``fractions`` the quantile midpoints (2k+1)/2K:
    the predicted quantiles (qr) or the quantiles used for acting (iqn). Both are empty for other
    heads, and are not part of the state dict, because the configuration determines them.
    """

    support: Tensor
    fractions: Tensor
    is_split = False
    """Whether ranks hold parts of it, which exchange activations in every pass."""
    stage: object | None = None
    """This rank's ``Stage``, if its layers are on several ranks (parallel/stages.py)."""

    def __init__(
        self,
        torso: nn.Module,
        features: int,
        num_actions: int,
        config: Config,
        hidden: tuple[int, ...] = (),
    ) -> None:
        """Build the head. ``features`` is the torso's width, ``hidden`` the head's layer widths."""
        super().__init__()
        self.critic: QNetwork | None = None
        """An actor-critic's network of the value, if it shares no layers with the policy's."""
        self.masked: EnvSpec | None = None
        """The spec of masked observations; None: all actions are legal."""
        self.head_kind: Head = config.head
        self.num_actions = num_actions
        self.allows_shortcuts = True
        """False once ``forward`` was replaced (torch.compile), which shortcuts would bypass."""
        self.autocast_dtype: torch.dtype | None = None
        """Autocast precision; None: that of the weights. Noisy heads, that of IQN, and the last
        layer of all others always have that of the weights."""
        self.torso = torso
        style = Style(config.dueling, config.noisy, hidden, config.noisy_sigma)
        self.head: nn.Module
        support, fractions = torch.empty(0), torch.empty(0)
        match config.head:
            case "q":
                self.head = ActionHead(features, num_actions, style)
            case "actor-critic":
                # A policy's logits and, last, the state's value (A3C, 1602.01783) are outputs of
                # the same linear layer, unless the value has a network of its own.
                outputs = num_actions if config.separate_networks else num_actions + 1
                self.head = ActionHead(features, outputs, style)
            case "c51":
                self.head = ActionHead(features, num_actions, style, config.n_atoms)
                support = torch.linspace(config.v_min, config.v_max, config.n_atoms)
            case "qr":
                self.head = ActionHead(features, num_actions, style, config.n_quantiles)
                fractions = _midpoints(config.n_quantiles)
            case "iqn":
                self.head = ImplicitQuantileHead(features, num_actions, config.iqn_embedding, style)
                fractions = _midpoints(config.iqn_act_samples)
        self.imitation: nn.Module | None = None
        """Discrete BCQ's model of the data's policy: logits, with hidden layers of its own."""
        if config.bcq_threshold > 0:
            self.imitation = ActionHead(features, num_actions, Style(hidden=hidden))
            self._least_log_share = math.log(config.bcq_threshold)
        self.register_buffer("support", support, persistent=False)
        self.register_buffer("fractions", fractions, persistent=False)
        self._noisy_layers = [m for m in self.head.modules() if isinstance(m, NoisyLinear)]

    @property
    def torsos(self) -> list[nn.Module]:
        """The torso, and that of the value's own network if there is one."""
        return [self.torso] if self.critic is None else [self.torso, self.critic.torso]

    @property
    def is_plain_mlp(self) -> bool:
        """Return whether the network is one fused stack of dense layers on a float32 vector.

        Then callers need not call it: shortcuts may compute the same products with its weights.
        """
        return (
            self.allows_shortcuts
            and self.autocast_dtype is None
            and self.masked is None
            and self.critic is None
            and self.imitation is None
            and isinstance(self.head, ActionHead)
            and self.head.width is None
            and self.head.value is None
            and isinstance(self.head.advantage, Dense)
            and isinstance(self.torso, MLP)
            and self.torso.layers is None
            and self.torso.takes_plain_vectors
        )

    def forward(self, obs: Tensor, fractions: Tensor | None = None) -> Tensor:
        """Return ``[B, A]`` values (q), or ``[B, A, K]`` logits (c51) or quantiles (qr, iqn).

        An actor-critic returns ``[B, A + 1]``: logits of its policy and the state's value. Discrete
        BCQ returns ``[B, 2 A]``: values and the logits of its model of the data's policy.

        ``fractions``, ``[B, K]``, are required for iqn and not allowed for other heads.
        """
        assert (fractions is not None) == (self.head_kind == "iqn"), "only iqn needs fractions"
        if self.is_plain_mlp:
            values: Tensor = self.head.get_submodule("advantage")(obs)
            return values
        bare = obs if self.masked is None else self.masked.unmask(obs)
        given = () if fractions is None else (fractions,)
        output: Tensor
        if self.autocast_dtype is None:
            features = self.torso(bare)
            output = self.head(features, *given)
        else:
            device, dtype = obs.device.type, self.autocast_dtype
            casts_head = isinstance(self.head, ActionHead) and not self._noisy_layers
            with torch.autocast(device, dtype):
                features = self.torso(bare)
            with torch.autocast(device, dtype, enabled=casts_head):
                output = self.head(features if casts_head else features.float(), *given)
        if self.imitation is not None:
            output = torch.cat((output, self.imitation(features.to(output.dtype))), dim=1)
        if self.critic is not None:
            self.critic.autocast_dtype = self.autocast_dtype
            output = torch.cat((output, self.critic(bare)), dim=1)
        if self.head_kind != "actor-critic" or self.masked is None:
            return output
        # The loss needs the policy over legal actions.
        return torch.cat((self._only_legal(output[:, :-1], obs), output[:, -1:]), dim=1)

    def expected(self, output: Tensor, obs: Tensor) -> Tensor:
        """Reduce the output of ``forward`` to expected values ``[B, A]``, or a policy's logits.

        Actions that are illegal by the masks in ``obs``, or too rare in the data by BCQ's model of
        its policy, have the value ILLEGAL.
        """
        match self.head_kind:
            case "q" if self.imitation is not None:
                values, logits = output.chunk(2, dim=1)
                likely = self._only_legal(logits, obs)
                share = likely - likely.amax(1, keepdim=True)
                values = torch.where(share > self._least_log_share, values, ILLEGAL)
            case "q":
                values = output
            case "actor-critic":
                return output[:, :-1]
            case "c51":
                values = torch.softmax(output, dim=2) @ self.support
            case "qr" | "iqn":
                values = output.mean(2)
        return self._only_legal(values, obs)

    def _only_legal(self, values: Tensor, obs: Tensor) -> Tensor:
        if self.masked is None:
            return values
        return torch.where(self.masked.legal(obs), values, ILLEGAL)

    def only_legal(self, output: Tensor, obs: Tensor) -> Tensor:
        """Replace what ``forward`` returns for illegal actions, ``[B, A]``, by ILLEGAL.

        Of outputs ``[B, A, K]``, all K are replaced; of BCQ's ``[B, 2 A]``, values and logits.
        """
        if self.masked is None:
            return output
        legal = self.masked.legal(obs)
        legal = legal.repeat(1, output.shape[1] // legal.shape[1])
        return torch.where(legal if output.dim() == 2 else legal.unsqueeze(2), output, ILLEGAL)

    def q_values(self, obs: Tensor) -> Tensor:
        """Return expected values, or a policy's logits, ``[B, A]`` for acting; deterministic.

        IQN uses evenly spaced midpoints instead of random fractions: the same expectation with less
        variance, and the same action each time for the same observation.
        """
        if self.head_kind != "iqn":
            return self.expected(self(obs), obs)
        return self.expected(self(obs, self.fractions.expand(obs.shape[0], -1)), obs)

    def state_values(self, obs: Tensor) -> Tensor:
        """Return the state values ``[B]``: the largest Q-value, or the critic's value."""
        if self.head_kind == "actor-critic":
            value: Tensor = self(obs)[:, -1]
            return value
        return self.q_values(obs).amax(1)

    def observe(self, obs: Tensor) -> None:
        """Add observations of training, ``[T, N, …]``, to running statistics, if there are any."""
        if isinstance(self.torso, NormalizedTorso):
            shape = self.torso.statistics.mean.shape  # without masks, which are behind the frames
            frames = obs.flatten(2)[..., : shape.numel()]
            self.torso.statistics.observe(frames.reshape(*obs.shape[:2], *shape))

    def set_statistics(self, stored: Mapping[str, Any]) -> None:
        """Normalise by the statistics of a dataset, if the network normalises."""
        if isinstance(self.torso, NormalizedTorso):
            statistics = self.torso.statistics
            statistics.mean.copy_(torch.tensor(stored["obs_mean"]))
            statistics.variance.copy_(torch.tensor(stored["obs_variance"]))
            statistics.count.fill_(stored["obs_count"])

    def share_statistics(self, other: QNetwork) -> None:
        """Use the running statistics of another network, if there are any."""
        for torso in self.torsos:
            if isinstance(torso, NormalizedTorso) and isinstance(other.torso, NormalizedTorso):
                torso.statistics = other.torso.statistics

    def resample_noise(self, generator: torch.Generator) -> None:
        """Draw new noise for noisy layers, if the network has any."""
        if self._noisy_layers:
            self.store_noise(self.draw_noise(generator))

    def draw_noise(self, generator: torch.Generator) -> Tensor:
        return draw_noise(self._noisy_layers, generator)

    def store_noise(self, draw: Tensor) -> None:
        store_noise(self._noisy_layers, draw)


def _midpoints(count: int) -> Tensor:
    return (2 * torch.arange(count, dtype=torch.float32) + 1) / (2 * count)
