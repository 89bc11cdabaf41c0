"""Makes a rank's part of a network: first its layers are split, then it is cut into stages.

No rank ever holds the whole network: it is built on the meta device, and then its layers are drawn
one after the other, of which each rank keeps its part.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec
from qfleet.networks.factory import build_network, double
from qfleet.networks.parallel.collectives import TensorRanks
from qfleet.networks.parallel.deferred import Deferred, memory_of
from qfleet.networks.parallel.layout import Layout, Piece
from qfleet.networks.parallel.stages import StageRanks, split_stages
from qfleet.networks.parallel.tensor import split_layers
from qfleet.networks.qnetwork import QNetwork

MOST_WHOLE = 0.9
"""Largest share of the weights of layers that each of the ranks that divide them may hold."""


def make_part(
    config: Config,
    spec: EnvSpec,
    device: torch.device,
    seed: int,
    tensor: TensorRanks,
    stages: StageRanks,
) -> tuple[QNetwork, Layout]:
    """Return this rank's part of the network of ``seed``, and which parts all ranks hold."""
    with torch.device("meta"), Deferred() as construction:
        network = build_network(spec, config)
    whole = dict(network.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
    dims = split_layers(network, tensor) if tensor.size > 1 else {}
    stage_of = dict[str, int]()
    if stages.size > 1:
        given = config.pipeline_schedule, config.micro_batches
        stage_of = split_stages(network, spec, stages, *given)
    pieces = [Piece(n, shape, dims.get(n), stage_of.get(n, 0)) for n, shape in shapes.items()]
    layout = Layout(pieces, tensor.size, stages.size)
    _check_divides(layout)
    own = {piece.name: piece for piece in layout.own_pieces(stages.rank * tensor.size)}
    wanted = dict[int, list[tuple[str, Tensor]]]()
    for name, one in [*whole.items(), *network.named_buffers()]:
        if name in own or name not in whole:
            wanted.setdefault(memory_of(one), []).append((name, one))

    def take(memory: int, contents: Tensor) -> None:
        for name, meant in wanted.get(memory, ()):
            value = contents.as_strided(meant.shape, meant.stride(), meant.storage_offset())
            if name in own:
                part = layout.cut_one(value, own[name], tensor.rank)
                value = nn.Parameter(part.clone(memory_format=torch.contiguous_format))
            path, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(path), leaf, value)

    construction.carry_out(seed, take)
    network.is_split = True
    if config.precision == "fp64":
        double(network)
    return network.to(device), layout


def _check_divides(layout: Layout) -> None:
    """Raise ConfigError if ranks that should hold parts of layers hold nearly all of them."""
    held = sum(layout.local_size(rank) for rank in range(0, layout.ranks, layout.tensor))
    if layout.tensor > 1 and held > MOST_WHOLE * layout.whole_size:
        raise ConfigError(
            f"tensor_parallel {layout.tensor} divides few layers: each part has "
            f"{held / layout.whole_size:.0%} of the weights; choose widths (net_arch, width) "
            f"that are multiples of {layout.tensor}, or another tensor_parallel"
        )
