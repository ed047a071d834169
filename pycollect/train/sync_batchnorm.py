"""Batch normalisation with the statistics of all ranks, weighted by their examples.

The ranks are replicas of one process, synchronised by lockstep.py, or processes of a
torch.distributed group. Outputs, gradients and running statistics are those of nn.BatchNorm on the
whole batch, see batch_statistics.py, and the running statistics have the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .batch_statistics import (
    OneProcessRanks,
    ProcessRanks,
    Statistics,
    merge,
    normalize,
    statistics,
)
from .lockstep import lockstep_exchange, lockstep_size
from .module_replication import References

_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
_merge_in_process = partial(merge, ranks=OneProcessRanks())


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d over several ranks; made by convert_sync_batchnorm.

    It takes the shapes and dtypes of the layer that it replaces, [n, channels, ...]; statistics of
    float16 and bfloat16 are float32. In training (and in evaluation without running statistics) all
    ranks must call the layer, also those without examples. Ranks of one process call it in
    ``run_lockstep``, and one torch.autograd.backward takes all their losses; processes run forward
    and backward separately. The layer can be differentiated once. Raises RuntimeError outside of a
    lockstep of its number of ranks, ValueError for less than two values per channel over all ranks.
    """

    ranks: int
    path: str
    dims: tuple[int, ...]
    processes: ProcessRanks | None  # None if all ranks are in this process

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self.dims:
            allowed = " or ".join(f"{dim}D" for dim in self.dims)
            raise ValueError(f"expected {allowed} input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [n, channels, ...]; shape and dtype are kept."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        whole = self._merged(statistics(input))
        if self.training and self.running_mean is not None:
            self._update(whole)
        return normalize(input, whole, self.weight, self.bias, self.eps)

    def _merged(self, here: Statistics) -> Statistics:
        """Return the whole batch's statistics, from those of this rank's shard."""
        if self.processes is not None:
            return merge([here], self.processes)[0]
        if self.ranks == 1:
            return _merge_in_process([here])[0]
        ranks = lockstep_size()
        if ranks != self.ranks:
            where = "outside of run_lockstep()" if ranks is None else f"in a lockstep of {ranks}"
            raise RuntimeError(
                f"{self.path}: batch normalisation over {self.ranks} ranks was called {where}; "
                f"call all {self.ranks} replicas through pycollect.train.run_lockstep"
            )
        return lockstep_exchange(here, _merge_in_process, self.path)

    @torch.no_grad()
    def _update(self, whole: Statistics) -> None:
        mean, var, seen = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None or seen is None:
            raise RuntimeError(f"{self.path}: some of the running statistics are None")
        seen.add_(1)
        factor = 1 / float(seen) if self.momentum is None else self.momentum
        mean.mul_(1 - factor).add_(whole.mean, alpha=factor)
        var.mul_(1 - factor).add_(whole.var, alpha=factor * whole.values / (whole.values - 1))

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, ranks={self.ranks}"


def convert_sync_batchnorm(
    modules: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> list[nn.Module]:
    """Replace nn.BatchNorm1d, 2d and 3d in all replicas by SyncBatchNorm layers, in place.

    ``modules`` has one replica per rank; the same modules are returned, or the new layer for a
    module that is itself a batch normalisation. With a ``group``, such as
    torch.distributed.group.WORLD, its processes are the ranks, and each passes only its own
    replica; any backend and device is supported. Parameters, buffers and hooks stay the same
    objects, so optimizers stay valid. Raises ValueError if the replicas differ or are one object,
    for several modules with a group, and for batch normalisation classes with their own forward.

    >>> convert_sync_batchnorm([nn.Sequential(nn.BatchNorm1d(2)) for _ in range(2)])[0]
    Sequential(
      (0): SyncBatchNorm(2, eps=1e-05, momentum=0.1, ranks=2)
    )
    """
    found = [dict(_layers(module)) for module in modules]
    if len({id(module) for module in modules}) != len(modules):
        raise ValueError("convert_sync_batchnorm: one module is shared by several ranks; copy it")
    for rank, layers in enumerate(found):
        if list(layers) != list(found[0]):
            raise ValueError(
                f"convert_sync_batchnorm: rank {rank} has batch normalisation at {list(layers)}, "
                f"and rank 0 at {list(found[0])}; all replicas must be alike"
            )
    ranks, processes = len(modules), None
    if group is not None:
        if ranks != 1:
            raise ValueError(
                f"convert_sync_batchnorm: {ranks} modules for one process of a group; each process "
                "passes its own replica"
            )
        ranks, processes = dist.get_world_size(group), ProcessRanks(group)
        if ranks < 1:
            raise ValueError("convert_sync_batchnorm: this process is not in the group")
    pairs = zip(modules, found, strict=True)
    return [_converted(module, layers, ranks, processes) for module, layers in pairs]


def _layers(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Return (path, layer) for every batch normalisation; ValueError for unsupported classes.

    Layers that are not registered, as those in a list, have numbers in place of paths.
    """
    named = list(module.named_modules(remove_duplicate=False))
    known = {part for _, part in named}
    others = [part for part in References(module).all_modules if part not in known]
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


def _converted(
    module: nn.Module,
    layers: dict[str, _BatchNorm],
    ranks: int,
    processes: ProcessRanks | None,
) -> nn.Module:
    made: dict[nn.Module, SyncBatchNorm] = {}
    for path, old in layers.items():
        if old not in made:
            layer = made[old] = SyncBatchNorm.__new__(SyncBatchNorm)
            layer.__dict__.update(old.__dict__)  # keep the old layer's state, hooks and mode
            layer.ranks, layer.processes = ranks, processes
            layer.path = path or "batch normalisation"
            layer.dims = next(dims for kind, dims in _DIMS.items() if isinstance(old, kind))
    new = {id(old): layer for old, layer in made.items()}
    References(module).replace(new)
    for layer in made.values():
        References(layer).replace(new)  # a layer's hooks and attributes may refer to it
    return made.get(module, module)
