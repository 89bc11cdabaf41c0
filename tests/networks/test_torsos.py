"""What torsos do with raw observations."""

from __future__ import annotations

import pytest
import torch
from torch import tensor

from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec
from qfleet.networks.factory import build_network
from qfleet.networks.torsos import MLP, NORM_EPS, ImpalaResNet, MinAtarCNN, NatureCNN
from support.messages import says

ATARI = EnvSpec("Atari", (4, 84, 84), "uint8", 6, frame_stack=4)


def pixels(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def test_mlp_without_layers_flattens_floats() -> None:
    torso = MLP(EnvSpec("box", (2, 2), "float32", 2), (), layer_norm=False)
    assert torso.features == 4
    assert torso(tensor([[[1.0, 2.0], [3.0, 4.0]]])).tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_mlp_scales_bytes() -> None:
    torso = MLP(EnvSpec("bytes", (3,), "uint8", 2), (), layer_norm=False)
    encoded = torso(tensor([[0, 51, 255]], dtype=torch.uint8))
    torch.testing.assert_close(encoded, tensor([[0.0, 0.2, 1.0]]))


def test_mlp_encodes_discrete_observations() -> None:
    torso = MLP(EnvSpec("cells", (), "int64", 2, num_obs_values=3), (), layer_norm=False)
    assert torso.features == 3
    assert torso(tensor([2, 0])).tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]


def test_mlp_encodes_each_of_several_discrete_observations() -> None:
    torso = MLP(EnvSpec("cells", (2,), "int64", 2, num_obs_values=2), (), layer_norm=False)
    assert torso(tensor([[1, 0]])).tolist() == [[0.0, 1.0, 1.0, 0.0]]


def test_mlp_layers_end_in_relu() -> None:
    torch.manual_seed(0)
    torso = MLP(EnvSpec("box", (4,), "float32", 2), (16, 8), layer_norm=False)
    features = torso(torch.randn(32, 4))
    assert features.shape == (32, torso.features) == (32, 8)
    assert features.min() == 0.0
    assert features.max() > 0.0


def test_mlp_layer_norm_makes_features_blind_to_the_scale_of_what_comes_in() -> None:
    torch.manual_seed(0)
    spec = EnvSpec("box", (4,), "float32", 2)
    torso, without = (MLP(spec, (16,), layer_norm=on) for on in (True, False))
    x = 100 * torch.randn(8, 4)
    torch.testing.assert_close(torso(x), torso(10 * x), atol=0.02, rtol=0.02)
    assert not torch.allclose(without(x), without(10 * x), atol=0.02, rtol=0.02)


def test_nature() -> None:
    torso = NatureCNN(ATARI)
    assert torso(pixels(2, 4, 84, 84)).shape == (2, torso.features) == (2, 512)
    # 84 → 20 → 9 → 7 pixels: 64·7·7 = 3136; parameters: 8224 + 32832 + 36928 + 3136·512 + 512
    assert NatureCNN(ATARI, dense=0).features == 3136
    assert sum(p.numel() for p in torso.parameters()) == 1_684_128


def test_nature_scales_bytes() -> None:
    torch.manual_seed(0)
    torso = NatureCNN(ATARI)
    image = pixels(2, 4, 84, 84)
    torch.testing.assert_close(torso(image), torso(image.float() / 255))


@pytest.mark.parametrize(
    ("shape", "flat"),
    # 36 → 8 → 3 → 1; 52 → 12 → 5 → 3; 40 → 9 → 3 → 1
    [((1, 36, 36), 64), ((3, 36, 52), 192), ((40, 52, 3), 192)],
)
def test_nature_takes_any_image_of_36_pixels(shape: tuple[int, ...], flat: int) -> None:
    torso = NatureCNN(EnvSpec("image", shape, "uint8", 2), dense=0)
    assert torso(pixels(2, *shape)).shape == (2, torso.features) == (2, flat)


def test_channels_may_come_last() -> None:
    torch.manual_seed(0)
    last = NatureCNN(EnvSpec("image", (40, 52, 3), "uint8", 2))
    torch.manual_seed(0)
    first = NatureCNN(EnvSpec("image", (3, 40, 52), "uint8", 2))
    image = pixels(2, 40, 52, 3)
    torch.testing.assert_close(last(image), first(image.permute(0, 3, 1, 2)))


