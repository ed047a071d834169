"""LeNet as a plain function of a list of eight parameters, and a module around it.

For the function a replica is a copy of the list, and its gradients are what the ranks reduce.
The initialisation is part of the definition (weights 0.01 * N(0, 1), biases 0).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 28  # height and width of the images; the first dense layer's width follows from it
WEIGHT_SCALE = 0.01


def shapes(in_channels: int = 1, num_classes: int = 10) -> list[tuple[int, ...]]:
    """Return the parameter shapes of two convolutions and two dense layers: weight, then bias.

    >>> shapes(in_channels=3)[0]
    (20, 3, 3, 3)
    """
    weights = [(20, in_channels, 3, 3), (50, 20, 5, 5), (128, 800), (num_classes, 128)]
    return [shape for weight in weights for shape in (weight, weight[:1])]


def init_lenet(seed: int = 0, in_channels: int = 1, num_classes: int = 10) -> list[Tensor]:
    """Draw the eight parameters of LeNet on the CPU; the same seed gives the same bits.

    The list has weight and bias of two convolutions and two dense layers, float32, without
    gradients. Weights are 0.01 * N(0, 1), biases 0. The images that they fit have `in_channels`
    channels of 28 x 28 pixels.

    >>> [tuple(p.shape) for p in init_lenet()[:4]]
    [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,)]
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        WEIGHT_SCALE * torch.randn(shape, generator=generator)
        if len(shape) > 1
        else torch.zeros(shape)
        for shape in shapes(in_channels, num_classes)
    ]


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
