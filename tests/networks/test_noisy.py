"""The noisy layer against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from qfleet.networks.heads import ActionHead, Style, _two_noisy
from qfleet.networks.noisy import NoisyLinear, draw_noise, store_noise


def resample(layers: list[NoisyLinear], generator: torch.Generator) -> None:
    store_noise(layers, draw_noise(layers, generator))


def hand_made() -> NoisyLinear:
    layer = NoisyLinear(2, 1, sigma0=0.5)
    layer.weight_mu.data = tensor([[1.0], [2.0]])
    layer.bias_mu.data = tensor([3.0])
    layer.weight_sigma.data = tensor([[0.5], [0.1]])
    layer.bias_sigma.data = tensor([0.2])
    layer.noise_in.copy_(tensor([2.0, -1.0]))
    layer.noise_out.copy_(tensor([3.0]))
    return layer


def test_forward_in_training_mode() -> None:
    # w = μ + σ·ε_in·ε_out = (1 + .5·2·3, 2 + .1·−1·3) = (4, 1.7); b = 3 + .2·3 = 3.6
    # x = (1, 10): 4 + 17 + 3.6 = 24.6
    layer = hand_made()
    torch.testing.assert_close(layer(tensor([[1.0, 10.0]])), tensor([[24.6]]))


def test_forward_in_eval_mode_uses_the_means() -> None:
    # 1·1 + 10·2 + 3 = 24, whatever the noise
    layer = hand_made().eval()
    torch.testing.assert_close(layer(tensor([[1.0, 10.0]])), tensor([[24.0]]))
    resample([layer], torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(tensor([[1.0, 10.0]])), tensor([[24.0]]))


def test_gradient_of_sigma_is_input_times_noise() -> None:
    # dy/dσ_i = x_i·ε_in,i·ε_out = (1·2·3, 10·−1·3); dy/dσ_b = ε_out
    layer = hand_made()
    layer(tensor([[1.0, 10.0]])).sum().backward()
    assert layer.weight_sigma.grad is not None
    assert layer.bias_sigma.grad is not None
    torch.testing.assert_close(layer.weight_sigma.grad, tensor([[6.0], [-30.0]]))
    torch.testing.assert_close(layer.bias_sigma.grad, tensor([3.0]))


def test_initial_scale() -> None:
    # 1706.10295, 3.2: μ ~ U(±1/√p), σ = σ₀/√p; p = 16: ±.25 and .5/4 = .125
    layer = NoisyLinear(16, 32, sigma0=0.5)
    assert layer.weight_mu.abs().max() <= 0.25
    assert layer.weight_mu.abs().max() > 0.2
    assert (layer.weight_sigma == 0.125).all()
    assert (layer.bias_sigma == 0.125).all()


def test_resample_shapes_the_draw() -> None:
    one, two = NoisyLinear(3, 2, sigma0=0.5), NoisyLinear(2, 4, sigma0=0.5)
    resample([one, two], torch.Generator().manual_seed(5))
    draw = torch.randn(11, generator=torch.Generator().manual_seed(5))
    expected = [math.copysign(math.sqrt(abs(v)), v) for v in draw.tolist()]
    actual = torch.cat([one.noise_in, one.noise_out, two.noise_in, two.noise_out])
    torch.testing.assert_close(actual, tensor(expected))


def test_the_state_holds_the_noise() -> None:
    torch.manual_seed(0)
    layer, other = NoisyLinear(3, 2, sigma0=0.5), NoisyLinear(3, 2, sigma0=0.5)
    x = torch.randn(4, 3)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("hidden", [(), (8,), (8, 6)])
def test_two_streams_in_one_product_are_the_two_streams(hidden: tuple[int, ...]) -> None:
    """What an accelerator does instead of two products each."""
    torch.manual_seed(3)
    head = ActionHead(12, 4, Style(dueling=True, noisy=True, hidden=hidden), width=5)
    resample([m for m in head.modules() if isinstance(m, NoisyLinear)], torch.Generator())
    features = torch.randn(7, 12)
    for module in (head.train(), head.eval()):
        assert module.value is not None
        value, advantage = _two_noisy(features, module.value, module.advantage)
        torch.testing.assert_close(value, module.value(features))
        torch.testing.assert_close(advantage, module.advantage(features))


def test_the_weights_in_force_give_what_the_layer_gives() -> None:
    layer = NoisyLinear(6, 3, sigma0=0.5)
    x = torch.randn(4, 6)
    torch.testing.assert_close(torch.addmm(layer.bias(), x, layer.weight()), layer(x))
    layer.eval()
    assert torch.equal(torch.addmm(layer.bias(), x, layer.weight()), layer(x))
