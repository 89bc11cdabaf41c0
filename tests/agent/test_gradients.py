"""The gradient by hand equals autograd's bit for bit, and so do the numbers beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qfleet.agent.dense_gradient import DenseGradient, make_gradient
from qfleet.agent.gradients import AutogradGradient
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.types import Batch, EnvSpec
from qfleet.engines.factories import make_objective
from qfleet.networks.factory import make_network

CPU = torch.device("cpu")
ACTIONS = 3

# Said by torch whenever the flags are touched; it is about Intel GPUs.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


@pytest.fixture(params=[False, True], ids=["blas", "onednn"], autouse=True)
def _product_library(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs on vectors switch oneDNN off; the bits must agree either way."""
    with torch.backends.mkldnn.flags(enabled=request.param):
        yield


def random_batch(size: int, inputs: int, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    return Batch(
        obs=torch.randn(size, inputs, generator=random),
        action=torch.randint(ACTIONS, (size,), generator=random),
        reward=torch.randn(size, generator=random),
        discount=torch.rand(size, generator=random),
        next_obs=torch.randn(size, inputs, generator=random),
        weight=torch.rand(size, generator=random),
        index=torch.arange(size),
    )


@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    ("layers", "size", "inputs"),
    [((16,), 1, 4), ((64, 64), 32, 4), ((33, 17, 5), 7, 9), ((256, 256), 64, 8)],
    ids=str,
)
def test_by_hand_equals_autograd_bit_for_bit(
    layers: tuple[int, ...], size: int, inputs: int, weighted: bool, loss: str
) -> None:
    config = Config(net_arch=layers, loss=loss)  # type: ignore[arg-type]
    spec = EnvSpec("boxes", (inputs,), "float32", ACTIONS)
    objective = make_objective(config, CPU, seed=0)
    network = make_network(config, spec, CPU, seed=len(layers))
    weights = FlatWeights(network)
    ways = (
        DenseGradient(objective, weights, weighted),
        AutogradGradient(network, objective, weights, weighted),
    )
    for seed in range(5):
        batch = random_batch(size, inputs, seed)
        if not weighted:
            batch.weight.fill_(1.0)
        # Some errors within Huber's quadratic part, some far outside.
        target = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
        seen = []
        for gradient in ways:
            weights.grad.fill_(torch.nan)  # every entry must be written
            loss_info = gradient.backward(gradient.predict(batch), batch, target)
            seen.append((weights.grad.clone(), loss_info))
        (by_hand, dense), (by_autograd, auto) = seen
        assert by_autograd.abs().sum() > 0
        assert torch.equal(by_hand, by_autograd)
        assert torch.equal(dense.prediction, auto.prediction)
        assert torch.equal(dense.priority.abs(), auto.priority)
        assert torch.equal(dense.loss(), auto.loss())
        assert not dense.loss().requires_grad


def test_the_gradient_by_hand_is_for_plain_mlps_only() -> None:
    spec = EnvSpec("boxes", (4,), "float32", ACTIONS)
    chosen = {}
    for name, changes in {
        "plain": {},
        "dueling": {"dueling": True},
        "norm": {"layer_norm": True},
        "c51": {"head": "c51"},
        "noisy": {"noisy": True},
    }.items():
        config = Config(net_arch=(16,)).replace(**changes)  # type: ignore[arg-type]
        network = make_network(config, spec, CPU, seed=0)
        weights = FlatWeights(network)
        chosen[name] = type(make_gradient(network, make_objective(config, CPU, 0), weights, False))
    assert chosen.pop("plain") is DenseGradient
    assert set(chosen.values()) == {AutogradGradient}
