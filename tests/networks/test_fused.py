"""The fused stack against plain layers with the same weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from qfleet.networks.fused import Dense, fused_mlp


def parameters(dense: Dense) -> tuple[list[Tensor], list[Tensor]]:
    everything = list(dense.parameters())
    return everything[::2], everything[1::2]


def plain(dense: Dense, relu_last: bool) -> nn.Sequential:
    """The same stack out of nn.Linear, whose weights are [out, in]."""
    layers: list[nn.Module] = []
    for weight, bias in zip(*parameters(dense), strict=True):
        linear = nn.Linear(*weight.shape)
        linear.weight.data.copy_(weight.t())
        linear.bias.data.copy_(bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if relu_last else layers[:-1]))


@pytest.mark.parametrize("relu_last", [True, False])
# Batches and widths on both sides of where the backward pass changes its way of multiplying.
@pytest.mark.parametrize("batch", [1, 16, 80])
@pytest.mark.parametrize("sizes", [(4, 48, 40, 2), (3, 5), (6, 40, 7, 33)])
def test_forward_and_gradients_equal_plain_layers(
    sizes: tuple[int, ...], batch: int, relu_last: bool
) -> None:
    torch.manual_seed(0)
    dense = Dense(sizes, relu_last)
    reference = plain(dense, relu_last)
    x = torch.randn(batch, sizes[0], requires_grad=True)
    x_reference = x.detach().clone().requires_grad_()
    weight = torch.randn(batch, sizes[-1])

    output, expected = dense(x), reference(x_reference)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    (output * weight).sum().backward()
    (expected * weight).sum().backward()

    torch.testing.assert_close(x.grad, x_reference.grad, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(dense.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad.t(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("relu_last", [True, False])
def test_gradcheck(relu_last: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (3, 4), (4, 2), (4,), (2,)]
    x, *rest = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    )

    def stack(x: Tensor, *rest: Tensor) -> Tensor:
        return fused_mlp(x, rest[:2], rest[2:], relu_last)

    assert torch.autograd.gradcheck(stack, (x, *rest))


@pytest.mark.parametrize("learning", list(itertools.product([True, False], repeat=5)))
def test_only_what_is_asked_for_gets_a_gradient(learning: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(4, 3),
        torch.randn(3, 6),
        torch.randn(6, 2),
        torch.randn(6),
        torch.ones(2),
    ]
    everything = [t.clone().requires_grad_() for t in tensors]
    some = [t.clone().requires_grad_(on) for t, on in zip(tensors, learning, strict=True)]
    fused_mlp(everything[0], everything[1:3], everything[3:], True).sum().backward()
    output = fused_mlp(some[0], some[1:3], some[3:], True)
    assert output.requires_grad == any(learning)
    if any(learning):
        output.sum().backward()
    for full, part, on in zip(everything, some, learning, strict=True):
        assert (part.grad is not None) == on
        if on:
            torch.testing.assert_close(part.grad, full.grad)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_values_are_the_same(guard: type) -> None:
    torch.manual_seed(0)
    dense, x = Dense((4, 8, 3), relu_last=False), torch.randn(5, 4)
    before = x.clone()
    expected = dense(x).detach()
    with guard():
        output = dense(x)
    assert not output.requires_grad
    assert torch.equal(output, expected)
    assert torch.equal(x, before)


def test_gradients_add_up_in_a_buffer_that_is_already_there() -> None:
    torch.manual_seed(0)
    dense, x = Dense((4, 8, 3), relu_last=False), torch.randn(5, 4)
    dense(x).sum().backward()
    grads = [p.grad for p in dense.parameters()]
    once = [g.clone() for g in grads if g is not None]
    dense(x).sum().backward()
    for p, grad, first in zip(dense.parameters(), grads, once, strict=True):
        assert p.grad is grad
        torch.testing.assert_close(grad, 2 * first)


def test_a_seed_gives_the_weights_of_plain_layers() -> None:
    torch.manual_seed(7)
    linear = [nn.Linear(4, 8), nn.Linear(8, 3)]
    torch.manual_seed(7)
    dense = Dense((4, 8, 3), relu_last=False)
    weights, biases = parameters(dense)
    for layer, weight, bias in zip(linear, weights, biases, strict=True):
        assert weight.is_contiguous()
        assert torch.equal(weight, layer.weight.t())
        assert torch.equal(bias, layer.bias)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    dense, x = Dense((2, 3, 1), relu_last=False), torch.randn(4, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(dense(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_an_input_that_is_no_batch_is_refused() -> None:
    with pytest.raises(AssertionError):
        Dense((4, 3), relu_last=False)(torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_last_layer_of_a_head_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head, torso = Dense((4, 32, 16, 3), relu_last=False), Dense((4, 32), relu_last=True)
    x = torch.randn(5, 4)
    with torch.autocast("cpu", dtype):
        values, features = head(x), torso(x)
    w0, b0, w1, b1, w2, b2 = head.parameters()
    hidden = torch.addmm(b0.to(dtype), x.to(dtype), w0.to(dtype)).relu()
    hidden = torch.addmm(b1.to(dtype), hidden, w1.to(dtype)).relu()
    assert torch.equal(values, torch.addmm(b2, hidden.float(), w2))
    assert features.dtype == dtype
    values.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in head.parameters())
