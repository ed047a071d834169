"""Benchmark cases of one process: a collective over W ranks, its buffers and expected results.

A collective is one entry of a table: its call, the least number of bytes to move, and the expected
result of each rank. A new collective needs only an entry (and its peers, in baselines.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pycollect

from .gpu import synchronizer
from .pattern import Pattern, count_wrong

Call = Callable[[], object]

# Parameter shapes of the from-scratch LeNet of Dive into Deep Learning, in its order.
LENET = ((20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,))


@dataclass(frozen=True)
class Case:
    """One collective on one set of buffers.

    `shapes` has the shapes of a rank's tensors: one unless the call is coalesced. `count` is the
    number of elements of the largest buffer of one rank (all tensors together), as in nccl-tests.
    """

    collective: str
    dtype: torch.dtype
    op: str
    devices: tuple[torch.device, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def count(self) -> int:
        """Elements per rank."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes per rank."""
        return self.count * self.dtype.itemsize

    @property
    def one_memory(self) -> bool:
        """Whether all ranks are on one device, where bus bandwidth is not defined."""
        return len(set(self.devices)) == 1

    @property
    def on_gpus(self) -> bool:
        """Whether every rank is on a GPU, so that GPU time can be measured."""
        return all(device.type == "cuda" for device in self.devices)

    @property
    def minimum_bytes(self) -> int:
        """Bytes that must be read and written when all ranks share one memory."""
        return round(COLLECTIVES[self.collective].buffers_moved(self.world) * self.nbytes)

    @property
    def bus_factor(self) -> float:
        """nccl-tests' ratio of bus bandwidth to algorithm bandwidth."""
        return COLLECTIVES[self.collective].bus_factor(self.world)


class Workspace:
    """The buffers of a case, shared by all candidates that are measured on it.

    `inputs[rank][i]` are the inputs; `results[rank][i]` are the expected outputs, which are the
    inputs of in-place calls. `raw` is the same memory as float32, for the limit.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.synchronize = case, synchronizer(case.devices)
        spec = COLLECTIVES[case.collective]
        whole = [torch.Size(shape) for shape in case.shapes]
        part = [torch.Size((shape.numel() // case.world,)) for shape in whole]
        self.raw: list[Tensor] = []
        self.inputs = self._allocate(part if spec.gathers else whole)
        self.results = self.inputs
        if spec.gathers:
            self.results = self._allocate(whole)
        elif spec.scatters:
            self.results = self._allocate(part)

    def _allocate(self, shapes: list[torch.Size]) -> list[list[Tensor]]:
        return [[self._tensor(shape, device) for shape in shapes] for device in self.case.devices]

    def _tensor(self, shape: torch.Size, device: torch.device) -> Tensor:
        nbytes = shape.numel() * self.case.dtype.itemsize
        self.raw.append(torch.ones(-(-nbytes // 4), device=device))
        flat = self.raw[-1].view(torch.uint8)[:nbytes].view(self.case.dtype)
        return flat.view(shape)

    @property
    def columns(self) -> list[list[Tensor]]:
        """For each tensor index, the list of that tensor on every rank."""
        return [list(column) for column in zip(*self.inputs, strict=True)]

    @property
    def firsts(self) -> list[Tensor]:
        """The first (mostly the only) input of each rank."""
        return [tensors[0] for tensors in self.inputs]

    @property
    def outputs(self) -> list[Tensor]:
        """The first (mostly the only) result of each rank."""
        return [tensors[0] for tensors in self.results]

    @property
    def read_write_bytes(self) -> int:
        """Bytes moved when all of the memory is read and written once."""
        return 2 * sum(tensor.numel() * tensor.itemsize for tensor in self.raw)

    def rewrite(self, value: int = 1) -> None:
        """Write every input, as a producer would."""
        for tensors in self.inputs:
            for tensor in tensors:
                tensor.fill_(value)

    def rewrite_raw(self) -> None:
        """Fill all memory with float32 ones, so that the limit multiplies no denormal numbers."""
        for tensor in self.raw:
            tensor.fill_(1.0)

    def wrong(self, call: Call) -> int:
        """Run `call` once on inputs with a known result; return the number of wrong elements."""
        case = self.case
        spec = COLLECTIVES[case.collective]
        # Collectives without a reduction can move any small integers; those of "max" vary the most.
        pattern = Pattern(
            case.dtype, case.op if spec.reduces else "max", case.world, case.devices[0]
        )
        for tensors in self.results:
            for tensor in tensors:
                tensor.zero_()
        for rank, tensors in enumerate(self.inputs):
            for start, tensor in _starts(tensors):
                tensor.view(-1).copy_(pattern.rank(rank, tensor.numel(), start))
        call()
        self.synchronize()
        return sum(
            count_wrong(tensor, spec.expected(pattern, rank, tensor.numel(), start))
            for rank, tensors in enumerate(self.results)
            for start, tensor in _starts(tensors)
        )


def _starts(tensors: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield each of a rank's tensors with its start in the pattern."""
    start = 0
    for tensor in tensors:
        yield start, tensor
        start += tensor.numel()


