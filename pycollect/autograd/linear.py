"""The linear collectives of whole tensors as data, and their transposes.

Pairs of a collective and its transpose: all_reduce and all_reduce, broadcast and reduce, copy and
copy, replicate and total. With ``mean``, a collective and its transpose scale by 1/W for W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._in_graph import names_of
from ..collectives import Order
from .node import LinearCollective, apply

Devices = tuple[torch.device, ...]
operators = torch.ops.pycollect


def op_of(mean: bool) -> str:
    """Return the op of a collective: "avg" for a mean, else "sum"."""
    return "avg" if mean else "sum"


@dataclass(frozen=True)
class AllReduce(LinearCollective):
    """All-reduce: the sum or mean, for every rank."""

    devices: Devices
    mean: bool
    algorithm: str | None = None
    order: Order = "rank"

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        how = {"algorithm": self.algorithm, "order": self.order}
        return list(operators.all_reduce(tensors, op_of(self.mean), **how))

    def some(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Reduce to the first rank whose `wanted` is True, and copy its result to the others."""
        first = list(wanted).index(True)
        (total,) = apply(Reduce(self.devices, first, self.mean, order=self.order), tensors)
        results: list[Tensor | None] = [None] * len(wanted)
        results[first] = total
        for rank in range(first + 1, len(wanted)):
            if wanted[rank]:
                (results[rank],) = apply(Copy(total.device, self.devices[rank]), [total])
        return results

    def transposed(self) -> LinearCollective:
        return self


@dataclass(frozen=True)
class Reduce(LinearCollective):
    """Reduce: the sum or mean, on rank `dst`."""

    devices: Devices
    dst: int
    mean: bool
    algorithm: str | None = None
    order: Order = "rank"

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        how = {"algorithm": self.algorithm, "order": self.order}
        return [operators.reduce(tensors, self.dst, op_of(self.mean), **how)]

    def transposed(self) -> LinearCollective:
        return Broadcast(self.devices, self.dst, self.mean, order=self.order)


@dataclass(frozen=True)
class Broadcast(LinearCollective):
    """Broadcast: copies of rank `src`'s tensor, the only input, for every rank."""

    devices: Devices
    src: int
    mean: bool = False
    algorithm: str | None = None
    order: Order = "rank"  # of its transpose

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        source = tensor / len(self.devices) if self.mean else tensor.clone()
        buffers = [torch.empty_like(source, device=device) for device in self.devices]
        buffers[self.src] = source
        operators.broadcast_(buffers, self.src, algorithm=self.algorithm)
        return buffers

    def one(self, tensors: Sequence[Tensor], rank: int) -> Tensor:
        (tensor,) = tensors
        source = tensor / len(self.devices) if self.mean else tensor
        (result,) = apply(Copy(tensor.device, self.devices[rank]), [source])
        return result

    def transposed(self) -> LinearCollective:
        return Reduce(self.devices, self.src, self.mean, order=self.order)


@dataclass(frozen=True)
class Copy(LinearCollective):
    """Copy: a copy of each tensor on device `target`; the tensors are on device `origin`."""

    origin: torch.device
    target: torch.device

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        return [operators.copy(t, self.target) for t in tensors]

    def transposed(self) -> LinearCollective:
        return Copy(self.target, self.origin)


@dataclass(frozen=True)
class Replicate(LinearCollective):
    """Replicate: a copy of every tensor for each rank, on `devices[rank]`.

    Tensor i is on device `origins[i]`. Its copy for a rank is result[i * len(devices) + rank].
    """

    devices: Devices
    origins: Devices

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(operators.replicate(tensors, names_of(self.devices)))

    def transposed(self) -> LinearCollective:
        return Total(self.devices, self.origins)

    def reached(self, given: Sequence[bool], tensors: int) -> list[bool]:
        """Return for each tensor whether one of its copies has a gradient."""
        world = len(self.devices)
        return [any(given[i * world : (i + 1) * world]) for i in range(tensors)]


@dataclass(frozen=True)
class Total(LinearCollective):
    """Transpose of Replicate: the sum over the ranks of each of many tensors.

    Tensor i of a rank is input[i * len(devices) + rank]. Its sum is on device `origins[i]`.
    """

    devices: Devices
    origins: Devices

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        world = len(self.devices)
        return [
            self._total(tensors[i * world : (i + 1) * world], origin)
            for i, origin in enumerate(self.origins)
        ]

    def _total(self, tensors: list[Tensor], origin: torch.device) -> Tensor:
        dst = self.devices.index(origin) if origin in self.devices else 0
        total: Tensor = operators.reduce(tensors, dst)
        return total if total.device == origin else operators.copy(total, origin)

    def some(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Compute the sums whose `wanted` is True in one autograd node; None for the others."""
        chosen = [i for i, want in enumerate(wanted) if want]
        world = len(self.devices)
        flat = [t for i in chosen for t in tensors[i * world : (i + 1) * world]]
        found = iter(apply(Total(self.devices, tuple(self.origins[i] for i in chosen)), flat))
        return [next(found) if want else None for want in wanted]

    def transposed(self) -> LinearCollective:
        return Replicate(self.devices, self.origins)


@dataclass(frozen=True)
class TreeSum(LinearCollective):
    """The sum of `parts` tensors of one device and dtype, as a tensor of dtype `result`."""

    parts: int
    dtype: torch.dtype
    result: torch.dtype

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        return [operators.tree_sum(tensors, dtype=self.result)]

    def transposed(self) -> LinearCollective:
        return Spread(self.parts, self.dtype, self.result)


@dataclass(frozen=True)
class Spread(LinearCollective):
    """Transpose of TreeSum: copies of a tensor of dtype `result`, as tensors of `dtype`."""

    parts: int
    dtype: torch.dtype
    result: torch.dtype

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        return [tensor.to(self.dtype, copy=True) for _ in range(self.parts)]

    def one(self, tensors: Sequence[Tensor], rank: int) -> Tensor:
        (tensor,) = tensors
        return tensor.to(self.dtype)

    def transposed(self) -> LinearCollective:
        return TreeSum(self.parts, self.dtype, self.result)
