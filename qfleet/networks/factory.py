"""The network factory: builds a QNetwork from an environment's spec and a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from qfleet.accelerator.streams import has_streams
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, UnknownNameError, one_line
from qfleet.core.plugins import load_object
from qfleet.core.types import EnvSpec
from qfleet.networks.dropout import Dropout
from qfleet.networks.normalizer import NormalizedTorso
from qfleet.networks.qnetwork import QNetwork
from qfleet.networks.torsos import MLP, ImpalaResNet, MinAtarCNN, NatureCNN, choose_network

_CONVOLUTIONAL: dict[str, tuple[type[NatureCNN | ImpalaResNet | MinAtarCNN], int]] = {
    "nature": (NatureCNN, 512),
    "impala": (ImpalaResNet, 256),
    "minatar": (MinAtarCNN, 128),
}
"""Name → class and width of its dense layer."""


def build_network(spec: EnvSpec, config: Config) -> QNetwork:
    """Build the network that ``config`` names; weights are drawn from torch's global generator."""
    bare = spec.unmasked
    network = _build_unmasked(bare, config)
    if config.separate_networks:
        only_value = config.replace(head="q", separate_networks=False)
        network.critic = _build_unmasked(replace(bare, num_actions=1), only_value)
    network.masked = spec if spec.is_masked else None
    if config.normalize_observations:
        for part in filter(None, (network, network.critic)):
            if ":" in config.network and bare.obs_dtype == "uint8":
                raise ConfigError(
                    f"normalize_observations does not centre pixels for network "
                    f"'{config.network}', which gets them as they are; leave it out"
                )
            part.torso = NormalizedTorso(part.torso, bare)
        network.share_statistics(network)
    return network


def _build_unmasked(spec: EnvSpec, config: Config) -> QNetwork:
    """Build a network of observations without masks.

    Hidden layers are either shared (part of the torso) or belong to the head's streams:

    - The dense layer of a convolutional torso belongs to the head. Dueling splits it, it is noisy
      with noisy nets, and quantile embeddings multiply the features of the convolutions, all as in
      the papers.
    - The layers of an MLP are shared, so dueling, noise and embeddings start after the last of
      them. If the head has only one stream without noise, the layers belong to the head too: layers
      and output are then one autograd node.
    - With layer normalisation or dropout all hidden layers are shared, also those of convolutional
      torsos, and so are those of an MLP with another activation than ReLU.
    - All layers of a user's torso are shared.
    """
    name = config.network
    if name == "auto":
        name = choose_network(spec)
    if name != "mlp" and config.activation != "relu":
        raise ConfigError(
            f"activation '{config.activation}' is for network mlp, not '{name}'; leave it out"
        )
    if ":" in name:
        torso = _user_torso(name, spec)
        _check_layers(torso, config)
        features = _features(torso, name, spec)
        return QNetwork(_with_dropout(torso, config), features, spec.num_actions, config)
    if name == "mlp":
        if config.dropout and not config.net_arch:
            raise ConfigError("dropout needs hidden layers; set net_arch or leave dropout out")
        is_fused = config.activation == "relu" and not (config.layer_norm or config.dropout)
        shared = config.dueling or config.noisy or config.head == "iqn" or not is_fused
        layers = config.net_arch if shared else ()
        mlp = MLP(spec, layers, config.layer_norm, config.activation, config.dropout)
        hidden = () if shared else config.net_arch
        return QNetwork(mlp, mlp.features, spec.num_actions, config, hidden)
    if name not in _CONVOLUTIONAL:
        raise UnknownNameError("network", name, ("auto", "mlp", *_CONVOLUTIONAL))
    dense = _CONVOLUTIONAL[name][1]
    if config.layer_norm or config.dropout:
        conv = _convolutional(name, spec, dense, config)
        return QNetwork(_with_dropout(conv, config), conv.features, spec.num_actions, config)
    conv = _convolutional(name, spec, 0, config)
    return QNetwork(conv, conv.features, spec.num_actions, config, (dense,))


