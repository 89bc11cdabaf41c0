"""Whole networks: shapes, expectations, noise, plug-ins and error messages."""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, tensor

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.core.plugins import load_object
from qfleet.core.types import EnvSpec
from qfleet.networks.factory import build_network, describe_choice
from qfleet.networks.heads import ActionHead, ImplicitQuantileHead, Style, combine_streams
from qfleet.networks.qnetwork import QNetwork
from qfleet.networks.torsos import MLP, MinAtarCNN, NatureCNN
from support.messages import says

VECTOR = EnvSpec("vector", (4,), "float32", 3)
IMAGE = EnvSpec("image", (2, 36, 36), "uint8", 3, frame_stack=2)
CELLS = EnvSpec("cells", (), "int64", 3, num_obs_values=5)
HEADS = ("q", "c51", "qr", "iqn")


def observations(spec: EnvSpec, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, *spec.obs_shape)
    if spec.obs_dtype == "float32":
        return torch.randn(shape, generator=generator)
    high = spec.num_obs_values or 256
    return torch.randint(high, shape, generator=generator, dtype=spec.torch_dtype)


def build(spec: EnvSpec, **fields: Any) -> QNetwork:
    torch.manual_seed(0)
    return build_network(spec, Config(net_arch=(16, 8), n_atoms=7, n_quantiles=5).replace(**fields))


@pytest.mark.parametrize(
    ("spec", "network"),
    [(VECTOR, "mlp"), (CELLS, "mlp"), (IMAGE, "mlp"), (IMAGE, "nature"), (IMAGE, "impala")],
)
@pytest.mark.parametrize(("dueling", "noisy"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("head", HEADS)
def test_shapes_and_gradients(
    head: str, dueling: bool, noisy: bool, spec: EnvSpec, network: str
) -> None:
    net = build(spec, network=network, head=head, dueling=dueling, noisy=noisy)
    obs = observations(spec, 2)
    fractions = torch.rand(2, 6) if head == "iqn" else None
    output = net(obs, fractions)
    expected = {"q": (2, 3), "c51": (2, 3, 7), "qr": (2, 3, 5), "iqn": (2, 3, 6)}
    assert output.shape == expected[head]
    assert net.expected(output, obs).shape == net.q_values(obs).shape == (2, 3)
    (output * torch.randn(output.shape)).sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_plain_head_on_an_mlp_equals_plain_layers() -> None:
    net = build(VECTOR)
    torch.manual_seed(0)
    layers = (nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    obs = observations(VECTOR, 5)
    torch.testing.assert_close(net(obs), nn.Sequential(*layers)(obs))


@pytest.mark.parametrize(
    ("activation", "kind"),
    [("tanh", nn.Tanh), ("elu", nn.ELU), ("gelu", nn.GELU), ("silu", nn.SiLU)],
)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_another_activation_equals_plain_layers_and_takes_no_shortcut(
    activation: str, kind: type[nn.Module], layer_norm: bool
) -> None:
    net = build(VECTOR, activation=activation, layer_norm=layer_norm)
    assert not net.is_plain_mlp
    assert build(VECTOR).is_plain_mlp  # negative control
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in ((4, 16), (16, 8)):
        layers += [nn.Linear(fan_in, fan_out), *([nn.LayerNorm(fan_out)] if layer_norm else [])]
        layers += [kind()]
    plain = nn.Sequential(*layers, nn.Linear(8, 3))
    obs = observations(VECTOR, 5)
    torch.testing.assert_close(net(obs), plain(obs))
    assert not torch.allclose(net(obs), build(VECTOR, layer_norm=layer_norm)(obs))


@pytest.mark.parametrize("network", ["nature", "auto", "torch.nn:Flatten"])
def test_only_an_mlp_has_another_activation(network: str) -> None:
    with pytest.raises(ConfigError, match=says("activation", "tanh", "mlp")):
        build(IMAGE, network=network, activation="tanh")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dueling", [False, True], ids=["one stream", "dueling"])
@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noisy"])
def test_bf16_changes_the_values_a_little(head: str, dueling: bool, noisy: bool) -> None:
    """Shapes and types are those of float32, and gradients point the same way."""
    seen = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        network = build(IMAGE, head=head, dueling=dueling, noisy=noisy)
        network.eval()  # without noise
        network.autocast_dtype = dtype
        fractions = torch.rand(6, 8) if head == "iqn" else None
        output = network(observations(IMAGE, 6), fractions)
        output.square().sum().backward()
        grads = [p.grad for p in network.parameters() if p.grad is not None]
        seen.append((output.detach(), torch.cat([grad.flatten() for grad in grads])))
    (exact, exact_grad), (rough, rough_grad) = seen
    assert rough.dtype == exact.dtype == torch.float32
    assert not torch.equal(rough, exact)
    assert torch.allclose(rough, exact, atol=0.02 * float(exact.abs().max()))
    assert float(torch.cosine_similarity(exact_grad, rough_grad, dim=0)) > 0.99


def test_an_mlp_in_bf16_takes_no_shortcut() -> None:
    network = build(VECTOR)
    assert network.is_plain_mlp
    network.autocast_dtype = torch.bfloat16
    assert not network.is_plain_mlp
    with torch.no_grad():
        rough = network(observations(VECTOR, 6))
        network.autocast_dtype = None
        exact = network(observations(VECTOR, 6))
    assert not torch.equal(rough, exact)
    assert torch.allclose(rough, exact, atol=0.02)


def test_a_seed_gives_a_network() -> None:
    options: dict[str, Any] = {"head": "iqn", "dueling": True, "noisy": True}
    obs = observations(VECTOR, 5)
    first, second = build(VECTOR, **options), build(VECTOR, **options)
    assert torch.equal(first.q_values(obs), second.q_values(obs))
    assert torch.equal(copy.deepcopy(first).q_values(obs), second.q_values(obs))


def test_layer_norm_is_in_the_mlp() -> None:
    kinds = [type(m) for m in build(VECTOR, layer_norm=True).modules()]
    assert kinds.count(nn.LayerNorm) == 2
    assert nn.LayerNorm not in [type(m) for m in build(VECTOR).modules()]


# --- dueling ----------------------------------------------------------------------------------


def test_dueling_removes_the_mean_advantage() -> None:
    # mean A = 2: 10 + (1 − 2, 2 − 2, 3 − 2); mean A = −1: 5 + (0, −1, 1)
    value, advantage = tensor([[10.0], [5.0]]), tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, 0.0]])
    assert combine_streams(value, advantage).tolist() == [[9.0, 10.0, 11.0], [5.0, 4.0, 6.0]]


