"""Benchmark cases between processes: a torch.distributed collective on one rank's buffers.

A collective is one entry of a table: its call, the expected result of each rank, and the least
number of bytes to move. Cases and bandwidths are defined as for one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..cases import Call, Case
from ..pattern import Pattern, count_wrong

# Number of elements that are compared at once, to limit the memory of a comparison.
_COMPARED = 1 << 20

# A part of an expected result: (source, start, count) means elements [start, start + count) of the
# input of rank `source`, or of the reduction if `source` is None.
Part = tuple["int | None", int, int]
Empty = Callable[[int, torch.dtype], Tensor]


class ProcessCase(Case):
    """A case whose ranks are processes. Between processes bus bandwidth is defined on CPUs, too."""

    @property
    def one_memory(self) -> bool:
        """Whether one kernel could access the tensors of all ranks: true if all are on one GPU."""
        return self.on_gpus and super().one_memory

    @property
    def minimum_bytes(self) -> int:
        """Bytes that must be read and written if every rank could access every tensor."""
        return round(COLLECTIVES[self.collective].buffers_moved(self.world) * self.nbytes)

    @property
    def bus_factor(self) -> float:
        """nccl-tests' ratio of bus bandwidth to algorithm bandwidth."""
        return COLLECTIVES[self.collective].bus_factor(self.world)


class Buffers:
    """The tensors of one rank; `output` is `input` if the collective works in place."""

    def __init__(self, case: ProcessCase, rank: int, empty: Empty) -> None:
        self.case, self.rank = case, rank
        spec = COLLECTIVES[case.collective]
        part = case.count // case.world
        self.input = empty(part if spec.gathers else case.count, case.dtype)
        self.output = self.input
        if spec.gathers or not spec.in_place:
            self.output = empty(part if spec.scatters else case.count, case.dtype)
        self.rewrite()

    def rewrite(self, value: int = 1) -> None:
        """Write the input, as a producer would."""
        self.input.fill_(value)

    def wrong(self, call: Call) -> int:
        """Run `call` once on inputs with a known result; return this rank's wrong elements."""
        case, spec = self.case, COLLECTIVES[self.case.collective]
        op = case.op if spec.reduces else "max"
        pattern = Pattern(case.dtype, op, case.world, case.devices[self.rank])
        self.output.zero_()
        for start in range(0, self.input.numel(), _COMPARED):
            some = self.input[start : start + _COMPARED]
            some.copy_(pattern.rank(self.rank, some.numel(), start))
        call()
        wrong = at = 0
        for source, start, count in spec.parts(case, self.rank):
            for offset in range(0, count, _COMPARED):
                n = min(_COMPARED, count - offset)
                wanted = _piece(pattern, source, start + offset, n)
                wrong += count_wrong(self.output[at : at + n], wanted)
                at += n
        return wrong + abs(self.output.numel() - at)


def _piece(pattern: Pattern, source: int | None, start: int, count: int) -> Tensor:
    if source is None:
        return pattern.reduced(count, start)
    return pattern.rank(source, count, start)


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


@dataclass(frozen=True)
class DistCollective:
    """Calls of a collective through torch.distributed and mpi4py, its result and byte counts."""

    call: Callable[[Buffers, Any], Call]
    mpi: Callable[[Buffers, Any, Any], Call]
    parts: Callable[[Case, int], list[Part]]
    buffers_moved: Callable[[int], float]  # world to moved bytes per byte of a rank
    bus_factor: Callable[[int], float]
    gathers: bool = False  # a rank's input is one part of its output
    scatters: bool = False  # a rank's output is one part of its input
    in_place: bool = False
    reduces: bool = False


# Newer names of these functions. If torch has them, its older names warn at every call.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _op(buffers: Buffers) -> Any:
    return OPS[buffers.case.op]


