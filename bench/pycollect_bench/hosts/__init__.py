"""Benchmark of collectives between hosts: network namespaces of this machine, with limited links.

Peers are torch's gloo and the composition of HSDP. A world runs on each rate in new processes; the
ranks do all the timing, and the barrier of the measurement is in shared memory, not on the link.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pycollect._timing import Effort

from .. import table
from ..comparison import CaseResult
from ..processes.cases import CPU, process_case
from ..processes.run_worlds import Printer
from . import report
from .groups import FAST, GLOO, HSDP, OURS
from .namespaces import Namespaces
from .pool import HostJob, HostPool

__all__ = ["PEERS", "HostResults", "measure"]

PEERS = (GLOO, HSDP, OURS, FAST)


@dataclass
class HostResults:
    """The results of a run by job, also of an interrupted one, and why it ended early."""

    worlds: list[tuple[HostJob, list[CaseResult]]] = field(default_factory=list)
    failure: str = ""

    @property
    def failed(self) -> bool:
        """Whether the processes failed, or an element is wrong."""
        return bool(self.failure) or any(row.wrong for case in self.cases() for row in case.rows)

    def cases(self) -> Iterator[CaseResult]:
        """Yield the results of all jobs."""
        for _, results in self.worlds:
            yield from results

    def record(self) -> dict[str, Any]:
        """Return the results for the JSON file."""
        worlds = [report.world_record(job, results) for job, results in self.worlds]
        return {"worlds": worlds, "failure": self.failure or None}


def _job(args: argparse.Namespace, hosts: int, ranks: int, rate: float | None) -> HostJob:
    world = hosts * ranks
    cases = tuple(
        process_case(args.collective, nbytes, dtype, "sum", [CPU] * world)
        for dtype in args.dtypes
        for nbytes in args.sizes
    )
    return HostJob(
        devices=(CPU,) * world,
        cases=tuple(dict.fromkeys(cases)),
        ours=(),
        peers=tuple(args.peers),
        backend=GLOO,
        effort=Effort(args.seconds, args.iterations, warmup=2),
        threads=max(1, len(os.sched_getaffinity(0)) // world),
        no_mpi="it is not measured between hosts",
        hosts=hosts,
        rate=rate,
    )


def measure(args: argparse.Namespace, results: HostResults, keep: Callable[[], None]) -> None:
    """Measure the worlds that the options name: print each result, add it to `results`, and call
    `keep`.
    """
    print(report.LEGEND, flush=True)
    try:
        for hosts, ranks in args.ranks:
            with Namespaces(hosts) as namespaces:
                for rate in args.rates:
                    namespaces.limit(rate)
                    _measure_world(_job(args, hosts, ranks, rate), namespaces, results, keep)
    except RuntimeError as error:  # of the processes; the times up to then are right
        results.failure = str(error)


def _measure_world(
    job: HostJob, namespaces: Namespaces, results: HostResults, keep: Callable[[], None]
) -> None:
    found: list[CaseResult] = []
    results.worlds.append((job, found))
    columns = report.columns(job)
    printer = Printer(columns)
    print(*table.head(columns), sep="\n", flush=True)
    with HostPool(job, namespaces) as pool:
        for _ in job.cases:
            found.append(pool.result())
            printer(found[-1])
            keep()
    for line in report.link_lines(job, found):
        print(line, flush=True)
