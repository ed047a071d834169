"""The speed targets of ranks as threads, and their check against a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from ..targets import KIB, MIB, Outcome
from .all_reduce import GLOO_PROCESSES, LIST, THREADS, SizeResult, WayResult
from .process_pool import GLOO
from .whole_worlds import WorldResult, total

# Largest size of a call whose time is that of its Python code, and least size on a GPU at which the
# reduction takes longer than the calls.
_SMALL, _LEAST_ON_GPU = KIB, MIB


def _list_share(row: WayResult) -> float | None:
    """Return the time divided by that of the list call."""
    found = row.speedup.get(LIST)
    return 1 / statistics.median(found) if found else None


def _over_gloo(row: WayResult) -> float | None:
    found = row.speedup.get(GLOO_PROCESSES)
    return statistics.median(found) if found else None


def _microseconds(row: WayResult) -> float | None:
    return None if row.call is None else row.call * 1e6


def _worst(
    what: str,
    wanted: float,
    value: Callable[[WayResult], float | None],
    results: Iterable[SizeResult],
    sign: str = "<=",
    unit: str = "x",
) -> Outcome:
    points = []
    for result in results:
        row = result.row(THREADS)
        measured = value(row) if row else None
        if measured is not None:
            points.append((measured, f"{result.nbytes} B"))
    worst, where = (max if sign == "<=" else min)(points, default=(None, ""))
    return Outcome(what, wanted, worst, sign, unit, where)


def judge(
    empty: WorldResult | None,
    sizes: Sequence[SizeResult],
    programs: Sequence[WorldResult],
    on_gpu: bool,
) -> list[Outcome]:
    """Return the outcomes of the targets of this device."""
    if on_gpu:
        large = [result for result in sizes if result.nbytes >= _LEAST_ON_GPU]
        return [
            _worst("all_reduce on a GPU: time over the list call's", 1.2, _list_share, large),
            _worst("all_reduce on a GPU: faster than gloo", 10, _over_gloo, large, ">="),
        ]
    timing = empty.timings.get(THREADS) if empty else None
    world = timing.percentile(50) * 1e3 if timing else None
    small = [result for result in sizes if result.nbytes <= _SMALL]
    mib = [result for result in sizes if result.nbytes == MIB]
    whole = total(programs, GLOO)
    ratio = whole.speedup if whole else None
    return [
        Outcome("start and end of a world of threads", 50, world, "<=", " ms"),
        _worst("all_reduce of little data: a rank's call", 15, _microseconds, small, unit=" us"),
        _worst("all_reduce of 1 MiB: time over the list call's", 1.3, _list_share, mib),
        Outcome("test cases: faster than processes of gloo", 10, ratio),
    ]
