"""Torsos: they map a batch of raw observations to features ``[B, F]``.

A torso takes observations as the environment returns them (uint8 pixels, float32 boxes, int64
numbers) and scales or encodes them itself. Its attribute ``features`` is the width of its output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec
from qfleet.networks.dropout import Dropout
from qfleet.networks.fused import Dense
from qfleet.networks.plainly import is_plain

NATURE_MIN_PIXELS = 36
"""The smallest image side for which the three convolutions of NatureCNN leave one pixel."""
SMALL_MIN_PIXELS = 5
"""The smallest side of uint8 observations that ``auto`` takes for an image."""


class ImageLayout(NamedTuple):
    channels: int
    """Channels of all frames of a stack together."""
    height: int
    width: int
    channels_last: bool


def image_layout(spec: EnvSpec) -> ImageLayout | None:
    """Return how to read an observation as an image, or None if it is not an image.

    The shorter of the first and last axis is the channel axis. A frame stack is the first axis,
    either of grey frames (3 axes in all) or of images with a channel axis (4 axes). Two axes are a
    grey image if they hold uint8.
    """
    shape, frames = spec.obs_shape, 1
    if len(shape) == 4:
        frames, shape = shape[0], shape[1:]
    if len(shape) == 2 and spec.obs_dtype == "uint8":
        return ImageLayout(1, shape[0], shape[1], channels_last=False)
    if len(shape) != 3:
        return None
    first, middle, last = shape
    if first <= last or spec.raw_obs:  # converted images have their channels first
        return ImageLayout(frames * first, middle, last, channels_last=False)
    return ImageLayout(frames * last, first, middle, channels_last=True)


def choose_network(spec: EnvSpec) -> str:
    """Return the network of ``auto``: one with convolutions for images, else an MLP."""
    layout = image_layout(spec)
    side = 0 if layout is None else min(layout.height, layout.width)
    if side >= NATURE_MIN_PIXELS:
        return "nature"
    return "minatar" if side >= SMALL_MIN_PIXELS and spec.obs_dtype == "uint8" else "mlp"


def _require_image(spec: EnvSpec, network: str, least_pixels: int) -> ImageLayout:
    """Return the layout of the observations, or raise ConfigError if they are too small."""
    layout = image_layout(spec)
    if layout is None or min(layout.height, layout.width) < least_pixels:
        raise ConfigError(
            f"network '{network}' needs an image of at least {least_pixels}×{least_pixels} pixels, "
            f"not an observation of shape {spec.obs_shape}; try --network mlp"
        )
    return layout


def as_image(obs: Tensor, layout: ImageLayout) -> Tensor:
    """Return the observation as ``[B, channels, height, width]``; pixels are scaled to [0, 1]."""
    image = obs.movedim(-1, -3) if layout.channels_last else obs
    if image.dim() == 3:
        image = image.unsqueeze(1)
    if image.dim() == 5:
        image = image.flatten(1, 2)
    if image.is_cpu and not is_plain():
        # Channels innermost in memory: a CPU's convolutions are an eighth faster that way (Nature
        # CNN, batch 32, forward and backward: 38 instead of 43 ms on two slow cores).
        image = image.contiguous(memory_format=torch.channels_last)
    return image / 255 if obs.dtype == torch.uint8 else image


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "elu": nn.ELU, "gelu": nn.GELU, "silu": nn.SiLU,
}  # fmt: skip
"""Value of ``activation`` → module."""


class MLP(nn.Module):
    """A torso of dense layers with an activation on the flattened observation.

    Discrete observations are one-hot encoded, pixels scaled to [0, 1]. With ``layer_norm`` every
    layer is normalised before its activation; ``dropout`` comes after it. If ``layers`` is empty,
    the output is the encoded observation. Only layers with ReLU alone are fused.
    """

    def __init__(
        self,
        spec: EnvSpec,
        layers: Sequence[int],
        layer_norm: bool,
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_obs_values = spec.num_obs_values
        self.takes_plain_vectors = spec.obs_dtype == "float32" and len(spec.obs_shape) == 1
        """Observations need no encoding before the first layer."""
        inputs = math.prod(spec.obs_shape) * max(spec.num_obs_values, 1)
        sizes = [inputs, *layers]
        self.features = sizes[-1]
        self.layers: nn.Module | None = None
        if layer_norm or dropout or activation != "relu":
            modules: list[nn.Module] = []
            for fan_in, fan_out in itertools.pairwise(sizes):
                modules.append(nn.Linear(fan_in, fan_out))
                modules += [nn.LayerNorm(fan_out)] if layer_norm else []
                modules.append(ACTIVATIONS[activation]())
                modules += [Dropout(dropout)] if dropout else []
            self.layers = nn.Sequential(*modules)
        elif layers:
            self.layers = Dense(sizes, relu_last=True)

    def forward(self, obs: Tensor) -> Tensor:
        encoded = self.encode(obs)
        if self.layers is None:
            return encoded
        features: Tensor = self.layers(encoded)
        return features

    def encode(self, obs: Tensor) -> Tensor:
        """Return the input of the first layer, ``[B, inputs]``."""
        flat = obs if obs.dim() == 2 else obs.reshape(obs.shape[0], -1)
        if self.num_obs_values:
            # Not F.one_hot: it reads the largest value, which synchronises a GPU with the host.
            values = torch.arange(self.num_obs_values, device=obs.device)
            return (flat.unsqueeze(2) == values).float().flatten(1)
        return flat / 255 if obs.dtype == torch.uint8 else flat


NORM_EPS = 1e-6
"""Epsilon of layer normalisation in convolutional torsos, as in PQN (2407.04811)."""
TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a standard normal distribution truncated at ±2."""


