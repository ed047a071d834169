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
from dist_jobs import SECONDS, JobPool
from dist_rank import BACKEND, Outcome, RankContext, Spec


class ThreadPool(JobPool):
    """The rank threads of a world, with the interface of `dist_pool.Pool`, less its processes."""

    _numbers = itertools.count()

    def __init__(self, spec: Spec) -> None:
        unsupported = [name for name in ("environ", "site") if getattr(spec, name)]
        assert not unsupported, f"ranks as threads have no {unsupported} of their own"
        self.spec = spec
        self._folder = tempfile.TemporaryDirectory(prefix=f"threads_{next(self._numbers)}_")
        self.usable = True

    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        """Keep the job for `results` or `collect_outcomes`, because launches cannot overlap."""
        self._begun = job, args

    def collect_outcomes(self, seconds: float = 0.0) -> list[Outcome]:
        from pycollect import Timeout, threads

        job, args = self._begun
        outcomes = [Outcome(error="the rank did not end")] * self.spec.world

        def rank_program(rank: int, world: int) -> None:
            outcomes[rank] = self._run(rank, job, args)

        try:
            threads.launch(rank_program, self.spec.world, timeout=seconds or SECONDS)
        except Timeout as error:
            hang = f"{job.__name__}: {error}"
        else:
            return outcomes
        self._fail([hang, *(o.error for o in outcomes if o.error)])

    def _run(self, rank: int, job: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
        """The outcome of one rank. An exception ends this rank only, as it does in a process."""
        me = RankContext(rank, self.spec, self._folder.name)
        own = copy.deepcopy(args)  # as in a process: no rank shares the tensors of another
        try:
            if self.spec.group:
                self._set_group(me)
            return Outcome(value=job(me, *own))
        except Exception:
            return Outcome(error=traceback.format_exc())

    def _set_group(self, me: RankContext) -> None:
        """The launch has made the default group. A second group is for gloo, between processes."""
        if self.spec.backend != BACKEND:
            me.init("store")
            return
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend.set_timeout(datetime.timedelta(seconds=self.spec.timeout))

    def close(self) -> None:
        self.usable = False
        self._folder.cleanup()
