"""A benchmark run between processes, world by world.

The measurement ends with a rank that fails or does not answer, with Ctrl-C, and with SIGTERM, the
signal of a time limit. Results up to then are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pycollect._command import Interruption

from .. import table
from ..comparison import CaseResult
from .worker_pool import PoolJob, WorkerPool

# Timeout in seconds for a result of ranks on devices: a case takes seconds, so more is a hang.
_ANSWER_SECONDS = 120.0


class Printer:
    """Prints results as they arrive, and each reason why a candidate does not run only once."""

    def __init__(self, columns: Sequence[table.Column]) -> None:
        self._columns = columns
        self._printed: set[str] = set()
        self._heading = ""

    def __call__(self, result: CaseResult) -> None:
        """Print the lines of one case."""
        heading = f"# {result.case.collective}, {result.case.world} ranks"
        if heading != self._heading:
            self._heading = heading
            print(heading)
        found = table.lines(result, self._columns)
        new = [line for line in found if line not in self._printed]
        self._printed.update(line for line in new if line.startswith("#"))
        print(*new, sep="\n", flush=True)


@dataclass
class WorldResults:
    """The results of a run, and the failure or interruption that ended it early."""

    results: list[CaseResult] = field(default_factory=list)
    failure: str = ""
    interruption: Interruption = field(default_factory=Interruption)


def measure(
    jobs: Sequence[PoolJob],
    printer: Printer,
    keep: Callable[[Sequence[CaseResult]], None],
) -> WorldResults:
    """Measure world by world; `keep` is called with the results so far after each case."""
    found = WorldResults()
    try:
        with found.interruption:
            for job in jobs:
                _measure_world(job, found.results, printer, keep)
    except (RuntimeError, TimeoutError) as error:
        found.failure = str(error)
    return found


def _measure_world(
    job: PoolJob,
    results: list[CaseResult],
    printer: Printer,
    keep: Callable[[Sequence[CaseResult]], None],
) -> None:
    with WorkerPool(job) as worker_pool:
        for _ in job.cases:
            results.append(worker_pool.result(_ANSWER_SECONDS if job.both_clocks else None))
            printer(results[-1])
            keep(results)
