"""The linear collectives along a dimension as data, and their transposes.

Pairs of a collective and its transpose: all_gather and reduce_scatter, scatter and gather,
all_to_all and all_to_all. ``dim`` is counted from the front, so that a batch dimension in front
shifts it by one. ``lengths`` are the chunks' lengths along ``dim``, by rank. With ``mean``, a
collective and its transpose scale by 1/W for W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._in_graph import names_of
from ..collectives import Order
from .linear import Copy, Devices, Reduce, op_of, operators
from .node import LinearCollective, apply

Lengths = tuple[int, ...]


def even(length: int, world: int) -> Lengths:
    """Return the lengths of the `world` chunks into which torch.tensor_split cuts `length`."""
    return tuple((length + world - 1 - rank) // world for rank in range(world))


def _chunk(tensor: Tensor, dim: int, lengths: Lengths, rank: int) -> Tensor:
    """Return rank's chunk of the tensor along `dim`, as a view."""
    return tensor.narrow(dim, sum(lengths[:rank]), lengths[rank])


@dataclass(frozen=True)
class LinearAlongDim(LinearCollective):
    """A collective along `dim`."""

    devices: Devices
    dim: int

    def batched(self) -> LinearCollective:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True)
class AllGather(LinearAlongDim):
    """All-gather: the concatenation of all tensors, for every rank."""

    lengths: Lengths
    mean: bool = False
    algorithm: str | None = None
    order: Order = "rank"  # of its transpose

    def _scaled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, divided by the number of ranks if `mean`."""
        return [t / len(tensors) for t in tensors] if self.mean else list(tensors)

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        scaled = self._scaled(tensors)
        return list(operators.all_gather(scaled, self.dim, algorithm=self.algorithm))

    def one(self, tensors: Sequence[Tensor], rank: int) -> Tensor:
        gather = Gather(self.devices, self.dim, self.devices[rank], self.lengths)
        (result,) = apply(gather, self._scaled(tensors))
        return result

    def transposed(self) -> LinearCollective:
        return ReduceScatter(self.devices, self.dim, self.lengths, self.mean, order=self.order)


@dataclass(frozen=True)
class ReduceScatter(LinearAlongDim):
    """Reduce-scatter: one chunk of the sum or mean for each rank."""

    lengths: Lengths
    mean: bool = False
    algorithm: str | None = None
    order: Order = "rank"

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        # The collective cuts evenly; the transpose of an uneven all_gather reduces chunk by chunk.
        if self.lengths == even(sum(self.lengths), len(self.lengths)):
            op, how = op_of(self.mean), {"algorithm": self.algorithm, "order": self.order}
            return list(operators.reduce_scatter(tensors, op, self.dim, **how))
        return [self.one(tensors, rank) for rank in range(len(tensors))]

    def one(self, tensors: Sequence[Tensor], rank: int) -> Tensor:
        chunks = [_chunk(t, self.dim, self.lengths, rank) for t in tensors]
        (result,) = apply(Reduce(self.devices, rank, self.mean, order=self.order), chunks)
        return result

    def transposed(self) -> LinearCollective:
        return AllGather(self.devices, self.dim, self.lengths, self.mean, order=self.order)


@dataclass(frozen=True)
class AllToAll(LinearAlongDim):
    """All-to-all: rank i sends a chunk of length splits[i][j] along `dim` to rank j."""

    splits: tuple[Lengths, ...]

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        sizes = [size for row in self.splits for size in row]
        return list(operators.all_to_all(tensors, self.dim, sizes))

    def one(self, tensors: Sequence[Tensor], rank: int) -> Tensor:
        pairs = zip(tensors, self.splits, strict=True)
        chunks = [_chunk(t, self.dim, lengths, rank) for t, lengths in pairs]
        lengths = tuple(lengths[rank] for lengths in self.splits)
        (result,) = apply(Gather(self.devices, self.dim, self.devices[rank], lengths), chunks)
        return result

    def transposed(self) -> LinearCollective:
        return replace(self, splits=tuple(zip(*self.splits, strict=True)))


@dataclass(frozen=True)
class Scatter(LinearAlongDim):
    """Scatter: one chunk of a tensor on device `origin` for each of `devices`."""

    origin: torch.device
    lengths: Lengths

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        return list(operators.scatter(tensor, names_of(self.devices), self.lengths, self.dim))

    def one(self, tensors: Sequence[Tensor], rank: int) -> Tensor:
        (tensor,) = tensors
        chunk = _chunk(tensor, self.dim, self.lengths, rank)
        (result,) = apply(Copy(self.origin, self.devices[rank]), [chunk])
        return result

    def transposed(self) -> LinearCollective:
        return Gather(self.devices, self.dim, self.origin, self.lengths)


@dataclass(frozen=True)
class Gather(LinearAlongDim):
    """Gather: the concatenation of all tensors, on device `target`."""

    target: torch.device
    lengths: Lengths

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        return [operators.gather(tensors, self.target, self.dim)]

    def transposed(self) -> LinearCollective:
        return Scatter(self.devices, self.dim, self.target, self.lengths)
