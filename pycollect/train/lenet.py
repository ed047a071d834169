"""LeNet as a plain function of a list of eight parameters.

Nothing is hidden in a module: a replica is a copy of the list, and its gradients are what the
ranks reduce. The initialisation is part of the definition (weights 0.01 * N(0, 1), biases 0).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Two convolutions and two dense layers for images of 1 x 28 x 28; every weight, then its bias.
SHAPES = (
    (20, 1, 3, 3),
    (20,),
    (50, 20, 5, 5),
    (50,),
    (128, 800),
    (128,),
    (10, 128),
    (10,),
)
WEIGHT_SCALE = 0.01


def init_lenet(seed: int = 0) -> list[Tensor]:
    """Draw the eight parameters of LeNet on the CPU; the same seed gives the same bits.

    >>> [tuple(p.shape) for p in init_lenet()[:4]]
    [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,)]
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        WEIGHT_SCALE * torch.randn(shape, generator=generator)
        if len(shape) > 1
        else torch.zeros(shape)
        for shape in SHAPES
    ]


def lenet(images: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Give the ten scores of every image: [n, 1, 28, 28] to [n, 10].

    >>> lenet(torch.zeros(2, 1, 28, 28), init_lenet()).shape
    torch.Size([2, 10])
    """
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    hidden = F.avg_pool2d(F.relu(F.conv2d(images, w1, b1)), 2)  # [n, 20, 13, 13]
    hidden = F.avg_pool2d(F.relu(F.conv2d(hidden, w2, b2)), 2)  # [n, 50, 4, 4]
    hidden = F.relu(F.linear(hidden.flatten(1), w3, b3))
    return F.linear(hidden, w4, b4)
