"""Batch normalisation with the statistics of all ranks of a torch.distributed group.

Each rank computes the statistics of its own shard with torch's kernels. Three small all-reduces
(number of values, weighted means, weighted spreads) combine them for the whole batch; the backward
pass needs one. Outputs, gradients and running statistics are those of nn.BatchNorm on the whole
batch, and the running statistics have the same bits on every rank. Over a backend that adds in rank
order the bits do not depend on whether the ranks are processes or threads.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from .shallow_replica import ModuleReferences

Group = dist.ProcessGroup | None  # None: the default group
_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


class Statistics(NamedTuple):
    """Mean and biased variance of every channel, and the number of values per channel."""

    mean: Tensor
    var: Tensor
    values: int


class _Moments(torch.autograd.Function):
    """Mean and biased variance of every channel of a shard; [n, C, ...] to [C] and [C].

    An empty shard has zeros for both, which autograd still records: in a backward pass over
    processes every rank must issue the same collectives.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        # batch_norm_update_stats reads only the dtype of these running statistics, which are also
        # the result for an empty shard.
        zeros = x.new_zeros(2, x.shape[1], dtype=_statistics_dtype(x.dtype))
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
        dx = x - _per_channel(mean, x)
        dx.mul_(_per_channel(d_var * (2 / count), x)).add_(_per_channel(d_mean / count, x))
        return cast(Tensor, dx.to(x.dtype))


class _WholeBatchMoments(torch.autograd.Function):
    """The whole batch's mean and variance, from those of a shard with this fraction of its values.

    The variance is the sum of the variance within the shards and of the shard means, which loses no
    digits however far the values are from zero.
    """

    @staticmethod
    def forward(
        ctx: Any, group: Group, weight: float, mean: Tensor, var: Tensor
    ) -> tuple[Tensor, Tensor]:
        whole = mean * weight
        dist.all_reduce(whole, group=group)
        spread = (var + (mean - whole).square()) * weight
        dist.all_reduce(spread, group=group)
        ctx.group, ctx.weight = group, weight
        ctx.save_for_backward(mean, whole)
        return whole, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mean, whole = ctx.saved_tensors
        totals = torch.stack(grads)
        dist.all_reduce(totals, group=ctx.group)
        d_mean, d_var = totals
        # The gradient of the variance by the whole mean is 0: the weighted deviations cancel.
        d_mean = (d_mean + 2 * (mean - whole) * d_var) * ctx.weight
        return None, None, d_mean, d_var * ctx.weight


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
        d_affine = d_weight if has_weight else None, d_bias if has_bias else None
        return dx, d_mean, d_var, *d_affine, None


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics are computed: float32 for float16 and bfloat16."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _per_channel(channels: Tensor, x: Tensor) -> Tensor:
    """Reshape one value per channel to broadcast over x of shape [n, C, ...]."""
    return channels.view(-1, *[1] * (x.dim() - 2))


