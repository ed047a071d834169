"""The models of Dive into Deep Learning: LeNet from scratch and the ResNet-18 for small images.

A model is built as `MODELS[name](in_channels=1, num_classes=10, seed=0)`: on the CPU, and with the
same bits for the same seed, whatever the state of torch's own generators.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import nn

from .lenet import LeNet, init_lenet, lenet
from .resnet import resnet18

__all__ = ["MODELS", "Build", "LeNet", "init_lenet", "lenet", "resnet18"]


class Build(Protocol):
    """A function or class that builds a model."""

    def __call__(
        self, in_channels: int = ..., num_classes: int = ..., seed: int = ...
    ) -> nn.Module: ...


MODELS: Mapping[str, Build] = MappingProxyType({"lenet": LeNet, "resnet18": resnet18})
"""The models by the name that `train(model=...)` takes, read-only.

A value is called as `MODELS[name](in_channels=1, num_classes=10, seed=0)`, which are the defaults,
and returns an nn.Module of float32 parameters on the CPU.
"""
