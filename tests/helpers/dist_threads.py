"""Pools of ranks, which run jobs, and those of ranks that are threads of the test's process.

Each job of threads is a launch of its own (pycollect.threads), which takes milliseconds, so no
state of one job reaches the next: groups, random numbers and environment begin anew.
"""

from __future__ import annotations

import abc
import copy
import datetime
import itertools
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from dist_rank import BACKEND, Outcome, RankContext, Spec
from thread_devices import of_ranks

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


class ThreadPool(JobPool):
    """The rank threads of a world, with the interface of `dist_pool.Pool`, less its processes."""

    _numbers = itertools.count()

    def __init__(self, spec: Spec) -> None:
        assert not spec.environ, "ranks as threads have no environment of their own"
        self.spec = spec
        self._folder = tempfile.TemporaryDirectory(prefix=f"threads_{next(self._numbers)}_")
        self.usable = True

    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        """Keep the job for `results` or `collect_outcomes`, because launches cannot overlap."""
        self._begun = job, args

    def is_over(self) -> bool:
        return True

    def collect_outcomes(self, seconds: float = 0.0) -> list[Outcome]:
        from pycollect import Timeout, threads

        job, args = self._begun
        outcomes = [Outcome(error="the rank did not end")] * self.spec.world
        sites = of_ranks(self.spec.site, self.spec.world)

        def rank_program(rank: int, world: int) -> None:
            me = RankContext(rank, self.spec, self._folder.name, site=sites[rank])
            outcomes[rank] = self._run(me, job, args)

        device = sites[0].device if sites[0].real else None
        limit = min(seconds or SECONDS, MOST_SECONDS)
        try:
            parallel = self.spec.parallel
            threads.launch(
                rank_program, self.spec.world, timeout=limit, device=device, parallel=parallel
            )
        except Timeout as error:
            hang = f"{job.__name__}: {error}"
        else:
            violations = sites[0].violations()
            assert violations == []
            return outcomes
        self._fail([hang, *(o.error for o in outcomes if o.error)])

    def _run(self, me: RankContext, job: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
        """The outcome of one rank. An exception ends this rank only, as it does in a process."""
        own = copy.deepcopy(args)  # as in a process: no rank shares the tensors of another
        try:
            me.site.begin_rank()
            if self.spec.group:
                self._set_group(me)
            with me.site.as_default_device():
                return Outcome(value=job(me, *own))
        except Exception:
            return Outcome(error=traceback.format_exc())

    def _set_group(self, me: RankContext) -> None:
        """The launch has made the default group. A second group is for gloo, between processes."""
        if self.spec.backend != BACKEND or self.spec.site:
            me.init("store", pg_options=me.site.options)
            return
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend.set_timeout(datetime.timedelta(seconds=self.spec.timeout))

    def close(self) -> None:
        self.usable = False
        self._folder.cleanup()