@dataclass(frozen=True)
class Collective:
    """Call, expected result and byte counts of a collective.

    `expected(pattern, rank, count, start)` returns a flat tensor.
    """

    call: Callable[[Workspace, dict[str, Any]], Call]
    expected: Callable[[Pattern, int, int, int], Tensor]
    buffers_moved: Callable[[int], float]  # world to moved bytes per byte of a rank, on one memory
    bus_factor: Callable[[int], float]
    gathers: bool = False  # a rank's input is one part of its output
    scatters: bool = False  # a rank's output is one part of its input
    reduces: bool = True


def _reduced(pattern: Pattern, rank: int, count: int, start: int) -> Tensor:
    return pattern.reduced(count, start)


def _first_reduced(pattern: Pattern, rank: int, count: int, start: int) -> Tensor:
    return pattern.rank(rank, count, start) if rank else pattern.reduced(count, start)


def _firsts(pattern: Pattern, rank: int, count: int, start: int) -> Tensor:
    return pattern.rank(0, count, start)


def _gathered(pattern: Pattern, rank: int, count: int, start: int) -> Tensor:
    part = count // pattern.world
    return torch.cat([pattern.rank(r, part) for r in range(pattern.world)])


def _scattered(pattern: Pattern, rank: int, count: int, start: int) -> Tensor:
    return pattern.reduced(count, rank * count)


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        call=lambda w, how: partial(pycollect.all_reduce, w.firsts, w.case.op, **how),
        expected=_reduced,
        buffers_moved=lambda world: 2 * world,
        bus_factor=lambda world: 2 * (world - 1) / world,
    ),
    "all_reduce_coalesced": Collective(
        call=lambda w, how: partial(pycollect.all_reduce_coalesced, w.inputs, w.case.op, **how),
        expected=_reduced,
        buffers_moved=lambda world: 2 * world,
        bus_factor=lambda world: 2 * (world - 1) / world,
    ),
    "reduce": Collective(
        call=lambda w, how: partial(pycollect.reduce, w.firsts, 0, w.case.op, **how),
        expected=_first_reduced,
        buffers_moved=lambda world: world + 1,
        bus_factor=lambda world: 1,
    ),
    "broadcast": Collective(
        call=lambda w, how: partial(pycollect.broadcast, w.firsts, 0, **how),
        expected=_firsts,
        buffers_moved=lambda world: world,
        bus_factor=lambda world: 1,
        reduces=False,
    ),
    "all_gather": Collective(
        call=lambda w, how: partial(pycollect.all_gather, w.firsts, out=w.outputs, **how),
        expected=_gathered,
        buffers_moved=lambda world: world + 1,
        bus_factor=lambda world: (world - 1) / world,
        gathers=True,
        reduces=False,
    ),
    "reduce_scatter": Collective(
        call=lambda w, how: partial(
            pycollect.reduce_scatter, w.firsts, w.case.op, out=w.outputs, **how
        ),
        expected=_scattered,
        buffers_moved=lambda world: world + 1,
        bus_factor=lambda world: (world - 1) / world,
        scatters=True,
    ),
}


def sized_case(
    collective: str, nbytes: int, dtype: torch.dtype, op: str, devices: tuple[torch.device, ...]
) -> Case:
    """Return the case of `nbytes` per rank, rounded down to whole elements and even parts.

    >>> sized_case("all_reduce", 10, torch.float32, "sum", (torch.device("cpu"),) * 2).count
    2
    """
    spec = COLLECTIVES[collective]
    step = len(devices) if spec.gathers or spec.scatters else 1
    count = nbytes // dtype.itemsize // step * step
    if not count:
        raise ValueError(
            f"{nbytes} bytes hold no {dtype} for each of {len(devices)} ranks of {collective}; "
            f"begin with at least {step * dtype.itemsize} bytes"
        )
    return Case(collective, dtype, op if spec.reduces else "none", devices, ((count,),))
