"""Speed targets of the library on a CPU and on one GPU, and their check against a run.

Most targets are ratios to a peer or limit of the same run; costs of calls are in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from pycollect._sizes import binary_size
from pycollect._timing import MOST_SPREAD, Timing

from .comparison import DEFAULT, GPU, GRAPH, INSIDE, NAIVE, CaseResult, Row, clocked

KIB, MIB = 1 << 10, 1 << 20
# Name of the row in the table of call costs that has a target.
CALL = "all_reduce, 4 ranks x 4 elements"
_BY_GPU, _IN_GRAPH = clocked(DEFAULT, GPU), clocked(DEFAULT, GRAPH)


@dataclass(frozen=True)
class Outcome:
    """A checked target. `measured` is its worst point, at `where`, or None without any point."""

    what: str
    wanted: float
    measured: float | None
    sign: str = ">="
    unit: str = "x"
    where: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None if it was not measured."""
        if self.measured is None:
            return None
        if self.sign == ">=":
            return self.measured >= self.wanted
        return self.measured < self.wanted or (self.sign == "<=" and self.measured == self.wanted)


def status(outcomes: Iterable[Outcome], failed: bool = False) -> int:
    """Return the exit status: 1 if a result `failed`, 3 if a target is missed, else 0."""
    missed = any(outcome.met is False for outcome in outcomes)
    return 1 if failed else 3 * missed


@dataclass(frozen=True)
class Target:
    """A speed target: `value` of `row` is at least, or at most, `wanted` if the case `applies`."""

    what: str
    wanted: float
    applies: Callable[[CaseResult], bool]
    value: Callable[[Row], float | None]
    row: str = DEFAULT
    unit: str = "x"
    sign: str = ">="

    def judge(self, results: Iterable[CaseResult]) -> Outcome:
        """Return the outcome: the target's worst point among these results."""
        points = []
        for result in filter(self.applies, results):
            row = result.row(self.row)
            value = self.value(row) if row else None
            if value is not None:
                points.append((value, self._where(result)))
        choose = min if self.sign == ">=" else max
        worst, where = choose(points, default=(None, ""))
        return Outcome(self.what, self.wanted, worst, self.sign, self.unit, where)

    def _where(self, result: CaseResult) -> str:
        """Describe a point: world, size, a disturbed run, and a limit that excludes the target."""
        notes = [f"{result.case.world} ranks, {binary_size(result.case.nbytes)}"]
        limit = result.limit
        if limit and limit.timing.spread > MOST_SPREAD:
            notes.append("disturbed")
        # The memory bandwidth of this machine may make the ratio to a peer impossible.
        reach = self.value(limit) if limit and self.unit == "x" else None
        if reach is not None and reach < self.wanted:
            notes.append(f"the limit itself is at {reach:.2f}x")
        return "; ".join(notes)


def _sums(worlds: Sequence[int] | None, begin: int, end: int | None = None) -> Callable[..., bool]:
    """Select float32 sum all-reduces on CPUs, of `begin` to `end` bytes per rank."""

    def applies(result: CaseResult) -> bool:
        case = result.case
        return (
            (case.collective, case.dtype, case.op) == ("all_reduce", torch.float32, "sum")
            and all(device.type == "cpu" for device in case.devices)
            and (case.world in worlds if worlds else case.world > 1)
            and begin <= case.nbytes <= (end or case.nbytes)
        )

    return applies


def _gpu_sums(worlds: Sequence[int], begin: int, end: int | None = None) -> Callable[..., bool]:
    """Select float32 and bfloat16 sum all-reduces on one GPU, of `begin` to `end` bytes per rank.

    Without `end` there is no upper bound.
    """

    def applies(result: CaseResult) -> bool:
        case = result.case
        return (
            (case.collective, case.op) == ("all_reduce", "sum")
            and case.dtype in (torch.float32, torch.bfloat16)
            and (case.on_gpus and case.one_memory and case.world in worlds)
            and begin <= case.nbytes <= (end or case.nbytes)
        )

    return applies


def _lenet_of_four(result: CaseResult) -> bool:
    case = result.case
    kind = (case.collective, case.dtype, case.op, case.world)
    return kind == ("all_reduce_coalesced", torch.float32, "sum", 4) and case.one_memory


def _limit_percent(row: Row) -> float | None:
    return None if row.limit_share is None else 100 * row.limit_share


def _against_naive(row: Row) -> float | None:
    return row.times_faster_than(NAIVE)


def _microseconds(row: Row) -> float | None:
    return row.timing.percentile(50) * 1e6


def _versus_naive() -> list[Target]:
    spans = (
        ("at 4 KiB", 3.0, 4 * KIB, 4 * KIB),
        ("at 64 KiB", 3.0, 64 * KIB, 64 * KIB),
        ("at 1 MiB", 2.0, MIB, MIB),
        ("from 16 MiB", 3.0, 16 * MIB, None),
    )
    targets = [
        Target(f"naive loop, {w} ranks, {name}", wanted, _sums((w,), b, e), _against_naive)
        for w in (4, 8)
        for name, wanted, b, e in spans
    ]
    return [
        Target("naive loop, 2 ranks, every size", 1.5, _sums((2,), 1), _against_naive),
        *targets,
    ]


_TARGETS = (
    Target("limit, from 1 MiB", 90, _sums(None, MIB), _limit_percent, unit="%"),
    Target(
        "limit, from 64 KiB, inside the extension",
        90,
        _sums(None, 64 * KIB),
        _limit_percent,
        row=INSIDE,
        unit="%",
    ),
    *_versus_naive(),
    Target("naive loop, LeNet's gradients of 4 ranks", 5.0, _lenet_of_four, _against_naive),
)


_SMALL, _LARGE = _gpu_sums((4, 8), 1, 256 * KIB), _gpu_sums((4, 8), 64 * MIB)
_GPU_TARGETS = (
    Target("limit, from 64 MiB, GPU time", 92, _LARGE, _limit_percent, _BY_GPU, "%"),
    Target("naive loop, from 64 MiB", 2.0, _LARGE, _against_naive),
    Target("a call up to 256 KiB, GPU time", 8.0, _SMALL, _microseconds, _BY_GPU, "us", "<="),
    Target("the same in a graph of many", 5.0, _SMALL, _microseconds, _IN_GRAPH, "us", "<="),
    *(
        Target(
            f"naive loop, {w} ranks, up to 256 KiB",
            x,
            _gpu_sums((w,), 1, 256 * KIB),
            _against_naive,
        )
        for w, x in ((4, 6.0), (8, 10.0))
    ),
    Target("naive loop, LeNet's gradients of 4 ranks", 20.0, _lenet_of_four, _against_naive),
)


def judge(results: Sequence[CaseResult], calls: dict[str, Timing]) -> list[Outcome]:
    """Return an outcome for every target: its worst point of the run."""
    if results and all(result.case.on_gpus for result in results):
        return [target.judge(results) for target in _GPU_TARGETS]
    call = calls[CALL].percentile(50) * 1e6 if CALL in calls else None
    return [
        *(target.judge(results) for target in _TARGETS),
        Outcome("cost of a call, 4 ranks x 4 elements", 3.0, call, sign="<", unit="us"),
    ]
