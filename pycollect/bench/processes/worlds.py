"""One run: world by world, then the peers that may hang; what there is when it ends is kept.

A rank that fails, or does not answer, ends the measuring. So do Ctrl-C and SIGTERM, which is how a
time limit arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..._command import Interruption
from .. import table
from ..contest import CaseResult
from .crew import Crew, Job
from .isolated import Isolated

# A case on devices has seconds; so long a silence is a hang.
_ANSWER_SECONDS = 120.0


class Printer:
    """Prints results as they come; why somebody does not run is said once."""

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
class Found:
    """What was measured, and what ended it early, if anything did."""

    results: list[CaseResult] = field(default_factory=list)
    failure: str = ""
    interruption: Interruption = field(default_factory=Interruption)


def measure(jobs: Sequence[Job], isolated: Sequence[str], seconds: float, say: Printer) -> Found:
    """Measure world by world; `isolated` peers have so many seconds for each size."""
    found = Found()
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


def _of_world(job: Job, results: list[CaseResult], say: Printer) -> None:
    with Crew(job) as crew:
        for _ in job.cases:
            results.append(crew.result(_ANSWER_SECONDS if job.apart else None))
            say(results[-1])
