"""A benchmark run as JSON: all values of the tables, and those that the tables leave out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pycollect._timing import Timing

from .cases import Case
from .comparison import CaseResult, Row
from .targets import Outcome

# Version of the JSON layout, increased whenever a reader of older files would misread a new one.
SCHEMA = 1


def timing_record(timing: Timing) -> dict[str, Any]:
    """Return seconds per call: percentiles over all calls, and the median of each round."""
    return {
        "unit": "seconds",
        "p50": timing.percentile(50),
        "p99": timing.percentile(99),
        "min": timing.percentile(0),
        "samples": timing.count,
        "rounds": timing.rounds,
    }


def _row_record(case: Case, row: Row) -> dict[str, Any]:
    median = row.timing.percentile(50)
    return {
        "algorithm": row.name,
        "kind": row.kind,
        "clock": row.clock,
        "time": timing_record(row.timing),
        "algbw": case.nbytes / median,
        "busbw": None if case.one_memory else case.nbytes * case.bus_factor / median,
        "moved": case.minimum_bytes / median if case.one_memory else None,
        "limit_share": row.limit_share,
        "limit_rounds": row.limit_rounds,
        "speedup": {
            name: {"median": row.times_faster_than(name), "rounds": rounds}
            for name, rounds in row.speedup.items()
        },
        "wrong": row.wrong,
    }


def case_record(result: CaseResult) -> dict[str, Any]:
    """Return one case with all its rows; bandwidths are bytes per second."""
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
        "minimum_bytes": case.minimum_bytes,
        "limit": result.limit.name if result.limit else None,
        "rows": [_row_record(case, row) for row in result.rows],
        "not_run": result.not_run,
    }


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


def run_record(
    environment: dict[str, Any],
    noise: dict[str, Any],
    results: Iterable[CaseResult],
    calls: dict[str, Timing],
    outcomes: Sequence[Outcome],
) -> dict[str, Any]:
    """Return the whole run, ready for `json.dump`."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "noise": noise,
        "cases": [case_record(result) for result in results],
        "calls": {name: timing_record(timing) for name, timing in calls.items()},
        "targets": [target_record(outcome) for outcome in outcomes],
    }