class _ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels at each position of an image ``[B, C, H, W]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@torch.library.custom_op("qfleet::draw_truncated", mutates_args=("weight",))
def draw_truncated(weight: Tensor, std: float) -> None:
    """Draw from a normal distribution that is truncated at ±2 std.

    It is an operation of its own, so that it can be noted and carried out later (``Deferred``):
    how many numbers torch draws for it depends on the numbers.
    """
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


@draw_truncated.register_fake
def _(weight: Tensor, std: float) -> None:
    del weight, std


def _normalised(layer: nn.Conv2d | nn.Linear) -> list[nn.Module]:
    """Return the layer and its normalisation, initialised as in PQN (2407.04811).

    Weights are normal with variance 2/inputs (He 2015), truncated at two standard deviations, and
    biases are 0.
    """
    fan_in = layer.weight[0].numel()
    std = math.sqrt(2 / fan_in) / TRUNCATED_STD
    with torch.no_grad():
        draw_truncated(layer.weight, std)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    norm = _ChannelNorm if isinstance(layer, nn.Conv2d) else nn.LayerNorm
    return [layer, norm(layer.weight.shape[0], eps=NORM_EPS)]


def _dense(inputs: int, outputs: int, layer_norm: bool) -> nn.Module | None:
    """Return the dense layer of a convolutional torso; None for a width of 0."""
    if outputs == 0:
        return None
    if layer_norm:
        return nn.Sequential(*_normalised(nn.Linear(inputs, outputs)), nn.ReLU())
    return Dense((inputs, outputs), relu_last=True)


