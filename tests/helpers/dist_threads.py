"""Pools of threads: the jobs of process pools, run by ranks that are threads of the test's process.

Each job is a launch of its own (pycollect.threads), which takes milliseconds, so no state of one
job reaches the next: groups, random numbers and environment begin anew.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dist_jobs import MOST_SECONDS, SECONDS, JobPool
from dist_rank import BACKEND, Outcome, RankContext, Spec
from thread_devices import of_ranks


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
