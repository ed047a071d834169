"""The models of Dive into Deep Learning: LeNet from scratch and the ResNet-18 for small images.

A model is built as `MODELS[name](in_channels=1, num_classes=10, seed=0)`: on the CPU, and with the
same bits for the same seed, whatever the state of torch's own generators.

For the function `lenet` a replica is a copy of its list of eight parameters, and the gradients of
these are what the ranks reduce.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 28  # height and width of LeNet's images; the first dense layer's width follows from it
WEIGHT_STD = 0.01  # of both models


def init_lenet(seed: int = 0, in_channels: int = 1, num_classes: int = 10) -> list[Tensor]:
    """Draw the eight parameters of LeNet on the CPU; the same seed gives the same bits.

    The list has weight and bias of two convolutions and two dense layers, float32, without
    gradients. Weights are 0.01 * N(0, 1), biases 0. The images that they fit have `in_channels`
    channels of 28 x 28 pixels.

    >>> [tuple(p.shape) for p in init_lenet()[:4]]
    [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,)]
    """
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in ((20, in_channels, 3, 3), (50, 20, 5, 5), (128, 800), (num_classes, 128)):
        params += [WEIGHT_STD * torch.randn(shape, generator=generator), torch.zeros(shape[0])]
    return params


def lenet(images: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return the scores of every image: [n, channels, 28, 28] to [n, classes].

    `params` are the eight parameters in the order of `init_lenet`, on the device of the images and
    of their dtype. Raises torch's RuntimeError for images that do not fit the parameters.

    >>> lenet(torch.zeros(2, 1, 28, 28), init_lenet()).shape
    torch.Size([2, 10])
    """
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    hidden = F.avg_pool2d(F.relu(F.conv2d(images, w1, b1)), 2)  # [n, 20, 13, 13]
    hidden = F.avg_pool2d(F.relu(F.conv2d(hidden, w2, b2)), 2)  # [n, 50, 4, 4]
    hidden = F.relu(F.linear(hidden.flatten(1), w3, b3))
    return F.linear(hidden, w4, b4)


class LeNet(nn.Module):
    """LeNet as a module; its parameters have the order and the bits of `init_lenet`.

    It takes images [n, in_channels, 28, 28] and returns scores [n, num_classes], float32. Raises
    ValueError for images of another height or width.

    >>> LeNet(num_classes=3)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 3])
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10, seed: int = 0) -> None:
        super().__init__()
        self.params = nn.ParameterList(init_lenet(seed, in_channels, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of every image; ValueError if the images are not 28 x 28."""
        if images.shape[-2:] != (SIZE, SIZE):
            height, width = images.shape[-2:]
            raise ValueError(
                f"LeNet takes images of {SIZE} x {SIZE}, not {height} x {width}; resize them, or "
                "choose the ResNet-18, which takes any size"
            )
        return lenet(images, list(self.params))


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut: [n, before, h, w] to [n, after, h/stride, ...].

    The shortcut is a 1 x 1 convolution where the shape changes.
    """

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, kernel_size=3, padding=1, stride=stride)
        self.conv2 = nn.Conv2d(after, after, kernel_size=3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.conv3 = None if same else nn.Conv2d(before, after, kernel_size=1, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        """Return the activated sum of the two convolutions and the shortcut."""
        found = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(images)))))
        return F.relu(found + (images if self.conv3 is None else self.conv3(images)))


def resnet18(in_channels: int = 1, num_classes: int = 10, seed: int = 0) -> nn.Module:
    """Build the ResNet-18 on the CPU: images [n, in_channels, h, w] to scores [n, num_classes].

    A 3 x 3 convolution of stride 1 without max pooling, four stages of 64, 128, 256 and 512
    channels with two residual blocks each, global average pooling, and one dense layer. Images are
    float32 and of any size; convolutions and the dense layer start with weights N(0, 0.01). The
    same seed gives the same bits; the state of torch's own generator does not change.

    >>> resnet18(in_channels=3)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = nn.Sequential()
        net.add_module("conv", nn.Conv2d(in_channels, 64, kernel_size=3, padding=1))
        net.add_module("bn", nn.BatchNorm2d(64))
        net.add_module("relu", nn.ReLU())
        for stage, (before, after) in enumerate(((64, 64), (64, 128), (128, 256), (256, 512)), 1):
            first = Residual(before, after, stride=1 if stage == 1 else 2)
            net.add_module(f"stage{stage}", nn.Sequential(first, Residual(after, after)))
        net.add_module("pool", nn.AdaptiveAvgPool2d(1))
        net.add_module("flatten", nn.Flatten())
        net.add_module("dense", nn.Linear(512, num_classes))
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(module.weight, std=WEIGHT_STD)
    return net


MODELS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {"lenet": LeNet, "resnet18": resnet18}
)
"""The models by the name that `train(model=...)` takes, read-only.

A value is called as `MODELS[name](in_channels=1, num_classes=10, seed=0)`, which are the defaults,
and returns an nn.Module of float32 parameters on the CPU.
"""
