"""A benchmark run as JSON: the numbers of its tables and pictures, in medians.

A record has the smallest and the largest ratio of the rounds, not the rounds themselves.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from pycollect._timing import Timing

from .cases import Case
from .comparison import CaseResult, Row
from .targets import Outcome


def timing_record(timing: Timing) -> dict[str, float]:
    """Return seconds per call over all calls: minimum, median and 99th percentile."""
    return {name: timing.percentile(p) for name, p in (("min", 0), ("p50", 50), ("p99", 99))}


def rounds_record(rounds: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of a number that was measured in every round.

    >>> rounds_record([2.0, 5.0, 1.0])
    {'median': 2.0, 'min': 1.0, 'max': 5.0}
    """
    return {"median": statistics.median(rounds), "min": min(rounds), "max": max(rounds)}


def _row_record(case: Case, row: Row) -> dict[str, Any]:
    median = row.timing.percentile(50)
    return {
        "algorithm": row.name,
        "kind": row.kind,
        "clock": row.clock,
        "time": timing_record(row.timing),
        "busbw": None if case.one_memory else case.nbytes * case.bus_factor / median,
        "moved": case.minimum_bytes / median if case.one_memory else None,
        "limit_share": row.limit_share,
        "speedup": {peer: rounds_record(rounds) for peer, rounds in row.speedup.items()},
        "wrong": row.wrong,
    }


def case_record(result: CaseResult) -> dict[str, Any]:
    """Return one case with all its rows; bandwidths are bytes per second.

    A row has `moved` if the ranks share one memory, else `busbw`; the other one is None.
    """
    case = result.case
    return {
        "collective": case.collective,
        "dtype": str(case.dtype).removeprefix("torch."),
        "op": case.op,
        "world": case.world,
        "devices": [str(device) for device in case.devices],
        "shapes": [list(shape) for shape in case.shapes],
        "bytes": case.nbytes,
        "count": case.count,
        "limit": result.limit.name if result.limit else None,
        "not_run": result.not_run,
        "rows": [_row_record(case, row) for row in result.rows],
    }


def call_record(name: str, timing: Timing) -> dict[str, Any]:
    """Return the row of a candidate with a time and no bandwidth."""
    return {"way": name, "time": timing_record(timing)}


def target_record(outcome: Outcome) -> dict[str, Any]:
    """Return one target with its measured value and whether it was met."""
    return {
        "target": outcome.what,
        "sign": outcome.sign,
        "wanted": outcome.wanted,
        "unit": outcome.unit,
        "measured": outcome.measured,
        "met": outcome.met,
        "where": outcome.where,
    }


def requested(args: argparse.Namespace) -> dict[str, Any]:
    """Return the requested collective and dtypes; the targets may have added other cases."""
    return {
        "collective": args.collective,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in args.dtype],
    }


def run_record(
    environment: dict[str, Any],
    noise: dict[str, Any],
    results: Iterable[CaseResult],
    calls: dict[str, Timing],
    outcomes: Sequence[Outcome],
) -> dict[str, Any]:
    """Return the whole run for `output.write_json`."""
    return {
        "environment": environment,
        "noise": noise,
        "cases": [case_record(result) for result in results],
        "calls": [call_record(name, timing) for name, timing in calls.items()],
        "targets": [target_record(outcome) for outcome in outcomes],
    }