def _convolutional(
    name: str, spec: EnvSpec, dense: int, config: Config
) -> NatureCNN | ImpalaResNet | MinAtarCNN:
    kind = _CONVOLUTIONAL[name][0]
    if not issubclass(kind, ImpalaResNet):
        return kind(spec, dense, config.layer_norm)
    if config.layer_norm:
        raise ConfigError(
            f"network '{name}' does not support layer_norm; use --no-layer-norm or --network nature"
        )
    return kind(spec, dense, config.width, config.depth)


def _with_dropout(torso: nn.Module, config: Config) -> nn.Module:
    return nn.Sequential(torso, Dropout(config.dropout)) if config.dropout else torso


def describe_choice(config: Config, spec: EnvSpec) -> str | None:
    """Return a sentence about the network that ``auto`` chose, or None."""
    if config.network != "auto":
        return None
    bare = spec.unmasked
    shape = "×".join(map(str, bare.obs_shape))
    kind = f"{shape} {spec.obs_dtype}" if shape else f"{spec.num_obs_values} discrete"
    masks = ", with action masks" if spec.is_masked else ""
    return f"network {choose_network(bare)} for {kind} observations{masks}"


def _user_torso(path: str, spec: EnvSpec) -> nn.Module:
    kind = load_object(path, "network")
    try:
        torso = kind(spec.obs_shape)
    except Exception as error:
        raise ConfigError(
            f"network '{path}' cannot be built: {one_line(error)}; it is called with the "
            f"observation's shape {spec.obs_shape}"
        ) from error
    if not isinstance(torso, nn.Module):
        raise ConfigError(
            f"network '{path}' made a {type(torso).__name__}; it must make a torch.nn.Module"
        )
    return torso


def _check_layers(torso: nn.Module, config: Config) -> None:
    """Raise for layers of a user's torso that training cannot use."""
    if any(isinstance(module, _DropoutNd) for module in torso.modules()):
        raise ConfigError(
            f"network '{config.network}' has torch's dropout, which draws without the run's seed, "
            "and while acting; leave it out, and use --dropout"
        )
    if config.envs == 1 and not config.data and has_batch_norm(torso):
        raise ConfigError(
            f"network '{config.network}' has batch normalisation, which cannot act in one "
            "environment; use --envs 2 or more, or layer normalisation"
        )


def has_batch_norm(network: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in network.modules())


def _features(torso: nn.Module, path: str, spec: EnvSpec) -> int:
    """Return the width of a user's torso: its ``features``, or the width of a trial output."""
    declared = getattr(torso, "features", None)
    if isinstance(declared, int):
        return declared
    training = torso.training
    torso.eval()  # batch normalisation cannot train on a batch of one
    try:
        with torch.no_grad():
            output = torso(torch.zeros((1, *spec.obs_shape), dtype=spec.torch_dtype))
    except Exception as error:
        raise ConfigError(
            f"network '{path}' fails on a {spec.obs_dtype} observation of shape "
            f"{(1, *spec.obs_shape)}: {one_line(error)}; it must map raw batches to features [B, F]"
        ) from error
    finally:
        torso.train(training)
    if not isinstance(output, Tensor) or output.dim() != 2:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(f"network '{path}' gave {got}; it must give features of shape [B, F]")
    return output.shape[1]


def make_network(config: Config, spec: EnvSpec, device: torch.device, seed: int) -> QNetwork:
    """Build the network with weights drawn from ``seed`` and apply the model transform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_network(spec, config)
    if config.precision == "fp64":
        double(network)
    return model_transform(network.to(device), config, device)


def double(network: QNetwork) -> None:
    """Compute in float64: all weights, and what enters a layer that has some."""

    def cast(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        del layer
        floats = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs]
        return tuple(x.double() if f else x for x, f in zip(inputs, floats, strict=True))

    network.double()
    network.allows_shortcuts = False
    for layer in network.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            layer.register_forward_pre_hook(cast)


def model_transform(network: QNetwork, config: Config, device: torch.device) -> QNetwork:
    """Return the network, compiled if the configuration asks for it."""
    # On an accelerator these engines compile whole updates, which include the network.
    engines = ("pipeline", "device", "all-reduce")
    whole_updates = config.engine in engines and has_streams(device)
    if config.compile == "on" and not whole_updates:
        network.compile()
        network.allows_shortcuts = False
    return network
