"""What a step minimises and how: losses, optimizers and learning rates; and what a test counts.

A loss is the sum over the examples, so that shards of any size add up. The gradients of the sums
are summed over the ranks and divided once by the size of the whole batch, so every example has the
same weight, however the batch was split.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import shown
from .reduce import send_from_rank_0
from .shares import split_batch

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (module output, labels) -> loss
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def summed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of scores [n, classes] and labels [n], summed over the examples.

    Scores are a floating-point type, and labels int64 or uint8, from 0 to classes - 1. The result
    has no dimensions, and the dtype of the scores. Raises torch's errors for other dtypes and
    labels.

    >>> summed_cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, 1])) / 3
    tensor(0.6931)
    """
    return F.cross_entropy(scores, labels, reduction="sum")


def check_reduction(loss: Loss) -> None:
    """Raise ValueError for a loss whose `reduction` is not "sum"; without one it is accepted.

    Modules have it as an attribute, functions as the default of a parameter of that name.
    """
    reduction = getattr(loss, "reduction", None)
    if reduction is None:
        # A callable without a signature cannot be checked.
        with suppress(KeyError, TypeError, ValueError):
            reduction = inspect.signature(loss).parameters["reduction"].default
    if isinstance(reduction, str) and reduction != "sum":
        raise ValueError(
            f"the loss has reduction={shown(reduction)}, and must be a sum over the examples: the "
            "ranks' gradients are added and divided by the size of the whole batch; use "
            "reduction='sum'"
        )


def check_scalar(loss: Tensor) -> Tensor:
    """Return the loss if it is one number; ValueError for another shape."""
    if loss.dim() != 0:
        raise ValueError(
            f"the loss of a shard must be one number, the sum over its examples, and has shape "
            f"{list(loss.shape)}"
        )
    return loss


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
        # two cores, and 26 ms parameter by parameter. Of narrow floats torch 2.13 computes a wrong
        # momentum in it.
        fused = all(param.dtype in (torch.float32, torch.float64) for param in params)
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
    """Return the optimizer; ValueError if its step needs a closure for forward and backward."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure that it calls several times a step; "
            "replicas run one forward and backward pass a step: choose another, such as Adam"
        )
    return optimizer


def right_labels(scores: Tensor, y: Tensor) -> Tensor:
    """Return the number of labels with the highest score, a tensor without dimensions.

    Scores have shape [n, classes, ...] and labels [n, ...]. Raises ValueError for other shapes,
    which a comparison would broadcast.

    >>> right_labels(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(1)
    """
    if scores.dim() < 2 or y.shape != scores.shape[:1] + scores.shape[2:]:
        raise ValueError(
            f"the labels have shape {list(y.shape)} and the scores {list(scores.shape)}: scores "
            "[n, classes, ...] need labels [n, ...]"
        )
    return (scores.argmax(dim=1) == y).sum()


@torch.no_grad()
def accuracy(
    modules: Sequence[nn.Module],
    devices: Sequence[torch.device],
    batches: Iterable[tuple[Tensor, Tensor]],
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the fraction of labels that have the highest score, 0..1.

    An example has one label, or one for each pixel or position. The modules run in evaluation mode
    with the buffers of rank 0, so the tested model is the one that a checkpoint stores. With a
    group each process has one module and its part of the batches, and all return the same. Raises
    ValueError if there are no labels, or if they have another shape than the scores' argmax.
    """
    correct = [torch.zeros((), dtype=torch.int64, device=device) for device in devices]
    labels = 0
    with _as_rank_0(modules, group):
        for X, y in batches:
            labels += y.numel()
            shards = zip(*split_batch(X, y, devices), modules, correct, strict=True)
            for X_shard, y_shard, module, count in shards:
                if len(X_shard):
                    count += right_labels(module(X_shard), y_shard)
    right = sum(int(count) for count in correct)
    if group is not None:
        numbers = torch.tensor([right, labels], device=devices[0])
        dist.all_reduce(numbers, group=group)
        right, labels = numbers.tolist()
    if labels == 0:
        raise ValueError("no examples to evaluate")
    return right / labels


@contextmanager
def _as_rank_0(modules: Sequence[nn.Module], group: dist.ProcessGroup | None) -> Iterator[None]:
    """Put all modules in evaluation mode with rank 0's buffers; restore both at the end."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    others = modules[1:] if group is None else modules  # of the modules that take its buffers
    owned = [(part, dict(part._buffers)) for module in others for part in module.modules()]
    kept = [(buffer, buffer.clone()) for module in others for buffer in module.buffers()]
    try:
        for module in modules:
            module.eval()
        if group is not None:
            send_from_rank_0(modules[0].named_buffers(), group)
        for module in modules[1:]:
            for buffer, first in zip(module.buffers(), modules[0].buffers(), strict=True):
                buffer.copy_(first)
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part, own in owned:
            part._buffers.update(own)
        for buffer, value in kept:
            buffer.copy_(value)
