"""Benchmark cases: a collective over W ranks, its buffers, calls and expected results.

A collective is one entry of a table, for ranks that are a list of tensors, members of a process
group, or of MPI. A new collective needs only an entry (and its peers, in peers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .pattern import Pattern, are_zero, count_wrong
from .report import devices_named

Call = Callable[[], object]
CPU = torch.device("cpu")
# Parameter shapes of the from-scratch LeNet of Dive into Deep Learning, in its order.
LENET = ((20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,))
# A part of an expected result: (source, start, count) means elements [start, start + count) of the
# input of rank `source`, or of the reduction if `source` is None.
Part = tuple["int | None", int, int]
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
# Newer names of these functions. If torch has them, its older names warn at every call.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


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
    of_group: bool = False  # whether the ranks are members of a group, not a list

    @property
    def spec(self) -> Collective:
        """The collective's entry in the table."""
        return COLLECTIVES[self.collective]

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
        """Whether one kernel could access all tensors, so that bus bandwidth is not defined."""
        return len(set(self.devices)) == 1 and (self.on_gpus or not self.of_group)

    @property
    def on_gpus(self) -> bool:
        """Whether every rank is on a GPU, so that GPU time can be measured."""
        return all(device.type == "cuda" for device in self.devices)

    @property
    def minimum_bytes(self) -> int:
        """Bytes that must be read and written if every rank could access every tensor."""
        return round(self.spec.buffers_moved(self.world) * self.nbytes)

    def speed(self, seconds: float) -> dict[str, float]:
        """Return the bytes per second: `moved` if the ranks share one memory, else `busbw`."""
        if self.one_memory:
            return {"moved": self.minimum_bytes / seconds}
        return {"busbw": self.nbytes * self.spec.bus_factor(self.world) / seconds}

    def about(self) -> dict[str, Any]:
        """Return the case for the record and the table."""
        return {
            "collective": self.collective,
            "dtype": str(self.dtype).removeprefix("torch."),
            "op": self.op,
            "world": self.world,
            "devices": devices_named(self.devices),
            "tensors": len(self.shapes),
            "bytes": self.nbytes,
            "count": self.count,
        }


