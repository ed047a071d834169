"""The benchmark between processes: torch.distributed over pycollect's backend, gloo and MPI.

`run` starts the ranks of each world once, and prints their results as they come. Everything that
is timed is timed in the ranks (contest.py); this process sleeps meanwhile.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

import torch

from .. import environment, output, record, table
from ..contest import CaseResult
from ..measure import Effort
from ..sizes import size_range
from ..targets import Outcome
from .cases import COLLECTIVES, ProcessCase, process_case
from .contestants import GLOO, MPI, OURS, PEERS
from .crew import Crew, Job, why_no_mpi
from .targets import LEAST, OTHERS, judge

__all__ = ["run"]

_LEGEND = """\
# A process per rank, {threads} thread each; times are of one call through Python, on the rank that
# it took longest on. Before each timed call every rank rewrites its buffer, then all meet; up to
# 16 KiB calls are timed in batches instead, on zeros (but for zero-copy: there others write to a
# rank's tensors). The contestants take turns, in a new order every round.
# zero-copy: the same call on tensors in shared memory. mpi: Open MPI's, through mpi4py.
# %limit: against `memory`, as many bytes as must be read and written, multiplied in place.
# xgloo, xmpi: the peer's time over this one's, medians over rounds.
# #wrong: elements of all ranks that differ from the exact result, in a run of its own."""
# What goes without saying in one process, but not between processes.
_NOT_HERE = ("devices", "coalesced", "overhead", "algorithms")


def _sizes(args: argparse.Namespace) -> list[int]:
    sizes = size_range(args.minbytes, args.maxbytes, args.stepfactor)
    return sizes if sizes[-1] == args.maxbytes else [*sizes, args.maxbytes]


def _cases(args: argparse.Namespace, world: int) -> Iterator[ProcessCase]:
    """The cases that were asked for, then those that only targets speak of; each once."""
    for dtype in args.dtype:
        for size in [0] if args.collective == "barrier" else _sizes(args):
            yield process_case(args.collective, size, dtype, args.op, world)
    if args.targets:
        for nbytes in (LEAST, OTHERS):
            for name in COLLECTIVES:
                yield process_case(name, nbytes, torch.float32, "sum", world)
        yield process_case("all_reduce", OTHERS, torch.bfloat16, "sum", world)


def _refuse_what_does_not_go_together(args: argparse.Namespace) -> None:
    for name in _NOT_HERE:
        if getattr(args, name):
            raise ValueError(f"--{name} does not go with --processes")
    if args.collective not in COLLECTIVES:
        raise ValueError(f"--collective of processes is one of {', '.join(COLLECTIVES)}")
    for peer in args.peers or ():
        if peer not in PEERS:
            raise ValueError(f"{peer!r} is no peer of processes; there are {', '.join(PEERS)}")


def _job(args: argparse.Namespace, world: int) -> Job:
    peers = PEERS if args.peers is None else tuple(args.peers)
    return Job(
        world,
        tuple(dict.fromkeys(_cases(args, world))),
        peers,
        args.backend,
        Effort(args.seconds, args.iterations, args.warmup),
        args.threads or max(1, len(os.sched_getaffinity(0)) // world),
        why_no_mpi() if MPI in peers else "it was not asked for",
    )


def _measure(jobs: Sequence[Job], columns: Sequence[table.Column]) -> list[CaseResult]:
    """Measure world by world, printing as results come."""
    results: list[CaseResult] = []
    said: set[str] = set()  # why somebody does not run, once is enough
    for job in jobs:
        collective = ""
        with Crew(job) as crew:
            for case in job.cases:
                results.append(crew.result())
                if case.collective != collective:
                    collective = case.collective
                    print(f"# {collective}, {job.world} ranks")
                new = [line for line in table.lines(results[-1], columns) if line not in said]
                said.update(line for line in new if line.startswith("#"))
                print(*new, sep="\n", flush=True)
    return results


def _status(results: Sequence[CaseResult], outcomes: Sequence[Outcome]) -> int:
    if any(row.wrong for result in results for row in result.rows):
        return 1
    if any(OURS in result.not_run for result in results):
        return 1
    return 3 if any(outcome.met is False for outcome in outcomes) else 0


def run(args: argparse.Namespace, command: str) -> int:
    """Measure what `args` asks for between processes, print it, and return the exit status.

    Raises:
        ValueError: if the options do not go together.
        RuntimeError: if a rank fails.
    """
    _refuse_what_does_not_go_together(args)
    jobs = [_job(args, world) for world in args.processes]
    output.check(args, any(case.count for job in jobs for case in job.cases))
    about, before = environment.describe(command), environment.Load.now()
    about["threads"] = f"{jobs[0].threads} a rank"
    columns = table.columns(False, (GLOO, MPI) if not jobs[0].no_mpi else (GLOO,))
    print(*environment.header(about), sep="\n")
    print(_LEGEND.format(threads=jobs[0].threads), *table.head(columns), sep="\n", flush=True)
    results = _measure(jobs, columns)
    outcomes = judge(results) if args.targets else []
    if outcomes:
        print(*table.target_lines(outcomes), sep="\n")
    disturbed = environment.noise(before, environment.Load.now(), results)
    print(*environment.footer(disturbed), sep="\n")
    # What only targets speak of has too few sizes for a picture.
    drawn = [
        r for r in results if r.case.collective == args.collective and r.case.dtype in args.dtype
    ]
    output.write(args, record.run_record(about, disturbed, results, {}, outcomes), drawn)
    return _status(results, outcomes)
