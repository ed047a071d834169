"""Speed targets of the torch.distributed backend, and their check against a run.

Every target is a ratio to a peer of the same run. bench/executor_bandwidth.py checks the targets of
the executor alone against MPI's own calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pycollect._sizes import binary_size

from ..comparison import CaseResult, Row
from ..targets import KIB, MIB, Outcome, Target
from .groups import GLOO, MPI, OURS, ZERO_COPY

# Sizes in bytes of the targets of other collectives than all_reduce: one element per part, 1 MiB.
LEAST, OTHERS = 4, 1 * MIB
_Applies = Callable[[CaseResult], bool]


def _sums(worlds: Sequence[int], begin: int = 1, end: int | None = None) -> _Applies:
    """Select float32 sum all-reduces of these worlds (empty: any), of `begin` to `end` bytes."""

    def applies(result: CaseResult) -> bool:
        case = result.case
        return (
            (case.collective, case.dtype, case.op) == ("all_reduce", torch.float32, "sum")
            and (case.world in worlds if worlds else case.world > 1)
            and begin <= case.nbytes <= (end or case.nbytes)
        )

    return applies


def _other(collective: str, large: bool) -> _Applies:
    def applies(result: CaseResult) -> bool:
        case = result.case
        small = case.nbytes <= LEAST * case.world
        return (
            case.collective == collective
            and case.world in (2, 4)
            and (case.nbytes == OTHERS if large else small)
        )

    return applies


def _many(result: CaseResult) -> bool:
    return result.case.world in (8, 16)


def _to_gloo(row: Row) -> float | None:
    return row.times_faster_than(GLOO)


def _to_mpi(row: Row) -> float | None:
    return row.times_faster_than(MPI)


def _versus_gloo(world: int, spans: Sequence[tuple[str, float, int, int]]) -> list[Target]:
    return [
        Target(f"gloo, {world} ranks, {name}", wanted, _sums((world,), begin, end), _to_gloo, OURS)
        for name, wanted, begin, end in spans
    ]


_TARGETS = (
    *_versus_gloo(
        2,
        (
            ("to 1 KiB", 40, 1, KIB),
            ("at 64 KiB", 30, 64 * KIB, 64 * KIB),
            ("at 1 MiB", 8, MIB, MIB),
            ("at 16 MiB", 6, 16 * MIB, 16 * MIB),
            ("at 128 MiB", 4, 128 * MIB, 128 * MIB),
        ),
    ),
    *_versus_gloo(
        4,
        (
            ("to 64 KiB", 150, 1, 64 * KIB),
            ("at 1 MiB", 15, MIB, MIB),
            ("at 16 MiB", 5, 16 * MIB, 16 * MIB),
            ("at 128 MiB", 4, 128 * MIB, 128 * MIB),
        ),
    ),
    Target("gloo, 8 and 16 ranks, everything", 1, _many, _to_gloo, OURS),
    *(
        Target(f"gloo, {name}, {size}", 5, _other(name, size == "1 MiB"), _to_gloo, OURS)
        for name, sizes in (
            ("broadcast", ("4 B", "1 MiB")),
            ("all_gather_into_tensor", ("4 B a rank", "1 MiB")),
            ("reduce_scatter_tensor", ("4 B a rank", "1 MiB")),
            ("all_to_all_single", ("4 B a rank", "1 MiB")),
            ("barrier", ("no bytes",)),
        )
        for size in sizes
    ),
    Target("Open MPI, from 64 KiB", 1, _sums((), 64 * KIB), _to_mpi, OURS),
    Target("Open MPI, zero-copy, from 1 MiB", 2.5, _sums((), MIB), _to_mpi, ZERO_COPY),
)


def _elements_a_second(results: Sequence[CaseResult], dtype: torch.dtype) -> dict[int, float]:
    """Return elements per second of all_reduce of 1 MiB, by world."""
    found = {}
    for result in results:
        case, row = result.case, result.row(OURS)
        kind = (case.collective, case.dtype, case.op, case.nbytes)
        if row and kind == ("all_reduce", dtype, "sum", MIB):
            found[case.world] = case.count / row.timing.percentile(50)
    return found


def _narrow(results: Sequence[CaseResult]) -> Outcome:
    """Return the outcome for bfloat16's elements per second against float32's, at equal bytes."""
    narrow = _elements_a_second(results, torch.bfloat16)
    wide = _elements_a_second(results, torch.float32)
    points = [(narrow[world] / wide[world], world) for world in narrow.keys() & wide.keys()]
    worst, world = min(points, default=(None, 0))
    where = f"{world} ranks, {binary_size(MIB)}" if points else ""
    return Outcome("bfloat16, elements a second of float32's", 1, worst, where=where)


def _anything(result: CaseResult) -> bool:
    return result.case.world > 1


# Targets for CUDA tensors on one GPU; the time is the host's, until the device is done.
_DEVICE_TARGETS = (
    *_versus_gloo(4, (("from 1 MiB", 10, MIB, 1 << 62),)),
    Target("gloo, everything", 1, _anything, _to_gloo, OURS),
)


def judge(results: Sequence[CaseResult], on_devices: bool = False) -> list[Outcome]:
    """Return an outcome for every target: its worst point of the run."""
    if on_devices:
        return [target.judge(results) for target in _DEVICE_TARGETS]
    return [*(target.judge(results) for target in _TARGETS), _narrow(results)]
