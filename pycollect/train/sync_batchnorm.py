"""Batch normalisation with the statistics of all ranks, weighted by their examples.

Each rank takes mean and variance of its own shard with torch's kernels; the ranks meet, see
lockstep.py, and make the whole batch's of them with two small differentiable all-reduces; each rank
then normalises its shard. Outputs, gradients and running statistics are those of nn.BatchNorm on
the whole batch, and the running statistics have the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from pycollect import autograd

from .lockstep import meet, ranks_in_lockstep

_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


class _Statistics(NamedTuple):
    """Mean and biased variance of every channel, and how many values they are of."""

    mean: Tensor
    var: Tensor
    values: int


class _Moments(torch.autograd.Function):
    """Mean and biased variance of every channel of a shard; [n, C, ...] to [C] and [C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        unused = x.new_zeros(
            2, x.shape[1], dtype=_wide(x.dtype)
        )  # running ones; they set the dtype
        mean, var = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        count = x.numel() // x.shape[1]
        dx = x - _across(mean, x)
        dx.mul_(_across(d_var * (2 / count), x)).add_(_across(d_mean / count, x))
        return cast(Tensor, dx.to(x.dtype))


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, differentiable in mean and variance too."""

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
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return what statistics are computed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _across(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view(-1, *[1] * (x.dim() - 2))


def _statistics(x: Tensor) -> _Statistics:
    """Return those of a shard; a shard without examples has zeros, which weigh nothing."""
    channels = x.shape[1]
    if x.numel() == 0:
        zeros = x.new_zeros(channels, dtype=_wide(x.dtype))
        return _Statistics(zeros, zeros, 0)
    mean, var = cast(Any, _Moments).apply(x)
    return _Statistics(mean, var, x.numel() // channels)


def _merge(shards: list[_Statistics]) -> list[_Statistics]:
    """Make the whole batch's statistics of those of all shards; once for every rank.

    The variance is that within the shards and that of their means, which loses no digits however
    far the values are from zero.
    """
    total = sum(shard.values for shard in shards)
    if total < 2:
        raise ValueError(
            f"batch normalisation in training needs more than 1 value per channel over all ranks, "
            f"and there are {total}; take a larger batch, or eval()"
        )
    weights = [shard.values / total for shard in shards]
    pairs = list(zip(shards, weights, strict=True))
    means = autograd.all_reduce([shard.mean * weight for shard, weight in pairs])
    spreads = [
        (shard.var + (shard.mean - mean).square()) * weight
        for (shard, weight), mean in zip(pairs, means, strict=True)
    ]
    variances = autograd.all_reduce(spreads)
    return [_Statistics(m, v, total) for m, v in zip(means, variances, strict=True)]


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d over the ranks of this process; made by convert_sync_batchnorm.

    In training (and in evaluation, without running statistics) all ranks call it in ``lockstep``,
    ranks without examples too, and their losses go backward in one torch.autograd.backward. It can
    be differentiated once. Raises RuntimeError outside of a lockstep of its number of ranks,
    ValueError for less than two values per channel over all ranks.
    """

    ranks: int
    path: str
    dims: tuple[int, ...]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self.dims:
            allowed = " or ".join(f"{dim}D" for dim in self.dims)
            raise ValueError(f"expected {allowed} input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [n, channels, ...]; the shape and dtype stay."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        here = _statistics(input)
        whole = _merge([here])[0] if self.ranks == 1 else self._meet(here)
        if self.training and self.running_mean is not None:
            self._update(whole)
        weight, bias = (
            None if p is None else p.to(_wide(p.dtype)) for p in (self.weight, self.bias)
        )
        if here.values == 0:  # empty, but with a gradient of zeros for weight and bias
            weight, bias = (p if p is not None else here.mean for p in (weight, bias))
            return (input * _across(weight, input) + _across(bias, input)).to(input.dtype)
        normalize = cast(Any, _Normalize).apply
        return cast(Tensor, normalize(input, whole.mean, whole.var, weight, bias, self.eps))

    def _meet(self, here: _Statistics) -> _Statistics:
        ranks = ranks_in_lockstep()
        if ranks != self.ranks:
            where = "outside of lockstep()" if ranks is None else f"in a lockstep of {ranks}"
            raise RuntimeError(
                f"{self.path}: batch normalisation over {self.ranks} ranks was called {where}; "
                f"call all {self.ranks} replicas through pycollect.train.lockstep"
            )
        return meet(here, _merge, self.path)

    @torch.no_grad()
    def _update(self, whole: _Statistics) -> None:
        mean, var, seen = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None or seen is None:
            raise RuntimeError(f"{self.path}: some of the running statistics were taken away")
        seen.add_(1)
        factor = 1 / float(seen) if self.momentum is None else self.momentum
        mean.mul_(1 - factor).add_(whole.mean, alpha=factor)
        var.mul_(1 - factor).add_(whole.var, alpha=factor * whole.values / (whole.values - 1))

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, ranks={self.ranks}"


def convert_sync_batchnorm(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Replace nn.BatchNorm1d, 2d and 3d in all replicas by layers over all of them, in place.

    ``modules`` has one replica per rank; returned are the same, or the new layer for one that is
    itself a batch normalisation. Parameters, buffers and hooks stay the same objects, so optimizers
    stay valid. Raises ValueError when the replicas differ or are one object, and for kinds of batch
    normalisation with a forward of their own.

    >>> convert_sync_batchnorm([nn.Sequential(nn.BatchNorm1d(2)) for _ in range(2)])[0]
    Sequential(
      (0): SyncBatchNorm(2, eps=1e-05, momentum=0.1, ranks=2)
    )
    """
    found = [dict(_layers(module)) for module in modules]
    if len({id(module) for module in modules}) != len(modules):
        raise ValueError("convert_sync_batchnorm: one module stands for several ranks; copy it")
    for rank, layers in enumerate(found):
        if list(layers) != list(found[0]):
            raise ValueError(
                f"convert_sync_batchnorm: rank {rank} has batch normalisation at {list(layers)}, "
                f"and rank 0 at {list(found[0])}; all replicas must be alike"
            )
    return [_converted(m, layers, len(modules)) for m, layers in zip(modules, found, strict=True)]


def _layers(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Return all places of batch normalisation, of shared layers too; refuse unknown kinds."""
    layers = [
        (name, layer)
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
    ]
    for name, layer in layers:
        if type(layer).forward is not _BatchNorm.forward or not isinstance(layer, tuple(_DIMS)):
            raise ValueError(
                f"convert_sync_batchnorm: {name or 'the module'} is a {type(layer).__name__}; only "
                "nn.BatchNorm1d, 2d and 3d are taken over all ranks"
            )
    return layers


def _converted(module: nn.Module, layers: dict[str, _BatchNorm], ranks: int) -> nn.Module:
    made: dict[_BatchNorm, SyncBatchNorm] = {}
    for path, old in layers.items():
        if old not in made:
            layer = SyncBatchNorm.__new__(SyncBatchNorm)
            layer.__dict__.update(old.__dict__)  # everything of the old one: state, hooks, mode
            layer.ranks, layer.path = ranks, path or "batch normalisation"
            layer.dims = next(dims for kind, dims in _DIMS.items() if isinstance(old, kind))
            made[old] = layer
        if not path:
            return made[old]
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, made[old])
    return module