def test_dueling_removes_the_mean_advantage_of_every_atom() -> None:
    # means over actions (2, 10): (1 + 1 − 2, 2 + 0 − 10), (1 + 3 − 2, 2 + 20 − 10)
    value, advantage = tensor([[[1.0, 2.0]]]), tensor([[[1.0, 0.0], [3.0, 20.0]]])
    assert combine_streams(value, advantage).tolist() == [[[0.0, -8.0], [2.0, 12.0]]]


def test_a_dueling_head_has_the_value_as_its_mean() -> None:
    torch.manual_seed(0)
    head = ActionHead(6, 4, Style(dueling=True, hidden=(5,)))
    features = torch.randn(3, 6)
    assert head.value is not None
    torch.testing.assert_close(head(features).mean(1, keepdim=True), head.value(features))


def test_dueling_splits_the_dense_layer_of_a_convolutional_network() -> None:
    # conv: 2·64·32 + 32 + 32·16·64 + 64 + 64·9·64 + 64 = 73888; streams: 64·512 + 512, each,
    # then 512 + 1 and 512·3 + 3: 73888 + 2·33280 + 513 + 1539 = 142500
    net = build(IMAGE, dueling=True)
    assert sum(p.numel() for p in net.parameters()) == 142_500


# --- noise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_noise_changes_with_resampling_in_training_mode_only(head: str) -> None:
    net = build(VECTOR, head=head, noisy=True)
    obs, generator = observations(VECTOR, 5), torch.Generator().manual_seed(0)
    first = net.q_values(obs)
    assert torch.equal(first, net.q_values(obs))
    net.resample_noise(generator)
    assert not torch.equal(first, net.q_values(obs))
    net.eval()
    calm = net.q_values(obs)
    net.resample_noise(generator)
    assert torch.equal(calm, net.q_values(obs))


def test_every_layer_behind_the_convolutions_is_noisy() -> None:
    net = build(IMAGE, noisy=True)
    names = [name for name, _ in net.head.named_parameters()]
    assert len(names) == 8
    assert all(name.endswith(("_mu", "_sigma")) for name in names)


def test_a_copy_has_noise_of_its_own() -> None:
    net = build(VECTOR, noisy=True)
    target, obs = copy.deepcopy(net), observations(VECTOR, 5)
    before = net.q_values(obs)
    target.resample_noise(torch.Generator().manual_seed(0))
    assert torch.equal(net.q_values(obs), before)
    assert not torch.equal(target.q_values(obs), before)


def test_without_noise_nothing_is_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    build(VECTOR).resample_noise(generator)
    assert torch.equal(generator.get_state(), state)


# --- expectations -----------------------------------------------------------------------------