def _whole_batch(x: Tensor, group: Group) -> Statistics:
    """Return the statistics of the whole batch, of which x [n, C, ...] is this rank's shard.

    Raises ValueError, on all ranks, for less than two values per channel over all ranks.
    """
    mean, var = cast(Any, _Moments).apply(x)
    values = x.numel() // x.shape[1]
    counts = torch.tensor([values], device=x.device)
    dist.all_reduce(counts, group=group)
    total = int(counts)
    if total < 2:
        raise ValueError(
            f"batch normalisation in training needs more than 1 value per channel over all ranks, "
            f"and there are {total}; take a larger batch, or eval()"
        )
    mean, var = cast(Any, _WholeBatchMoments).apply(group, values / total, mean, var)
    return Statistics(mean, var, total)


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d over the ranks of a group; made by convert_sync_batchnorm.

    It takes the shapes and dtypes of the layer that it replaces, [n, channels, ...]; statistics of
    float16 and bfloat16 are float32. In training (and in evaluation without running statistics) all
    ranks must call the layer, also those without examples, and run the backward pass. It can be
    differentiated once. Raises ValueError for less than two values per channel over all ranks.
    """

    ranks: int
    group: Group
    path: str
    dims: tuple[int, ...]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self.dims:
            allowed = " or ".join(f"{dim}D" for dim in self.dims)
            raise ValueError(f"expected {allowed} input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [n, channels, ...]; shape and dtype are kept."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        if not dist.is_initialized() or dist.get_world_size(self.group) != self.ranks:
            raise RuntimeError(
                f"{self.path}: batch normalisation over {self.ranks} ranks needs their group; call "
                "it in processes or threads of one, or after eval()"
            )
        whole = _whole_batch(input, self.group)
        if self.training and self.running_mean is not None:
            self._update(whole)
        affine = (
            None if p is None else p.to(_statistics_dtype(p.dtype))
            for p in (self.weight, self.bias)
        )
        normalized = cast(Any, _Normalize).apply(input, whole.mean, whole.var, *affine, self.eps)
        return cast(Tensor, normalized)

    @torch.no_grad()
    def _update(self, whole: Statistics) -> None:
        mean, var, seen = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None or seen is None:
            raise RuntimeError(f"{self.path}: some of the running statistics are None")
        seen.add_(1)
        factor = 1 / float(seen) if self.momentum is None else self.momentum
        mean.mul_(1 - factor).add_(whole.mean, alpha=factor)
        var.mul_(1 - factor).add_(whole.var, alpha=factor * whole.values / (whole.values - 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.group)] = self.group  # a group cannot be copied
        new = memo[id(self)] = self.__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, ranks={self.ranks}"


def convert_sync_batchnorm(module: nn.Module, group: Group = None) -> nn.Module:
    """Turn nn.BatchNorm1d, 2d and 3d in a module into SyncBatchNorm layers; return the module.

    The ranks are those of ``group``, processes or threads, by default of the default group; each
    converts its own replica. Any backend and device is supported. Layers get another class and stay
    the same objects, and so do their parameters, buffers and hooks. Raises ValueError outside of
    the group, and for batch normalisation classes with their own forward.

    >>> from pycollect import threads
    >>> def convert(rank, world):
    ...     return convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)))
    >>> threads.launch(convert, 2)[0]
    Sequential(
      (0): SyncBatchNorm(2, eps=1e-05, momentum=0.1, ranks=2)
    )
    """
    layers = _layers(module)
    ranks = dist.get_world_size(group)
    if ranks < 1:
        raise ValueError("convert_sync_batchnorm: this process is not in the group")
    for path, found in layers:
        if not isinstance(found, SyncBatchNorm):  # it may have several paths
            layer: Any = found
            dims = next(dims for kind, dims in _DIMS.items() if isinstance(layer, kind))
            layer.__class__ = SyncBatchNorm
            layer.ranks, layer.group = ranks, None if group is dist.group.WORLD else group
            layer.path, layer.dims = path or "batch normalisation", dims
    return module


def _layers(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Return (path, layer) for every batch normalisation; ValueError for unsupported classes.

    Layers that are not registered, as those in a list, have numbers in place of paths.
    """
    named = list(module.named_modules(remove_duplicate=False))
    known = {part for _, part in named}
    others = [part for part in ModuleReferences(module).all_modules if part not in known]
    named += [(f"(unregistered {i})", part) for i, part in enumerate(others)]
    layers = [
        (name, layer)
        for name, layer in named
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
    ]
    for name, layer in layers:
        own = type(layer).forward is not _BatchNorm.forward or "forward" in vars(layer)
        if own or not isinstance(layer, tuple(_DIMS)):
            replaced = " with another forward" if "forward" in vars(layer) else ""
            kind = f"{type(layer).__name__}{replaced}"
            raise ValueError(
                f"convert_sync_batchnorm: {name or 'the module'} is a {kind}; only nn.BatchNorm1d, "
                "2d and 3d are taken over all ranks"
            )
    return layers