class NatureCNN(nn.Module):
    """The convolutional network of Nature DQN (Mnih 2015).

    ``dense`` = 0 omits the dense layer, for heads that have their own. With ``layer_norm`` every
    layer is normalised before its ReLU, convolutions over the channels of each position.
    """

    def __init__(self, spec: EnvSpec, dense: int = 512, layer_norm: bool = False) -> None:
        super().__init__()
        self.layout = layout = _require_image(spec, "nature", NATURE_MIN_PIXELS)
        modules: list[nn.Module] = []
        for convolution in (
            nn.Conv2d(layout.channels, 32, 8, stride=4),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.Conv2d(64, 64, 3, stride=1),
        ):
            modules += _normalised(convolution) if layer_norm else [convolution]
            modules.append(nn.ReLU())
        self.convolutions = nn.Sequential(*modules, nn.Flatten())
        height, width = (
            ((side - 8) // 4 + 1 - 4) // 2 + 1 - 2 for side in (layout.height, layout.width)
        )
        flat = 64 * height * width
        self.dense = _dense(flat, dense, layer_norm)
        self.features = dense or flat

    def forward(self, obs: Tensor) -> Tensor:
        image = as_image(obs, self.layout)
        features: Tensor = self.convolutions(image) if image.is_cpu else self._folded(image)
        return features if self.dense is None else self.dense(features)

    def _folded(self, x: Tensor) -> Tensor:
        """Apply the convolutions with their strides folded into channels, which is faster on GPUs.

        A k×k kernel of stride s on C channels is a k/s×k/s kernel of stride 1 on C·s² channels.
        """
        for layer in self.convolutions:
            if not isinstance(layer, nn.Conv2d):
                x = layer(x)
                continue
            stride, weight = layer.stride[0], layer.weight
            if stride > 1:
                # Pixels at the right and lower edge that no kernel covers are dropped.
                height, width = (side - side % stride for side in x.shape[2:])
                x = F.pixel_unshuffle(x[:, :, :height, :width], stride)
                weight = F.pixel_unshuffle(weight, stride)
            if not is_plain():
                x = x.contiguous(memory_format=torch.channels_last)
                weight = weight.contiguous(memory_format=torch.channels_last)
            x = F.conv2d(x, weight, layer.bias)
        return x


class MinAtarCNN(nn.Module):
    """The network of MinAtar's paper (1903.03176): one layer of 16 kernels of 3×3.

    ``dense`` = 0 omits the dense layer, for heads that have their own. With ``layer_norm`` both
    layers are normalised before their ReLU, the first over the channels of each position.
    """

    def __init__(self, spec: EnvSpec, dense: int = 128, layer_norm: bool = False) -> None:
        super().__init__()
        self.layout = layout = _require_image(spec, "minatar", 3)
        convolution = nn.Conv2d(layout.channels, 16, 3)
        self.convolution = nn.Sequential(*_normalised(convolution)) if layer_norm else convolution
        self.by_position = layer_norm
        """Features are ordered row, column, channel, as normalisation leaves them."""
        flat = 16 * (layout.height - 2) * (layout.width - 2)
        self.dense = _dense(flat, dense, layer_norm)
        self.features = dense or flat

    def forward(self, obs: Tensor) -> Tensor:
        image = as_image(obs, self.layout)
        features = F.relu(self.convolution(image))
        if self.by_position:
            features = features.movedim(1, -1)
        features = features.flatten(1)
        return features if self.dense is None else self.dense(features)


class Residual(nn.Module):
    """Two convolutions whose output is added to their input, ``[B, C, H, W]``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + inner


class ImpalaResNet(nn.Module):
    """The deep network of IMPALA (1802.01561, fig. 3): 16, 32, 32 channels, 15 convolutions.

    ``dense`` = 0 omits the dense layer, for heads that have their own. ``width`` multiplies the
    channels, and each of the three sections has ``depth`` residual blocks.
    """

    def __init__(self, spec: EnvSpec, dense: int = 256, width: int = 1, depth: int = 2) -> None:
        super().__init__()
        self.layout = layout = _require_image(spec, "impala", 1)
        channels, rows, columns = layout.channels, layout.height, layout.width
        stages: list[nn.Module] = []
        for wider in (16 * width, 32 * width, 32 * width):
            stages += [
                nn.Conv2d(channels, wider, 3, padding=1),
                nn.MaxPool2d(3, stride=2, padding=1),
                *(Residual(wider) for _ in range(depth)),
            ]
            channels, rows, columns = wider, (rows + 1) // 2, (columns + 1) // 2
        self.stages = nn.Sequential(*stages, nn.ReLU(), nn.Flatten())
        flat = channels * rows * columns
        self.dense = _dense(flat, dense, layer_norm=False)
        self.features = dense or flat

    def forward(self, obs: Tensor) -> Tensor:
        features: Tensor = self.stages(as_image(obs, self.layout))
        return features if self.dense is None else self.dense(features)
