"""What a loss must be for shards of any size to add up: the sum over the examples.

The gradients of sums are summed over the ranks and divided once, by the size of the whole batch,
which weighs every example alike however the batch was split.
"""

import inspect
from collections.abc import Callable
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # of a module's output and the labels


def summed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Give the cross-entropy of scores [n, classes] and labels [n], summed over the examples.

    >>> import torch
    >>> summed_cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, 1])) / 3
    tensor(0.6931)
    """
    return F.cross_entropy(scores, labels, reduction="sum")


def check_reduction(loss: Loss) -> None:
    """Raise ValueError for a loss that says that it takes a mean, or does not reduce.

    Modules say so by `reduction`, functions by the default of a parameter of that name.

    >>> check_reduction(F.mse_loss)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: the loss has reduction='mean', and must be a sum over the examples: the ...
    """
    reduction = getattr(loss, "reduction", None)
    if reduction is None:
        try:
            parameter = inspect.signature(loss).parameters.get("reduction")
        except (TypeError, ValueError):  # a callable without a signature says nothing
            return
        reduction = None if parameter is None else parameter.default
    if isinstance(reduction, str) and reduction != "sum":
        raise ValueError(
            f"the loss has reduction={reduction!r}, and must be a sum over the examples: the "
            "ranks' gradients are added and divided by the size of the whole batch; use "
            "reduction='sum'"
        )


def check_scalar(loss: Tensor) -> Tensor:
    """Give back a loss that is one number; ValueError for another shape."""
    if loss.dim() != 0:
        raise ValueError(
            f"the loss of a shard must be one number, the sum over its examples, and has shape "
            f"{list(loss.shape)}"
        )
    return loss