@pytest.mark.parametrize("shape", [(1, 35, 84), (4,), (84, 30)])
def test_nature_names_a_shape_it_cannot_take(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        NatureCNN(EnvSpec("image", shape, "uint8", 2))
    assert str(shape) in str(error.value)
    assert "--network mlp" in str(error.value)


def test_impala() -> None:
    torso = ImpalaResNet(ATARI)
    assert torso(pixels(2, 4, 84, 84)).shape == (2, torso.features) == (2, 256)
    # 84 → 42 → 21 → 11 pixels: 32·11·11
    assert ImpalaResNet(ATARI, dense=0).features == 3872
    convolutions = [m for m in torso.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == [16] * 5 + [32] * 10


def test_impala_is_wider_and_deeper_on_request() -> None:
    torso = ImpalaResNet(ATARI, width=2, depth=3)
    convolutions = [m for m in torso.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == [32] * 7 + [64] * 14
    assert torso(pixels(2, 4, 84, 84)).shape == (2, 256)
    # Only the channels are wider: 64·11·11 features before a dense layer of 256.
    assert ImpalaResNet(ATARI, dense=0, width=2, depth=3).features == 7744


@pytest.mark.parametrize("more", [{}, {"dropout": 0.1}], ids=str)
def test_the_fields_width_and_depth_reach_the_network(more: dict[str, float]) -> None:
    with torch.device("meta"):
        plain, large = (
            sum(p.numel() for p in build_network(ATARI, config).parameters())
            for config in (
                Config(network="impala", **more),
                Config(network="impala", width=16, depth=8, **more),
            )
        )
    # Without them the network of IMPALA: convolutions 97,744 (3·3 kernels of 4→16, 16→16 …,
    # 32→32, with biases), dense 3872·256 + 256, head 256·6 + 6.
    assert plain == 97_744 + 991_488 + 1_542
    assert large > 100_000_000


@pytest.mark.parametrize(("field", "value"), [("width", 2), ("depth", 3)])
@pytest.mark.parametrize("network", ["auto", "mlp", "nature"])
def test_width_and_depth_are_refused_for_other_networks(
    field: str, value: int, network: str
) -> None:
    with pytest.raises(ConfigError, match=says(field, str(value), "--network impala", network)):
        validate(Config(network=network, **{field: value}))


def test_impala_takes_small_images_but_no_vectors() -> None:
    torso = ImpalaResNet(EnvSpec("minatar", (10, 10, 4), "uint8", 2), dense=0)
    # 10 → 5 → 3 → 2 pixels: 32·2·2
    assert torso(pixels(3, 10, 10, 4)).shape == (3, torso.features) == (3, 128)
    with pytest.raises(ConfigError, match=says("(4,)", "--network mlp")):
        ImpalaResNet(EnvSpec("box", (4,), "float32", 2))


# --- layer normalisation ----------------------------------------------------------------------

MINATAR = EnvSpec("minatar", (4, 10, 10), "uint8", 3)


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis, by the formula."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()


def test_minatar_with_layer_norm_is_what_it_says() -> None:
    """Convolution, norm over 16 channels, ReLU, flatten by position, dense, norm, ReLU: by hand."""
    torch.manual_seed(0)
    torso = MinAtarCNN(MINATAR, layer_norm=True)
    names = dict(torso.named_parameters())
    conv, bias, scale, shift, dense, dense_bias, *norm = names.values()
    assert [tuple(p.shape) for p in names.values()] == [
        (16, 4, 3, 3), (16,), (16,), (16,), (128, 1024), (128,), (128,), (128,),
    ]  # fmt: skip
    with torch.no_grad():
        for parameter in (bias, scale, shift, dense_bias, *norm):
            parameter.uniform_(0.5, 1.5)
    image = pixels(2, 4, 10, 10)
    patches = (image / 255).unfold(2, 3, 1).unfold(3, 3, 1)  # [B, C, 8, 8, 3, 3]
    x = torch.einsum("bchwij,ocij->bhwo", patches, conv) + bias
    x = (normalise(x) * scale + shift).relu().flatten(1)
    x = (normalise(x @ dense.t() + dense_bias) * norm[0] + norm[1]).relu()
    torch.testing.assert_close(torso(image), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "spec"), [(NatureCNN, ATARI), (MinAtarCNN, MINATAR)])
def test_normalised_layers_start_as_he_has_it(
    kind: type[NatureCNN | MinAtarCNN], spec: EnvSpec
) -> None:
    torch.manual_seed(0)
    torso = kind(spec, layer_norm=True)
    for module in torso.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            assert not module.bias.any()
            weight = module.weight.detach()
            std = (2 / weight[0].numel()) ** 0.5
            assert float(weight.std()) == pytest.approx(std, rel=0.15)
            assert float(weight.abs().max()) <= 2.28 * std  # cut off at two standard deviations


@pytest.mark.parametrize(("network", "spec"), [("nature", ATARI), ("minatar", MINATAR)])
@pytest.mark.parametrize("dueling", [False, True])
def test_every_weight_of_a_normalised_network_learns(
    network: str, spec: EnvSpec, dueling: bool
) -> None:
    torch.manual_seed(0)
    built = build_network(spec, Config(network=network, layer_norm=True, dueling=dueling))
    values = built(pixels(4, *spec.obs_shape))
    assert values.shape == (4, spec.num_actions)
    values[:, 0].square().sum().backward()
    still = [name for name, p in built.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []
    norms = [m.normalized_shape for m in built.modules() if isinstance(m, torch.nn.LayerNorm)]
    widths = {"nature": [32, 64, 64, 512], "minatar": [16, 128]}
    assert norms == [(width,) for width in widths[network]]


def test_nature_with_layer_norm_folds_to_the_same_features() -> None:
    torch.manual_seed(0)
    torso = NatureCNN(ATARI, dense=0, layer_norm=True)
    image = pixels(2, 4, 84, 84) / 255
    torch.testing.assert_close(torso._folded(image), torso(image), rtol=1e-4, atol=1e-4)


def test_impala_has_no_layer_norm_and_says_so() -> None:
    with pytest.raises(ConfigError, match="--no-layer-norm"):
        build_network(ATARI, Config(network="impala", layer_norm=True))
