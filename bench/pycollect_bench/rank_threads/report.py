"""The printed tables and the record of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..record import rounds_record, timing_record
from .all_reduce import GLOO_PROCESSES, LIST, SizeResult, WayResult
from .whole_worlds import THREADS, WorldResult, total

LEGEND = """\
# threads: pycollect.threads.launch, one rank at a time unless parallel. Other worlds are processes
# of torch.multiprocessing.spawn, started and ended for each run. All ways take turns; times are
# medians, ratios are medians over rounds: the peer's time divided by that of threads."""
ALL_REDUCE_LEGEND = """\
# dist.all_reduce of float32 in batches of calls on zeros. collective: from the first rank's begin
# to the last rank's end, per collective; call: that divided by the number of ranks' calls.
# processes: started once, idle between their turns. list: pycollect.all_reduce on a list.
# fake backend: torch and Python alone; world of one: a group without other ranks; in a rank: the
# same in a launch of one rank.
# xgloo, xlist: the time of gloo between processes, and of the list call, divided by this time."""


def world_lines(result: WorldResult) -> list[str]:
    """Return the lines of the empty program: the start and the end of a world."""
    out = [f"#{'start and end of a world':<26} {'p50 (s)':>9} {'p99 (s)':>9} {'x threads':>9}"]
    for way, timing in result.timings.items():
        p50, p99 = (f"{timing.percentile(p):9.4f}" for p in (50, 99))
        out.append(f" {way:<26} {p50} {p99} {_median(result.speedup(way), 9)}")
    return out + _not_run(result.not_run)


def _median(rounds: Sequence[float] | None, width: int) -> str:
    return f"{statistics.median(rounds):{width}.2f}" if rounds else "-".rjust(width)


def _not_run(reasons: dict[str, str], of: str = "") -> list[str]:
    return [f"# {of}{way} not run: {why}" for way, why in reasons.items()]


def size_head() -> str:
    """Return the header of the table of all_reduce."""
    return (
        f"#{'world':>5} {'size (B)':>9} {'way':<24} {'collective (us)':>15} {'p99 (us)':>9} "
        f"{'call (us)':>9} {'xgloo':>7} {'xlist':>7}"
    )


def size_lines(result: SizeResult) -> list[str]:
    """Return the lines of one size."""
    return [_size_line(row) for row in result.rows] + _not_run(result.not_run)


def _size_line(row: WayResult) -> str:
    p50, p99 = (row.timing.percentile(p) * 1e6 for p in (50, 99))
    call = "-" if row.call is None else f"{row.call * 1e6:.2f}"
    gloo, of_list = (_median(row.speedup.get(peer), 7) for peer in (GLOO_PROCESSES, LIST))
    return (
        f" {row.ranks or row.world:>5} {row.nbytes:>9} {row.way:<24} {p50:>15.2f} {p99:>9.2f} "
        f"{call:>9} {gloo} {of_list}"
    )


def program_head(peers: Sequence[str]) -> str:
    """Return the header of the table of test cases."""
    columns = "".join(f" {peer + ' (s)':>13} {'x threads':>9}" for peer in peers)
    return f"#{'test case':<18} {'first (s)':>9} {'threads (s)':>11}{columns}"


def program_lines(result: WorldResult, peers: Sequence[str]) -> list[str]:
    """Return the line of a test case, and the reasons of ways that did not run."""
    cells = [f" {result.program:<18} {result.first:>9.4f} {_p50(result, THREADS, 11)}"]
    for peer in peers:
        cells.append(f"{_p50(result, peer, 13)} {_median(result.speedup(peer), 9)}")
    return [" ".join(cells), *_not_run(result.not_run, f"{result.program}, ")]


def _p50(result: WorldResult, way: str, width: int) -> str:
    timing = result.timings.get(way)
    return f"{timing.percentile(50):{width}.4f}" if timing else "-".rjust(width)


def total_lines(results: Sequence[WorldResult], peers: Sequence[str]) -> list[str]:
    """Return a line for each peer: the seconds of all test cases that ran in both ways."""
    out = []
    for peer in peers:
        if found := total(results, peer):
            mine, theirs = map(statistics.median, (found.on_threads, found.of_peer))
            out.append(
                f"# {found.programs} test cases: threads {mine:.3f} s, processes of {peer} "
                f"{theirs:.3f} s, {found.speedup:.1f}x; first runs on threads, with imports, "
                f"{found.first:.3f} s"
            )
    return out


def world_record(result: WorldResult) -> dict[str, Any]:
    """Return a program's seconds from the start to the end of its world."""
    rows = []
    for way, timing in result.timings.items():
        rounds = result.speedup(way)
        speedup = rounds_record(rounds) if rounds else None
        rows.append({"way": way, "time": timing_record(timing), "threads_faster": speedup})
    return {
        "program": result.program,
        "first": result.first,
        "not_run": result.not_run,
        "rows": rows,
    }


def size_record(result: SizeResult) -> dict[str, Any]:
    """Return all ways at one size."""
    rows = [
        {
            "way": row.way,
            "ranks": row.ranks,
            "time": timing_record(row.timing),
            "call": row.call,
            "speedup": {peer: rounds_record(rounds) for peer, rounds in row.speedup.items()},
        }
        for row in result.rows
    ]
    return {"bytes": result.nbytes, "not_run": result.not_run, "rows": rows}


def total_record(results: Sequence[WorldResult], peer: str) -> dict[str, Any] | None:
    """Return the seconds of all test cases that ran on threads and on the peer."""
    found = total(results, peer)
    if found is None:
        return None
    return {
        "programs": found.programs,
        "first": found.first,
        "threads": rounds_record(found.on_threads),
        "processes": rounds_record(found.of_peer),
        "threads_faster": found.speedup,
    }
