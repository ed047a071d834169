"""Benchmark of tensor-parallel decoding: a Llama-shaped model over gloo and over pycollect.

The ranks of a world are processes that are started once for all cases; in each case all variants
take turns. What a token's time consists of is in collectives.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from pycollect._timing import Effort

from ..processes.cases import CPU
from ..processes.worker_pool import WorkerPool
from . import report
from .case import Case, CaseResult, Job
from .variants import VARIANTS

__all__ = ["MODELS", "VARIANTS", "DecodingResults", "measure"]

MODELS = ("llama", "moe")


class DecodingPool(WorkerPool):
    """Context manager of the processes of one world."""

    worker = "pycollect_bench.tensor_parallel.worker"


@dataclass
class DecodingResults:
    """The results of a run, also of an interrupted one, and why it ended early."""

    cases: list[CaseResult] = field(default_factory=list)
    failure: str = ""

    @property
    def failed(self) -> bool:
        """Whether the processes failed, or logits are wrong."""
        return bool(self.failure) or any(case.wrong for case in self.cases)

    def record(self) -> dict[str, Any]:
        """Return the results for the JSON file."""
        return {
            "tensor_parallel": [report.case_record(case) for case in self.cases],
            "failure": self.failure or None,
        }


def _cases(args: argparse.Namespace) -> tuple[Case, ...]:
    """Return the cases of each world: experts only with the largest hidden size and batch."""
    dense = [
        Case(hidden, dtype, batch, args.vocab, moe=False)
        for hidden, dtype, batch in product(args.hidden, args.dtypes, args.batches)
    ]
    moe = [
        Case(max(args.hidden), dtype, max(args.batches), args.vocab, moe=True)
        for dtype in args.dtypes
    ]
    return (*dense * ("llama" in args.models), *moe * ("moe" in args.models))


def _job(args: argparse.Namespace, world: int) -> Job:
    cores = len(os.sched_getaffinity(0))
    return Job(
        devices=(CPU,) * world,
        cases=_cases(args),
        ours=(),
        peers=(),
        backend="pycollect",
        effort=Effort(args.seconds, args.iterations, warmup=1, single_calls=True),
        threads=max(1, cores // world),
        no_mpi="it is not measured",
        variants=tuple(args.variants),
        layers=args.layers,
        prompt=args.prompt,
        tokens=args.tokens,
        alone_threads=cores,
    )


def measure(args: argparse.Namespace, results: DecodingResults, keep: Callable[[], None]) -> None:
    """Measure the cases that the options name: print each, add it to `results`, call `keep`."""
    print(report.LEGEND, flush=True)
    try:
        for world in args.ranks:
            job = _job(args, world)
            with DecodingPool(job) as pool:
                for _ in job.cases:
                    results.cases.append(pool.result())
                    print(*report.lines(results.cases[-1]), sep="\n", flush=True)
                    keep()
    except RuntimeError as error:  # of the processes; the times up to then are right
        results.failure = str(error)
