"""Splits a built network: first its layers, then the network into stages."""

from __future__ import annotations

from qfleet.networks.parallel.collectives import TensorRanks
from qfleet.networks.parallel.layout import Layout, Piece
from qfleet.networks.parallel.stages import StageRanks, split_stages
from qfleet.networks.parallel.tensor import split_layers
from qfleet.networks.qnetwork import QNetwork


def split_network(network: QNetwork, tensor: TensorRanks, stages: StageRanks) -> Layout:
    """Keep this rank's part of the network; return which parts all ranks hold."""
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    dims = split_layers(network, tensor) if tensor.size > 1 else {}
    stage = split_stages(network, stages) if stages.size > 1 else {}
    pieces = [Piece(n, shape, dims.get(n), stage.get(n, 0)) for n, shape in shapes.items()]
    return Layout(pieces, tensor.size, stages.size)