def test_c51_expectation() -> None:
    # support (−1, 0, 1): softmax(0, 0, ln 2) = (¼, ¼, ½) → ¼; softmax(ln 6, ln 3, 0) = (.6, .3, .1)
    net = build(VECTOR, head="c51", n_atoms=3, v_min=-1.0, v_max=1.0)
    assert net.support.tolist() == [-1.0, 0.0, 1.0]
    logits = tensor([[[1.0, 1.0, 2.0], [6.0, 3.0, 1.0]]]).log()
    torch.testing.assert_close(net.expected(logits, torch.zeros(1, 4)), tensor([[0.25, -0.5]]))


@pytest.mark.parametrize("head", ["qr", "iqn"])
def test_quantile_expectation(head: str) -> None:
    # (1 + 2 + 6)/3 and (−3 + 0 + 3)/3
    output = tensor([[[1.0, 2.0, 6.0], [-3.0, 0.0, 3.0]]])
    assert build(VECTOR, head=head).expected(output, torch.zeros(1, 4)).tolist() == [[3.0, 0.0]]


def test_fractions_are_midpoints() -> None:
    # (2k + 1)/2K for K = 4
    midpoints = [0.125, 0.375, 0.625, 0.875]
    assert build(VECTOR, head="qr", n_quantiles=4).fractions.tolist() == midpoints
    assert build(VECTOR, head="iqn", iqn_act_samples=4).fractions.tolist() == midpoints


def test_iqn_acts_on_its_midpoints_without_drawing() -> None:
    net, obs = build(VECTOR, head="iqn", iqn_act_samples=4), observations(VECTOR, 2)
    state = torch.get_rng_state()
    q = net.q_values(obs)
    assert torch.equal(torch.get_rng_state(), state)
    fractions = tensor([[0.125, 0.375, 0.625, 0.875]] * 2)
    assert torch.equal(q, net(obs, fractions).mean(2))


def test_iqn_embedding() -> None:
    # One cosine per fraction: cos(0) = 1 (i = 0), cos(π/3) = ½ (i = 1, τ = ⅓), cos(π) = −1 (τ = 1)
    # W = (1, 2): ReLU(1 + 2·½) = 2, ReLU(1 − 2) = 0; times feature 3: 6, 0; output 10·x + 1
    head = ImplicitQuantileHead(1, 1, num_cosines=2, style=Style())
    embedding, output = head.embedding, head.values.advantage
    for module, weight, bias in ((embedding, [[1.0], [2.0]], [0.0]), (output, [[10.0]], [1.0])):
        w, b = module.parameters()
        w.data, b.data = tensor(weight), tensor(bias)
    values = head(tensor([[3.0]]), tensor([[1 / 3, 1.0]]))
    torch.testing.assert_close(values, tensor([[[61.0, 1.0]]]))


def test_iqn_answers_each_fraction_on_its_own() -> None:
    net, obs = build(VECTOR, head="iqn", dueling=True), observations(VECTOR, 2)
    fractions = tensor([[0.1, 0.5, 0.9], [0.2, 0.3, 0.4]])
    together = net(obs, fractions)
    for k in range(3):
        torch.testing.assert_close(together[:, :, k : k + 1], net(obs, fractions[:, k : k + 1]))


@pytest.mark.parametrize(("head", "fractions"), [("iqn", None), ("q", torch.rand(2, 4))])
def test_fractions_are_for_iqn_and_needed_there(head: str, fractions: Tensor | None) -> None:
    with pytest.raises(AssertionError, match="iqn"):
        build(VECTOR, head=head)(observations(VECTOR, 2), fractions)


def test_the_state_holds_weights_and_noise_alone() -> None:
    net = build(VECTOR, head="iqn", noisy=True)
    buffers = set(net.state_dict()) - {name for name, _ in net.named_parameters()}
    assert {name.rpartition(".")[2] for name in buffers} == {"noise_in", "noise_out"}


# --- choosing a torso -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((4, 84, 84), NatureCNN),
        ((96, 96, 3), NatureCNN),
        ((1, 35, 36), MinAtarCNN),
        ((10, 10, 4), MinAtarCNN),
        ((84, 84), NatureCNN),
        ((20, 20), MinAtarCNN),
        ((4, 4), MLP),
        ((8,), MLP),
    ],
)
def test_auto_picks_by_shape(shape: tuple[int, ...], kind: type[nn.Module]) -> None:
    net = build(EnvSpec("env", shape, "uint8", 2))
    assert isinstance(net.torso, kind)


@pytest.mark.parametrize("shape", [(84, 84), (20, 20), (10, 10, 4)])
def test_floats_are_an_image_only_with_channels_and_many_pixels(shape: tuple[int, ...]) -> None:
    assert isinstance(build(EnvSpec("env", shape, "float32", 2)).torso, MLP)


