"""Running jobs on all ranks of a pool, whatever the ranks are; see dist_pool.py and
dist_threads.py."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from dist_rank import Outcome, Spec

SECONDS = 20.0  # default time limit of a job; most jobs take milliseconds
# Limit of all time limits of jobs, so that a test that hangs cannot use up a short stay on a GPU.
MOST_SECONDS = float(os.environ.get("PYCOLLECT_TEST_SECONDS", "inf"))


class JobPool(abc.ABC):
    """The ranks of a world. `run` is for jobs that must succeed, `outcomes` for others."""

    spec: Spec
    usable: bool

    @abc.abstractmethod
    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        """Start a job, and return at once; collect with `results` or `collect_outcomes`."""

    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether collecting the job that has begun would not wait for other processes."""

    @abc.abstractmethod
    def collect_outcomes(self, seconds: float = 0.0) -> list[Outcome]:
        """Every rank's Outcome of the job that has begun. Fails only on a hang."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def run(self, job: Callable[..., Any], *args: Any, seconds: float = 0.0) -> list[Any]:
        """Run a job on all ranks and return their results; fails with the tracebacks of errors."""
        self.begin(job, *args)
        return self.results(seconds)

    def results(self, seconds: float = 0.0) -> list[Any]:
        outcomes = self.collect_outcomes(seconds)
        errors = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error]
        if errors:
            self._fail(errors)  # ends the pool: the state of the other ranks is unknown
        return [o.value for o in outcomes]

    def outcomes(self, job: Callable[..., Any], *args: Any, seconds: float = 0.0) -> list[Outcome]:
        """Run a job on all ranks and return every rank's Outcome. Fails only on a hang."""
        self.begin(job, *args)
        return self.collect_outcomes(seconds)

    def _fail(self, lines: list[str]) -> NoReturn:
        logs = self._logs()
        self.close()
        pytest.fail("\n".join([*lines, *logs]), pytrace=False)

    def _logs(self) -> list[str]:
        """Lines of output of the ranks, for the report of a failure."""
        return []
