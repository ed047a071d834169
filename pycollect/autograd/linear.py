"""The linear collectives of whole tensors as data, and their transposes.

Pairs of a collective and its transpose: all_reduce and all_reduce, broadcast and reduce, copy and
copy, replicate and total. With ``mean``, a collective and its transpose scale by 1/W for W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import collectives
from .node import LinearCollective, apply

Devices = tuple[torch.device, ...]


def alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with equal strides, which collectives in place require.

    Tensors that are dense with equal strides are returned themselves, others as contiguous tensors.
    """
    strides = tensors[0].stride()
    if all(t.stride() == strides == torch.empty_like(t, device="meta").stride() for t in tensors):
        return list(tensors)
    return [t.contiguous() for t in tensors]


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of the tensor on `device`, not recorded by autograd."""
    copy = torch.empty_like(tensor, device=device)
    collectives.copy_(copy, tensor)
    return copy


def op_of(mean: bool) -> str:
    """Return the op of a collective: "avg" for a mean, else "sum"."""
    return "avg" if mean else "sum"


def _summed(tensors: Sequence[Tensor], dst: int, mean: bool, algorithm: str | None) -> Tensor:
    """Return the sum or mean of the tensors in new memory, on the device of ``tensors[dst]``."""
    buffers = alike(tensors)
    buffers[dst] = buffers[dst].clone()
    collectives.reduce(buffers, dst, op_of(mean), algorithm=algorithm)
    return buffers[dst]


@dataclass(frozen=True)
class AllReduce(LinearCollective):
    """All-reduce: the sum or mean, for every rank."""

    devices: Devices
    mean: bool
    algorithm: str | None = None

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        buffers = [t.clone() for t in alike(tensors)]
        collectives.all_reduce(buffers, op_of(self.mean), algorithm=self.algorithm)
        return buffers

    def some(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Reduce to the first rank whose `wanted` is True, and copy its result to the others."""
        first = list(wanted).index(True)
        (total,) = apply(Reduce(self.devices, first, self.mean), tensors)
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

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        return [_summed(tensors, self.dst, self.mean, self.algorithm)]

    def transposed(self) -> LinearCollective:
        return Broadcast(self.devices, self.dst, self.mean)


@dataclass(frozen=True)
class Broadcast(LinearCollective):
    """Broadcast: copies of rank `src`'s tensor, the only input, for every rank."""

    devices: Devices
    src: int
    mean: bool = False
    algorithm: str | None = None

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        source = tensor / len(self.devices) if self.mean else tensor.clone()
        buffers = [torch.empty_like(source, device=device) for device in self.devices]
        buffers[self.src] = source
        collectives.broadcast(buffers, self.src, algorithm=self.algorithm)
        return buffers

    def one(self, tensors: Sequence[Tensor], rank: int) -> Tensor:
        (tensor,) = tensors
        source = tensor / len(self.devices) if self.mean else tensor
        (result,) = apply(Copy(tensor.device, self.devices[rank]), [source])
        return result

    def transposed(self) -> LinearCollective:
        return Reduce(self.devices, self.src, self.mean)


@dataclass(frozen=True)
class Copy(LinearCollective):
    """Copy: a copy of each tensor on device `target`; the tensors are on device `origin`."""

    origin: torch.device
    target: torch.device

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        return [copied(t, self.target) for t in tensors]

    def transposed(self) -> LinearCollective:
        return Copy(self.target, self.origin)


@dataclass(frozen=True)
class Replicate(LinearCollective):
    """Replicate: a copy of every tensor for each rank, on `devices[rank]`.

    Tensor i is on device `origins[i]`. Its copy for a rank is result[rank * len(origins) + i].
    """

    devices: Devices
    origins: Devices

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        ranks = collectives.replicate(tensors, self.devices)
        return [t for rank in ranks for t in rank]

    def transposed(self) -> LinearCollective:
        return Total(self.devices, self.origins)

    def reached(self, given: Sequence[bool], tensors: int) -> list[bool]:
        """Return for each tensor whether one of its copies has a gradient."""
        return [any(given[i::tensors]) for i in range(tensors)]


@dataclass(frozen=True)
class Total(LinearCollective):
    """Transpose of Replicate: the sum over the ranks of each of many tensors.

    Tensor i of a rank is input[rank * len(origins) + i]. Its sum is on device `origins[i]`.
    """

    devices: Devices
    origins: Devices

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        return [
            self._total(tensors[i :: len(self.origins)], origin)
            for i, origin in enumerate(self.origins)
        ]

    def _total(self, tensors: list[Tensor], origin: torch.device) -> Tensor:
        dst = self.devices.index(origin) if origin in self.devices else 0
        total = _summed(tensors, dst, mean=False, algorithm=None)
        return total if total.device == origin else copied(total, origin)

    def some(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Compute the sums whose `wanted` is True in one autograd node; None for the others."""
        chosen = [i for i, want in enumerate(wanted) if want]
        flat = [tensors[at + i] for at in range(0, len(tensors), len(wanted)) for i in chosen]
        found = iter(apply(Total(self.devices, tuple(self.origins[i] for i in chosen)), flat))
        return [next(found) if want else None for want in wanted]

    def transposed(self) -> LinearCollective:
        return Replicate(self.devices, self.origins)
