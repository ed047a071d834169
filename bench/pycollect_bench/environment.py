"""Load of the machine during a run, and the header and footer that describe machine and load."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pycollect._machine import describe, read_lines
from pycollect._timing import MOST_SPREAD

from .comparison import CaseResult

__all__ = ["Load", "describe", "footer", "header", "noise"]

# A run counts as disturbed if other processes use more than this share of all cores. On a quiet
# machine they use less than a tenth of it.
MOST_FOREIGN_CPU = 0.05


@dataclass(frozen=True)
class Load:
    """CPU time counters of the machine and of this benchmark, in seconds.

    `own` counts this process and its ended children.
    """

    seconds: float
    busy: float
    own: float
    average: float

    @classmethod
    def now(cls) -> Load:
        """Read the counters."""
        ticks = [int(x) for line in read_lines("/proc/stat", "cpu ") for x in line.split()[1:9]]
        # user, nice, system, idle, iowait, irq, softirq, steal: idle and iowait are not busy.
        busy = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        spent = own.user + own.system + own.children_user + own.children_system
        return cls(time.monotonic(), busy, spent, os.getloadavg()[0])


def noise(before: Load, after: Load, results: Iterable[CaseResult]) -> dict[str, Any]:
    """Return the CPU share of other processes between the loads, and the limit's variation."""
    capacity = (after.seconds - before.seconds) * (os.cpu_count() or 1)
    foreign = (after.busy - before.busy) - (after.own - before.own)
    limits = [r.limit.timing for r in results if r.limit]
    return {
        "load_average_before": before.average,
        "load_average_after": after.average,
        "foreign_cpu_share": max(0.0, foreign / capacity) if capacity else 0.0,
        "limit_rounds_max_over_min": max((t.spread for t in limits), default=None),
        "limit_p99_over_p50": max((t.tail for t in limits), default=None),
    }


def header(about: dict[str, Any]) -> list[str]:
    """Return the header lines of the output, as comments."""
    return [
        f"# pycollect {about['pycollect']}, commit {about['commit']}, torch {about['torch']}, "
        f"python {about['python']}, {about['time']}",
        f"# machine: {about['machine']}, {about['cores']} cores, {about['caches']}; "
        f"threads: {about['threads']}; GPU: {', '.join(about['gpus']) or 'none'}",
        f"# command: {about['command']}",
    ]


def footer(measured: dict[str, Any]) -> list[str]:
    """Return the lines about the load by other processes, with a warning if it was high."""
    share, spread = measured["foreign_cpu_share"], measured["limit_rounds_max_over_min"]
    tail = measured["limit_p99_over_p50"]
    varied = f"; limit: rounds max/min {spread:.2f}, p99/p50 {tail:.2f}" if spread else ""
    out = [
        f"# noise: load average {measured['load_average_before']:.2f} -> "
        f"{measured['load_average_after']:.2f}, other processes {100 * share:.0f} % of all cores"
        + varied
    ]
    if share > MOST_FOREIGN_CPU or (spread or 1) > MOST_SPREAD:
        out.append(
            "# WARNING: the machine was not quiet; rely on ratios rather than times, and run again"
        )
    return out
