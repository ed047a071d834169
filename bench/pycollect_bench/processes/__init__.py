"""Benchmark between processes: torch.distributed over pycollect's backend, gloo and others.

`run` starts the ranks of each world once, and prints their results as they arrive. The ranks do all
the timing (comparison.py), while this process sleeps. If a rank fails or a timeout expires, the
results up to then are kept.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import pycollect
from pycollect._sizes import size_range
from pycollect._timing import Effort

from .. import environment, output, record, table
from ..comparison import CaseResult
from ..targets import Outcome, status
from .candidates import PEERS
from .cases import COLLECTIVES, ProcessCase, process_case
from .groups import GLOO, MPI, OURS, ZERO_COPY
from .run_worlds import Printer, measure
from .targets import LEAST, OTHERS, judge
from .worker_pool import PoolJob, why_no_mpi

__all__ = ["run"]

Devices = tuple[torch.device, ...]
# Timeout in seconds of a call on devices. On one host a longer call is a hang, and a whole run has
# only minutes.
_DEVICE_TIMEOUT = 30.0

_LEGEND = """\
# A process per rank, {threads} thread each; times are of one call through Python, on the slowest
# rank. Before each timed call every rank rewrites its buffer, and all pass a barrier. Up to 16 KiB
# calls are timed in batches instead, on zeros (except zero-copy, where peers write to a rank's
# tensors). The candidates take turns, in a new order every round.
# zero-copy: the same call on tensors in symmetric memory. mpi: Open MPI's call, through mpi4py.
# %limit: relative to `memory`, which multiplies the bytes that must be read and written in place.
# xgloo, xmpi: the peer's time divided by this candidate's, medians over rounds.
# #wrong: elements of all ranks that differ from the exact result, in a separate run."""
_DEVICE_LEGEND = """\
# A process per rank; times are of one call through Python until the device is done, on the slowest
# rank; `:return` until the call returns, `:gpu` the device's own time, by events around a batch of
# calls on zeros. Before each timed call every rank rewrites its buffer, and all pass a barrier. The
# candidates take turns, in a new order every round.
# moved: bytes that must be read and written (all_reduce: 2 x world x size), per second.
# %limit: on one GPU, relative to `memcpy`, which copies the same bytes there, by the same clock.
# xgloo: the peer's time divided by this candidate's by the same clock, medians over rounds.
# #wrong: elements of all ranks that differ from the exact result, in a separate run."""
# Options that exist only without --processes.
_ONE_PROCESS_OPTIONS = ("coalesced", "overhead", "algorithms")


def _sizes(args: argparse.Namespace) -> list[int]:
    sizes = size_range(args.minbytes, args.maxbytes, args.stepfactor)
    return sizes if sizes[-1] == args.maxbytes else [*sizes, args.maxbytes]


def _cases(args: argparse.Namespace, devices: Devices) -> Iterator[ProcessCase]:
    """Yield the cases that the options request."""
    for dtype in args.dtype:
        for size in [0] if args.collective == "barrier" else _sizes(args):
            yield process_case(args.collective, size, dtype, args.op, devices)


def _cases_of_targets(devices: Devices) -> Iterator[ProcessCase]:
    """Yield the additional cases that only the targets need."""
    for nbytes in (LEAST, OTHERS):
        for name in COLLECTIVES:
            yield process_case(name, nbytes, torch.float32, "sum", devices)
    yield process_case("all_reduce", OTHERS, torch.bfloat16, "sum", devices)


def _check_options(args: argparse.Namespace) -> None:
    for name in _ONE_PROCESS_OPTIONS:
        if getattr(args, name):
            raise ValueError(f"--{name} does not go with --processes; leave one of them out")
    if args.collective not in COLLECTIVES:
        raise ValueError(
            f"--collective {args.collective} does not exist between processes; there are "
            f"{', '.join(COLLECTIVES)}"
        )
    known = _peers(args)
    for peer in args.peers or ():
        if peer not in known:
            kind = "processes on devices" if args.devices else "processes"
            raise ValueError(f"{peer!r} is not a peer of {kind}; there are {', '.join(known)}")


def _peers(args: argparse.Namespace) -> tuple[str, ...]:
    return (GLOO,) if args.devices else PEERS


def _job(args: argparse.Namespace, world: int) -> PoolJob:
    peers = _peers(args) if args.peers is None else tuple(args.peers)
    named = pycollect.devices(args.devices or "cpu")
    devices = tuple(named[rank % len(named)] for rank in range(world))
    others = _cases_of_targets(devices) if args.targets else ()
    return PoolJob(
        devices=devices,
        cases=tuple(dict.fromkeys((*_cases(args, devices), *others))),
        ours=(OURS,) if args.devices else (OURS, ZERO_COPY),
        peers=peers,
        backend=args.backend,
        effort=Effort(args.seconds, args.iterations, args.warmup),
        threads=args.threads or max(1, len(os.sched_getaffinity(0)) // world),
        no_mpi=why_no_mpi() if MPI in peers else "it is not among the peers",
        both_clocks=bool(args.devices),
        timeout=_DEVICE_TIMEOUT if args.devices else PoolJob.timeout,
    )


def run(args: argparse.Namespace, command: str) -> int:
    """Run the benchmark of `args` between processes, print it, and return the exit status.

    The failure of a rank ends the run with status 1, Ctrl-C and SIGTERM with their status; results
    measured before are still written.

    Raises:
        KeyboardInterrupt: after an interruption.
        OutputError: if a file cannot be written.
        ValueError: if the options do not go together.
    """
    _check_options(args)
    jobs = [_job(args, world) for world in args.processes]
    output.check(args, any(case.count for job in jobs for case in job.cases))
    about = environment.describe(command) | record.requested(args)
    before = environment.Load.now()
    about["threads"] = f"{jobs[0].threads} a rank"
    against = tuple(p for p in _peers(args) if args.peers is None or p in args.peers)
    if jobs[0].no_mpi:
        against = tuple(p for p in against if p != MPI)
    one_memory = all(case.one_memory for job in jobs for case in job.cases)
    columns = table.columns(one_memory, against)
    legend = _DEVICE_LEGEND if args.devices else _LEGEND
    print(*environment.header(about), sep="\n")
    print(legend.format(threads=jobs[0].threads))
    print(*table.head(columns), sep="\n", flush=True)

    def content(results: Sequence[CaseResult], outcomes: Sequence[Outcome] = ()) -> dict[str, Any]:
        noise = environment.noise(before, environment.Load.now(), results)
        return record.run_record(about, noise, results, {}, outcomes)

    def keep(results: Sequence[CaseResult]) -> None:
        output.keep_json(args.json, partial(content, results))

    found = measure(jobs, Printer(columns), keep)
    results = found.results
    outcomes = judge(results, bool(args.devices)) if args.targets else []
    if outcomes:
        print(*table.target_lines(outcomes), sep="\n")
    if found.failure:
        print(f"# FAILED: {found.failure}", flush=True)
    whole = content(results, outcomes) | {"failure": found.failure or None}
    print(*environment.footer(whole["noise"]), sep="\n")
    output.write_all(args, whole, found.interruption)
    return status(outcomes, bool(found.failure) or any(r.failed(OURS) for r in results))