class Buffers:
    """The tensors of one rank, one for each shape; outputs are the inputs of in-place calls."""

    def __init__(self, case: Case, rank: int, empty: Callable[..., Tensor]) -> None:
        self.case, self.rank = case, rank
        spec = case.spec
        whole = [torch.Size(shape) for shape in case.shapes]
        part = [torch.Size((shape.numel() // case.world,)) for shape in whole]

        def tensors(shapes: Sequence[torch.Size]) -> list[Tensor]:
            return [empty(shape.numel(), dtype=case.dtype).view(shape) for shape in shapes]

        self.inputs = tensors(part if spec.gathers else whole)
        self.outputs = self.inputs
        if not spec.in_place:
            self.outputs = tensors(part if spec.scatters else whole)
        self.input, self.output = self.inputs[0], self.outputs[0]  # mostly the only ones
        self.rewrite()

    def rewrite(self, value: int = 1) -> None:
        """Write every input, as a producer would."""
        for tensor in self.inputs:
            tensor.fill_(value)

    def fill(self, pattern: Pattern) -> None:
        """Write the rank's inputs of a pattern."""
        count = sum(tensor.numel() for tensor in self.inputs)
        _write(self.inputs, pattern.part(self.rank, 0, count))
        if not self.case.spec.in_place:  # the outputs are wrong before the call, in every element
            _write(self.outputs, are_zero(self._expected(pattern)))

    def wrong(self, pattern: Pattern) -> int:
        """Return the number of elements that are not the collective's result of this pattern."""
        flat = torch.cat([tensor.view(-1) for tensor in self.outputs])
        return count_wrong(flat, self._expected(pattern))

    def _expected(self, pattern: Pattern) -> Tensor:
        """Return the elements of all outputs together; none of a barrier."""
        parts = [(None, 0, 0), *self.case.spec.parts(self.case, self.rank)]
        return torch.cat([pattern.part(*part) for part in parts])


def _write(tensors: Sequence[Tensor], values: Tensor) -> None:
    """Copy the flat values to the tensors, one after the other."""
    parts = torch.split(values, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


_pattern = cache(Pattern)


def run_checked(buffers: Sequence[Buffers], call: Call, synchronize: Call) -> int:
    """Run `call` once on inputs with a known result; return the wrong elements of these ranks."""
    case = buffers[0].case
    # Collectives without a reduction can move any small integers; those of "max" vary the most.
    op = case.op if case.spec.reduces else "max"
    patterns = [_pattern(case.dtype, op, case.world, case.devices[one.rank]) for one in buffers]
    for one, pattern in zip(buffers, patterns, strict=True):
        one.fill(pattern)
    call()
    synchronize()
    return sum(one.wrong(pattern) for one, pattern in zip(buffers, patterns, strict=True))


@dataclass(frozen=True)
class Collective:
    """A collective's calls, expected result of a rank, and byte counts.

    `group` is called with the buffers of a rank and its process group, `mpi` with those, the module
    mpi4py.MPI and a datatype.
    """

    parts: Callable[[Case, int], list[Part]]
    buffers_moved: Callable[[int], float]  # world to moved bytes per byte of a rank
    bus_factor: Callable[[int], float]  # nccl-tests' ratio of bus to algorithm bandwidth
    # Bytes of a call that cross the link of the busiest host in its busier direction, at least,
    # divided by the size, for this number of hosts and ranks of a host: hosts reduce before they
    # send. None: not measured between hosts.
    link: Callable[[int, int], float] | None = None
    lists: bool = False  # whether pycollect has it on lists of tensors
    group: Callable[[Buffers, Any], Call] | None = None
    mpi: Callable[[Buffers, Any, Any], Call] | None = None
    gathers: bool = False  # a rank's input is one part of its output
    scatters: bool = False  # a rank's output is one part of its input
    in_place: bool = False
    reduces: bool = False
    rooted: bool = False  # rank 0 has the result, or all data


def _of_each(case: Case, start: int) -> list[Part]:
    return [(rank, start, case.count // case.world) for rank in range(case.world)]


def _mpi(name: str) -> Callable[[Buffers, Any, Any], Call]:
    """Return a maker of calls of this COMM_WORLD method, which takes an input and an output."""

    def make(b: Buffers, mpi: Any, of: Any) -> Call:
        method = getattr(mpi.COMM_WORLD, name)
        given = mpi.IN_PLACE if b.case.spec.in_place else [b.input.numpy(), of]
        return partial(method, given, [b.output.numpy(), of])

    return make


def _farthest(rank: int, world: int) -> tuple[int, int]:
    """Return the rank to which this one sends, half the ranks after it, and that which sends."""
    return (rank + world // 2) % world, (rank - world // 2) % world


def _send_recv(b: Buffers, group: Any) -> Call:
    to, source = _farthest(b.rank, b.case.world)

    def call() -> None:
        sent: Any = dist.isend(b.input, to, group)  # no work only for ranks outside the group
        dist.recv(b.output, source, group)
        sent.wait()

    return call


def _mpi_send_recv(b: Buffers, mpi: Any, of: Any) -> Call:
    to, source = _farthest(b.rank, b.case.world)
    output = [b.output.numpy(), of]
    return partial(mpi.COMM_WORLD.Sendrecv, [b.input.numpy(), of], to, 0, output, source)


_ALL_REDUCE = Collective(
    lists=True,
    group=lambda b, group: partial(dist.all_reduce, b.input, OPS[b.case.op], group),
    mpi=_mpi("Allreduce"),
    parts=lambda case, rank: [(None, 0, case.count)],
    buffers_moved=lambda world: 2 * world,
    bus_factor=lambda world: 2 * (world - 1) / world,
    link=lambda hosts, ranks: 2 * (hosts - 1) / hosts,
    in_place=True,
    reduces=True,
)
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _ALL_REDUCE,
    "all_reduce_coalesced": replace(_ALL_REDUCE, group=None),
    "reduce": Collective(
        lists=True,
        rooted=True,
        parts=lambda case, rank: [(rank or None, 0, case.count)],
        buffers_moved=lambda world: world + 1,
        bus_factor=lambda world: 1,
        in_place=True,
        reduces=True,
    ),
    "broadcast": Collective(
        lists=True,
        rooted=True,
        group=lambda b, group: partial(dist.broadcast, b.input, 0, group),
        mpi=lambda b, mpi, of: partial(mpi.COMM_WORLD.Bcast, [b.input.numpy(), of], 0),
        parts=lambda case, rank: [(0, 0, case.count)],
        buffers_moved=lambda world: world,
        bus_factor=lambda world: 1,
        link=lambda hosts, ranks: 1,
        in_place=True,
    ),
    "all_gather": Collective(
        lists=True,
        group=lambda b, group: partial(all_gather, b.output, b.input, group),
        mpi=_mpi("Allgather"),
        parts=lambda case, rank: _of_each(case, 0),
        buffers_moved=lambda world: world + 1,
        bus_factor=lambda world: (world - 1) / world,
        link=lambda hosts, ranks: (hosts - 1) / hosts,
        gathers=True,
    ),
    "reduce_scatter": Collective(
        lists=True,
        group=lambda b, group: partial(reduce_scatter, b.output, b.input, OPS[b.case.op], group),
        mpi=_mpi("Reduce_scatter_block"),
        parts=lambda case, rank: [
            (None, rank * (case.count // case.world), case.count // case.world)
        ],
        buffers_moved=lambda world: world + 1,
        bus_factor=lambda world: (world - 1) / world,
        link=lambda hosts, ranks: (hosts - 1) / hosts,
        scatters=True,
        reduces=True,
    ),
    "all_to_all": Collective(
        group=lambda b, group: partial(dist.all_to_all_single, b.output, b.input, group=group),
        mpi=_mpi("Alltoall"),
        parts=lambda case, rank: _of_each(case, rank * (case.count // case.world)),
        buffers_moved=lambda world: 2 * world,
        bus_factor=lambda world: (world - 1) / world,
        link=lambda hosts, ranks: ranks * (hosts - 1) / hosts,
    ),
    "send_recv": Collective(
        group=_send_recv,
        mpi=_mpi_send_recv,
        parts=lambda case, rank: [(_farthest(rank, case.world)[1], 0, case.count)],
        buffers_moved=lambda world: 2 * world,
        bus_factor=lambda world: 1,
        link=lambda hosts, ranks: ranks,
    ),
    "barrier": Collective(
        group=lambda b, group: partial(dist.barrier, group),
        mpi=lambda b, mpi, of: mpi.COMM_WORLD.Barrier,
        parts=lambda case, rank: [],
        buffers_moved=lambda world: 0,
        bus_factor=lambda world: 0,
        in_place=True,
    ),
}


def sized_case(
    collective: str,
    nbytes: int,
    dtype: torch.dtype,
    op: str,
    devices: Sequence[torch.device],
    of_group: bool = False,
) -> Case:
    """Return the case of `nbytes` per rank, rounded to whole elements and even parts.

    `devices` has one device per rank. Every part has at least one element: the smallest all_gather
    of four ranks has 16 bytes. A barrier has no bytes.

    >>> sized_case("all_gather", 4, torch.float32, "sum", [CPU] * 4).nbytes
    16
    """
    spec, world = COLLECTIVES[collective], len(devices)
    step = 1 if spec.in_place else world
    count = 0 if collective == "barrier" else max(1, nbytes // dtype.itemsize // step) * step
    op = op if spec.reduces else "none"
    return Case(collective, dtype, op, tuple(devices), ((count,),), of_group)
