"""The terms of discrete CQL and BCQ against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from qfleet.agent.dense_gradient import DenseGradient, make_gradient
from qfleet.agent.weights import FlatWeights
from qfleet.algorithms.losses import conservative_penalty, imitation
from qfleet.algorithms.objective import Columns, Prediction
from qfleet.config.config import Config
from qfleet.core.types import EnvSpec
from qfleet.engines.factories import make_objective
from qfleet.networks.factory import make_network
from qfleet.networks.qnetwork import ILLEGAL

CPU = torch.device("cpu")
SPEC = EnvSpec("Box-v0", (2,), "float32", 2)


def close(actual: Tensor, expected: list[object]) -> None:
    torch.testing.assert_close(actual, tensor(expected), atol=1e-6, rtol=0)


def config(**fields: Any) -> Config:
    return Config(data="somewhere", net_arch=(8,), n_quantiles=2, **fields)


def loss_of(given: Config, output: Tensor, target: Tensor) -> Tensor:
    network = make_network(given, SPEC, CPU, 0)
    action = tensor([1] * len(output))
    objective = make_objective(given, CPU, 0)
    return objective.loss(Prediction(output, None), action, network, target).per_sample


def test_the_conservative_penalty() -> None:
    # log(e⁰ + e^ln 3) = ln 4; minus ln 3 for action 1, minus 0 for action 0
    values = tensor([[0.0, math.log(3)], [0.0, math.log(3)]], requires_grad=True)
    penalty = conservative_penalty(values, tensor([1, 0]))
    close(penalty, [math.log(4 / 3), math.log(4)])
    (slope,) = torch.autograd.grad(penalty.sum(), values)
    close(slope, [[0.25, -0.25], [-0.75, 0.75]])  # softmax − one-hot


def test_the_imitation_loss() -> None:
    # −ln ¾ = .287682, and 0.01 · (0 + ln² 3) / 2 = .006035
    close(imitation(tensor([[0.0, math.log(3)]]), tensor([1])), [0.293717])


def test_cql_adds_its_penalty_to_the_td_loss() -> None:
    # Q = (0, ln 3), target ln 3 + 0.5: Huber 0.125, and 2 · ln(4/3) = 0.575364
    output, target = tensor([[0.0, math.log(3)]]), tensor([math.log(3) + 0.5])
    close(loss_of(config(cql_alpha=2.0), output, target), [0.125 + 0.575364])
    close(loss_of(config(), output, target), [0.125])


def test_cql_with_quantiles_compares_their_means() -> None:
    # Both quantiles of action 1 are those of the target but for 0 and ln 9: mean ln 3.
    output = tensor([[[0.0, 0.0], [0.0, math.log(9)]]])
    target = tensor([[0.0, math.log(9)]])
    plain = loss_of(config(head="qr"), output, target)
    close(loss_of(config(head="qr", cql_alpha=2.0), output, target) - plain, [0.575364])


def test_bcq_adds_the_imitation_loss() -> None:
    output, target = tensor([[5.0, 1.0, 0.0, math.log(3)]]), tensor([1.5])
    close(loss_of(config(bcq_threshold=0.3), output, target), [0.125 + 0.293717])


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({"cql_alpha": 2.0}, 0.575364),
        ({"cql_alpha": 2.0, "head": "qr"}, 0.575364),
        ({"bcq_threshold": 0.3}, 0.293717),
        ({"loss": "cross-entropy"}, 0.287682),
    ],
)
def test_illegal_actions_are_left_out(fields: dict[str, Any], added: float) -> None:
    """Values and logits are (0, ln 3, 5); with the last action illegal, as of two actions."""
    spec = EnvSpec("Box-v0", (2,), "float32", 3).with_masks()
    given = config(**fields)
    network, outputs = make_network(given, spec, CPU, 0), tensor([0.0, math.log(3), 5.0])
    for name, parameter in network.named_parameters():
        parameter.data.zero_()
        if name.endswith("bias_1"):
            parameter.data.copy_(outputs.repeat_interleave(parameter.numel() // 3))
    objective, obs = make_objective(given, CPU, 0), tensor([[0.0, 0.0, 1.0, 1.0, 0.0]])
    target = outputs[1:2] if given.head == "q" else outputs[1].expand(1, 2)
    prediction = objective.predict(obs, network)
    close(objective.loss(prediction, tensor([1]), network, target).per_sample, [added])
    slopes = torch.autograd.grad(prediction.output[:, :2].sum(), list(network.parameters()))
    assert all(slope.isfinite().all() for slope in slopes)


def test_bcq_excludes_actions_that_are_rare_in_the_data() -> None:
    network = make_network(config(bcq_threshold=0.3), SPEC, CPU, 0)
    # The shares of the most likely action are 1 and 1/3, then 1 and 1/4.
    output = tensor([[1.0, 2.0, math.log(3), 0.0], [1.0, 2.0, math.log(4), 0.0]])
    obs = torch.zeros(2, 2)
    close(network.expected(output, obs), [[1.0, 2.0], [1.0, ILLEGAL]])
    assert network(obs).shape == (2, 4)
    assert network.q_values(obs).shape == (2, 2)


@pytest.mark.parametrize(("likely", "expected"), [(3.0, 1.5), (0.0, 5.5)])
@pytest.mark.parametrize("double", [True, False])
def test_bcq_learns_from_next_actions_that_are_in_the_data(
    likely: float, expected: float, double: bool
) -> None:
    """Action 1 has the larger value, 9, and is excluded if action 0 is much more likely."""
    given = config(bcq_threshold=0.5, double=double)
    network = make_network(given, SPEC, CPU, 0)
    for parameter in network.parameters():
        parameter.data.zero_()
    parameters = dict(network.named_parameters())
    parameters["head.advantage.bias_1"].data.copy_(tensor([1.0, 9.0]))
    parameters["imitation.advantage.bias_1"].data.copy_(tensor([likely, 0.0]))
    zeros, one = torch.zeros(1, 2), tensor([1.0])
    batch = Columns(zeros, tensor([0]), one, 0.5 * one, zeros)
    objective = make_objective(given, CPU, 0)
    terms = objective.target_terms(batch, network)
    close(objective.target(batch, terms, network, network), [expected])


@pytest.mark.parametrize(
    ("fields", "explicit"),
    [({}, True), ({"cql_alpha": 1.0}, False), ({"bcq_threshold": 0.3}, False)],
)
def test_the_formulas_for_plain_losses_are_not_used(fields: Any, explicit: bool) -> None:
    given = config(**fields)
    network = make_network(given, SPEC, CPU, 0)
    gradient = make_gradient(network, make_objective(given, CPU, 0), FlatWeights(network), False)
    assert isinstance(gradient, DenseGradient) == explicit
