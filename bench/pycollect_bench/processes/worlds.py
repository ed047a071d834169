"""A benchmark run between processes: world by world, each followed by the peers that may hang.

A rank that fails or does not answer ends the measurement; results up to then are kept. So do
Ctrl-C and SIGTERM, the signal of a time limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pycollect._command import Interruption

from .. import table
from ..comparison import CaseResult
from .isolated import Isolated
from .worker_pool import PoolJob, WorkerPool

# Timeout for a result of ranks on devices: a case takes seconds, so a longer silence is a hang.
_ANSWER_SECONDS = 120.0


class Printer:
    """Prints results as they arrive; each reason why a candidate does not run only once."""

    def __init__(self, columns: Sequence[table.Column]) -> None:
        self._columns = columns
        self._said: set[str] = set()
        self._heading = ""

    def __call__(self, result: CaseResult) -> None:
        """Print the lines of one case."""
        heading = f"# {result.case.collective}, {result.case.world} ranks"
        if heading != self._heading:
            self._heading = heading
            print(heading)
        found = table.lines(result, self._columns)
        new = [line for line in found if line not in self._said]
        self._said.update(line for line in new if line.startswith("#"))
        print(*new, sep="\n", flush=True)


@dataclass
class WorldResults:
    """The results of a run, and the failure or interruption that ended it early."""

    results: list[CaseResult] = field(default_factory=list)
    failure: str = ""
    interruption: Interruption = field(default_factory=Interruption)


def measure(
    jobs: Sequence[PoolJob], isolated: Sequence[str], seconds: float, say: Printer
) -> WorldResults:
    """Measure world by world; `isolated` peers have at most `seconds` for each size."""
    found = WorldResults()
    apart = Isolated(seconds, say)
    try:
        with found.interruption:
            for job in jobs:
                _of_world(job, found.results, say)
                begin = len(found.results) - len(job.cases)
                asked = slice(begin, begin + job.asked)
                for peer in isolated:
                    found.results[asked] = apart.join(peer, job, found.results[asked])
    except (RuntimeError, TimeoutError) as error:
        found.failure = str(error)
    return found


def _of_world(job: PoolJob, results: list[CaseResult], say: Printer) -> None:
    with WorkerPool(job) as worker_pool:
        for _ in job.cases:
            results.append(worker_pool.result(_ANSWER_SECONDS if job.apart else None))
            say(results[-1])