def _of_each(case: Case, start: int) -> list[Part]:
    return [(rank, start, case.count // case.world) for rank in range(case.world)]


def _mpi_in_place(b: Buffers, mpi: Any, of: Any) -> Call:
    return partial(mpi.COMM_WORLD.Allreduce, mpi.IN_PLACE, [b.input.numpy(), of])


def _mpi(name: str) -> Callable[[Buffers, Any, Any], Call]:
    """Return a maker of calls of this COMM_WORLD method, which takes an input and an output."""

    def make(b: Buffers, mpi: Any, of: Any) -> Call:
        method = getattr(mpi.COMM_WORLD, name)
        return partial(method, [b.input.numpy(), of], [b.output.numpy(), of])

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


COLLECTIVES: dict[str, DistCollective] = {
    "all_reduce": DistCollective(
        call=lambda b, group: partial(dist.all_reduce, b.input, _op(b), group),
        mpi=_mpi_in_place,
        parts=lambda case, rank: [(None, 0, case.count)],
        buffers_moved=lambda world: 2 * world,
        bus_factor=lambda world: 2 * (world - 1) / world,
        in_place=True,
        reduces=True,
    ),
    "broadcast": DistCollective(
        call=lambda b, group: partial(dist.broadcast, b.input, 0, group),
        mpi=lambda b, mpi, of: partial(mpi.COMM_WORLD.Bcast, [b.input.numpy(), of], 0),
        parts=lambda case, rank: [(0, 0, case.count)],
        buffers_moved=lambda world: world,
        bus_factor=lambda world: 1,
        in_place=True,
    ),
    "all_gather_into_tensor": DistCollective(
        call=lambda b, group: partial(all_gather, b.output, b.input, group),
        mpi=_mpi("Allgather"),
        parts=lambda case, rank: _of_each(case, 0),
        buffers_moved=lambda world: world + 1,
        bus_factor=lambda world: (world - 1) / world,
        gathers=True,
    ),
    "reduce_scatter_tensor": DistCollective(
        call=lambda b, group: partial(reduce_scatter, b.output, b.input, _op(b), group),
        mpi=_mpi("Reduce_scatter_block"),
        parts=lambda case, rank: [
            (None, rank * (case.count // case.world), case.count // case.world)
        ],
        buffers_moved=lambda world: world + 1,
        bus_factor=lambda world: (world - 1) / world,
        scatters=True,
        reduces=True,
    ),
    "all_to_all_single": DistCollective(
        call=lambda b, group: partial(dist.all_to_all_single, b.output, b.input, group=group),
        mpi=_mpi("Alltoall"),
        parts=lambda case, rank: _of_each(case, rank * (case.count // case.world)),
        buffers_moved=lambda world: 2 * world,
        bus_factor=lambda world: (world - 1) / world,
    ),
    "send_recv": DistCollective(
        call=_send_recv,
        mpi=_mpi_send_recv,
        parts=lambda case, rank: [(_farthest(rank, case.world)[1], 0, case.count)],
        buffers_moved=lambda world: 2 * world,
        bus_factor=lambda world: 1,
    ),
    "barrier": DistCollective(
        call=lambda b, group: partial(dist.barrier, group),
        mpi=lambda b, mpi, of: mpi.COMM_WORLD.Barrier,
        parts=lambda case, rank: [],
        buffers_moved=lambda world: 0,
        bus_factor=lambda world: 0,
        in_place=True,
    ),
}


CPU = torch.device("cpu")


def process_case(
    collective: str, nbytes: int, dtype: torch.dtype, op: str, devices: Sequence[torch.device]
) -> ProcessCase:
    """Return the case of `nbytes` per rank, rounded to whole elements and even parts.

    `devices` has one device per rank. A part has at least one element: the smallest all_gather of
    four ranks has 16 bytes. A barrier has no bytes.

    >>> process_case("all_gather_into_tensor", 4, torch.float32, "sum", [CPU] * 4).nbytes
    16
    """
    spec, world = COLLECTIVES[collective], len(devices)
    step = 1 if spec.in_place else world
    count = 0 if collective == "barrier" else max(1, nbytes // dtype.itemsize // step) * step
    op = op if spec.reduces else "none"
    return ProcessCase(collective, dtype, op, tuple(devices), ((count,),))