def test_a_grey_image_without_a_channel_axis_is_one_with_a_single_channel() -> None:
    flat, deep = (build(EnvSpec("env", shape, "uint8", 2)) for shape in ((40, 40), (1, 40, 40)))
    deep.load_state_dict(flat.state_dict())
    image = torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8)
    torch.testing.assert_close(flat.q_values(image), deep.q_values(image.unsqueeze(1)))


def test_one_line_says_which_network_was_chosen() -> None:
    image, states = (
        EnvSpec("e", (84, 84), "uint8", 2),
        EnvSpec("e", (), "int64", 2, num_obs_values=16),
    )
    assert describe_choice(Config(), image) == "network nature for 84×84 uint8 observations"
    assert describe_choice(Config(), states) == "network mlp for 16 discrete observations"
    assert describe_choice(Config(network="mlp"), image) is None


def test_an_unknown_network_is_named_with_its_nearest() -> None:
    with pytest.raises(UnknownNameError, match=says("network", "natur", "nature")):
        build(VECTOR, network="natur")


def test_a_convolutional_network_on_a_vector_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("(4,)", "--network mlp")):
        build(VECTOR, network="nature")


PLUGIN = """
import torch
from torch import nn

class Says(nn.Module):
    features = 7
    def __init__(self, observation_shape):
        super().__init__()
        self.layer = nn.Linear(observation_shape[0], 7)
    def forward(self, obs):
        return torch.relu(self.layer(obs))

class Silent(nn.Module):
    def __init__(self, observation_shape):
        super().__init__()
        self.features = nn.Sequential(nn.LazyLinear(9), nn.BatchNorm1d(9))
    def forward(self, obs):
        return self.features(obs.flatten(1))

class Dropping(nn.Sequential):
    def __init__(self, observation_shape):
        super().__init__(nn.Linear(observation_shape[0], 7), nn.Dropout(0.1))

class Flat(nn.Module):
    def __init__(self, observation_shape):
        super().__init__()
    def forward(self, obs):
        return obs.sum(1)

class Breaks(Flat):
    def forward(self, obs):
        raise ValueError("two\\nlines")

class Stubborn(nn.Module):
    def __init__(self):
        super().__init__()

def number(observation_shape):
    return 3
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, which is not on the path yet."""
    (tmp_path / "qfleet_test_torsos.py").write_text(PLUGIN)
    (tmp_path / "qfleet_test_broken.py").write_text("1 / 0\n")
    (tmp_path / "qfleet_test_needy.py").write_text("import qfleet_test_absent\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "qfleet_test_torsos", raising=False)
    return "qfleet_test_torsos"


@pytest.mark.parametrize(("name", "features"), [("Says", 7), ("Silent", 9)])
@pytest.mark.parametrize("head", HEADS)
def test_a_users_torso(plugin: str, name: str, features: int, head: str) -> None:
    net = build(VECTOR, network=f"{plugin}:{name}", head=head, dueling=True, envs=2)
    obs = observations(VECTOR, 2)
    assert net.torso.training
    assert net.torso(obs).shape == (2, features)
    assert net.q_values(obs).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Silent", "cannot act in one environment; use --envs 2"),
        ("Dropping", "torch's dropout"),
        ("Flat", "gave (1,); it must give features of shape [B, F]"),
        ("Breaks", "ValueError: two lines; it must map raw batches to features"),
        ("Stubborn", "called with the observation's shape (4,)"),
        ("number", "made a int; it must make a torch.nn.Module"),
        ("Missing", "module 'qfleet_test_torsos' has no 'Missing'"),
    ],
)
def test_a_users_torso_that_cannot_work(plugin: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(VECTOR, network=f"{plugin}:{name}")
    assert message in str(error.value)
    assert f"'{plugin}:{name}'" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("qfleet_test_nowhere:Class", "run from the folder that holds it, or install it"),
        ("qfleet_test_needy:Class", "No module named 'qfleet_test_absent'; install what it"),
        ("qfleet_test_broken:Class", "ZeroDivisionError: division by zero; fix the module"),
        ("qfleet_test_torsos:", "not of the form package.module:Name"),
        ("qfleet_test_torsos", "not of the form package.module:Name"),
    ],
)
@pytest.mark.usefixtures("plugin")
def test_load_object_says_what_to_mend(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_object(path, "thing")
    assert message in str(error.value)
    assert f"thing '{path}'" in str(error.value)


def test_load_object_finds_the_current_folder_without_doubling_the_path(plugin: str) -> None:
    current = str(Path.cwd())
    for _ in range(2):
        assert load_object(f"{plugin}:number", "thing")(()) == 3
    assert sys.path.count(current) == 1
    assert sys.path[-1] == current
