"""Batch mean and variance over several ranks, and batch normalisation with them.

Each rank computes the statistics of its own shard with torch's kernels. Three small all-reduces
(number of values, weighted means, weighted spreads) combine them for the whole batch; the backward
pass needs one. Ranks of one process and of several run the same steps, so a backend that adds in
rank order gives both the same bits. The functions can be differentiated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

import pycollect as pc


class Statistics(NamedTuple):
    """Mean and biased variance of every channel, and the number of values per channel."""

    mean: Tensor
    var: Tensor
    values: int


class Ranks(Protocol):
    """The ranks whose shards form one batch; some or all of them run in this process."""

    def total(self, values: Sequence[int], device: torch.device) -> int:
        """Return the sum over all ranks; `values` holds one number per rank of this process."""

    def all_reduce(self, tensors: list[Tensor]) -> None:
        """Sum over all ranks in place; `tensors` holds one tensor per rank of this process."""


@dataclass(frozen=True)
class OneProcessRanks:
    """The `Ranks` when every rank runs in this process."""

    def total(self, values: Sequence[int], device: torch.device) -> int:
        """Return the sum of the values."""
        return sum(values)

    def all_reduce(self, tensors: list[Tensor]) -> None:
        """All-reduce the tensors in place."""
        pc.all_reduce(tensors)


@dataclass(frozen=True)
class ProcessRanks:
    """The `Ranks` when each rank is a process of a torch.distributed group."""

    group: dist.ProcessGroup

    def __deepcopy__(self, memo: object) -> ProcessRanks:
        return self  # a copied layer uses the same group, because a group cannot be copied

    def total(self, values: Sequence[int], device: torch.device) -> int:
        """Return the sum over the processes."""
        whole = torch.tensor(values, device=device)
        dist.all_reduce(whole, group=self.group)
        return int(whole)

    def all_reduce(self, tensors: list[Tensor]) -> None:
        """All-reduce this process's one tensor in place."""
        (mine,) = tensors
        dist.all_reduce(mine, group=self.group)


class _Moments(torch.autograd.Function):
    """Mean and biased variance of every channel of a shard; [n, C, ...] to [C] and [C].

    An empty shard has zeros for both, which autograd still records: in a backward pass over
    processes every rank must issue the same collectives.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        # batch_norm_update_stats reads only the dtype of these running statistics, which are also
        # the result for an empty shard.
        zeros = x.new_zeros(2, x.shape[1], dtype=statistics_dtype(x.dtype))
        if x.numel() == 0:
            mean, var = zeros[0], zeros[1].clone()
        else:
            mean, var = torch.batch_norm_update_stats(x, zeros[0], zeros[1], 0.0)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        if x.numel() == 0:
            return torch.zeros_like(x)
        count = x.numel() // x.shape[1]
        dx = x - per_channel(mean, x)
        dx.mul_(per_channel(d_var * (2 / count), x)).add_(per_channel(d_mean / count, x))
        return cast(Tensor, dx.to(x.dtype))


class _WholeBatchMoments(torch.autograd.Function):
    """The whole batch's mean and variance, once for each rank of this process.

    `weights` are each rank's fraction of all values; `shards` are the ranks' means, then their
    variances. The variance is the sum of the variance within the shards and of the shard means,
    which loses no digits however far the values are from zero.
    """

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, weights: Sequence[float], *shards: Tensor
    ) -> tuple[Tensor, ...]:
        own, variances = shards[: len(weights)], shards[len(weights) :]
        means = [mean * weight for mean, weight in zip(own, weights, strict=True)]
        ranks.all_reduce(means)
        spreads = [
            (var + (mean - whole).square()) * weight
            for var, mean, whole, weight in zip(variances, own, means, weights, strict=True)
        ]
        ranks.all_reduce(spreads)
        ctx.ranks, ctx.weights = ranks, weights
        ctx.save_for_backward(*own, *means)
        return *means, *spreads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        here = len(ctx.weights)
        own, means = ctx.saved_tensors[:here], ctx.saved_tensors[here:]
        totals = [torch.stack(pair) for pair in zip(grads[:here], grads[here:], strict=True)]
        ctx.ranks.all_reduce(totals)
        # The gradient of the variance by the whole mean is 0: the weighted deviations cancel.
        d_means = [
            (d_mean + 2 * (mean - whole) * d_var) * weight
            for (d_mean, d_var), mean, whole, weight in zip(
                totals, own, means, ctx.weights, strict=True
            )
        ]
        d_vars = [d_var * weight for (_, d_var), weight in zip(totals, ctx.weights, strict=True)]
        return None, None, *d_means, *d_vars


class _Normalize(torch.autograd.Function):
    """Normalisation by mean and var, times weight plus bias; differentiable in mean and var too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps = eps
        if x.numel() == 0:
            return x.clone()
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        if x.numel() == 0:
            dx, d_weight, d_bias = grad.clone(), torch.zeros_like(mean), torch.zeros_like(mean)
        else:
            dx, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
            )
        deviation = (var + ctx.eps).rsqrt()
        scale = deviation if weight is None else deviation * weight
        d_mean, d_var = -scale * d_bias, -0.5 * scale * deviation * d_weight
        has_weight, has_bias = ctx.needs_input_grad[3:5]
        return (
            dx,
            d_mean,
            d_var,
            d_weight if has_weight else None,
            d_bias if has_bias else None,
            None,
        )


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics are computed: float32 for float16 and bfloat16."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def per_channel(channels: Tensor, x: Tensor) -> Tensor:
    """Reshape one value per channel to broadcast over x of shape [n, C, ...]."""
    return channels.view(-1, *[1] * (x.dim() - 2))


def statistics(x: Tensor) -> Statistics:
    """Return the statistics of a shard; an empty shard has zeros, with weight 0."""
    mean, var = cast(Any, _Moments).apply(x)
    return Statistics(mean, var, x.numel() // x.shape[1])


def merge(shards: Sequence[Statistics], ranks: Ranks) -> list[Statistics]:
    """Combine shard statistics to the whole batch's, one result per rank of this process.

    Raises ValueError, on all ranks, for less than two values per channel over all ranks.
    """
    total = ranks.total([shard.values for shard in shards], shards[0].mean.device)
    if total < 2:
        raise ValueError(
            f"batch normalisation in training needs more than 1 value per channel over all ranks, "
            f"and there are {total}; take a larger batch, or eval()"
        )
    weights = [shard.values / total for shard in shards]
    columns = (*(shard.mean for shard in shards), *(shard.var for shard in shards))
    found = cast(Any, _WholeBatchMoments).apply(ranks, weights, *columns)
    pairs = zip(found[: len(shards)], found[len(shards) :], strict=True)
    return [Statistics(mean, var, total) for mean, var in pairs]


def normalize(
    x: Tensor, whole: Statistics, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise a shard [n, C, ...] by the whole batch's statistics; the dtype is kept."""
    weight, bias = (None if p is None else p.to(statistics_dtype(p.dtype)) for p in (weight, bias))
    return cast(Tensor, cast(Any, _Normalize).apply(x, whole.mean, whole.var, weight, bias, eps))
