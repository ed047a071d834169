"""The ResNet-18 for small images: a 3 x 3 stem of stride 1 and no max pooling.

Four stages of 64, 128, 256 and 512 channels with two residual blocks each, global average pooling,
one dense layer. Weights of convolutions and of the dense layer start as N(0, 0.01).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = (64, 128, 256, 512)
BLOCKS = 2  # residual blocks per stage
WEIGHT_STD = 0.01


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut: [n, before, h, w] to [n, after, h/stride, ...].

    The shortcut is a 1 x 1 convolution where the shape changes.

    >>> Residual(4, 8, stride=2)(torch.zeros(2, 4, 6, 6)).shape
    torch.Size([2, 8, 3, 3])
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


def stage(before: int, after: int) -> nn.Sequential:
    """Make the residual blocks of one stage; all but the first stage halve height and width."""
    stride = 1 if before == after else 2
    first = Residual(before, after, stride)
    return nn.Sequential(first, *(Residual(after, after) for _ in range(BLOCKS - 1)))


def resnet18(in_channels: int = 1, num_classes: int = 10, seed: int = 0) -> nn.Module:
    """Build the ResNet-18 on the CPU: images [n, in_channels, h, w] to scores [n, num_classes].

    Images are float32 and of any size; convolutions and the dense layer start with weights
    N(0, 0.01). The same seed gives the same bits; the state of torch's own generator does not
    change.

    >>> resnet18(in_channels=3)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = nn.Sequential()
        net.add_module("conv", nn.Conv2d(in_channels, CHANNELS[0], kernel_size=3, padding=1))
        net.add_module("bn", nn.BatchNorm2d(CHANNELS[0]))
        net.add_module("relu", nn.ReLU())
        before = CHANNELS[0]
        for number, after in enumerate(CHANNELS, 1):
            net.add_module(f"stage{number}", stage(before, after))
            before = after
        net.add_module("pool", nn.AdaptiveAvgPool2d(1))
        net.add_module("flatten", nn.Flatten())
        net.add_module("dense", nn.Linear(CHANNELS[-1], num_classes))
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(module.weight, std=WEIGHT_STD)
    return net
