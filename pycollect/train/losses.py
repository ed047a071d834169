"""Losses for data-parallel training: the sum over the examples, so that shards of any size add up.

The gradients of the sums are summed over the ranks and divided once by the size of the whole batch,
so every example has the same weight, however the batch was split.
"""

import inspect
from collections.abc import Callable
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

from ..errors import shown

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (module output, labels) -> loss


def summed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of scores [n, classes] and labels [n], summed over the examples.

    Scores are a floating-point type, and labels int64 or uint8, from 0 to classes - 1. The result
    has no dimensions, and the dtype of the scores. Raises torch's errors for other dtypes and
    labels.

    >>> import torch
    >>> summed_cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, 1])) / 3
    tensor(0.6931)
    """
    return F.cross_entropy(scores, labels, reduction="sum")


def check_reduction(loss: Loss) -> None:
    """Raise ValueError for a loss whose `reduction` is not "sum"; without one it is accepted.

    Modules have it as an attribute, functions as the default of a parameter of that name.

    >>> check_reduction(F.mse_loss)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: the loss has reduction='mean', and must be a sum over the examples: the ...
    """
    reduction = getattr(loss, "reduction", None)
    if reduction is None:
        try:
            parameter = inspect.signature(loss).parameters.get("reduction")
        except (TypeError, ValueError):  # a callable without a signature cannot be checked
            return
        reduction = None if parameter is None else parameter.default
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
