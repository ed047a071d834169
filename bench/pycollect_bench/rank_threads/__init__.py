"""Benchmark of ranks as threads: whole worlds, `dist.all_reduce`, and small test cases.

The peers are processes that `torch.multiprocessing.spawn` starts, over gloo and over pycollect.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pycollect._timing import Effort

from ..targets import Outcome
from . import all_reduce, report, targets, whole_worlds
from .process_pool import started_pool
from .small_programs import PROGRAMS, QUICK_PROGRAMS, nothing

PARTS = ("worlds", "all_reduce", "programs")
# Launches in one round beside one world of processes, which takes a thousand times longer.
_LAUNCHES, _LAUNCHES_OF_PROGRAM = 21, 3


@dataclass
class Results:
    """The results of a run, also of an interrupted one."""

    peers: Sequence[str]
    empty: whole_worlds.WorldResult | None = None
    sizes: list[all_reduce.SizeResult] = field(default_factory=list)
    programs: list[whole_worlds.WorldResult] = field(default_factory=list)
    failure: str = ""  # why the processes of the all_reduce did not end well

    @property
    def failed(self) -> bool:
        """Whether a program or a collective failed on threads, or the processes did not end."""
        reasons = [result.not_run for result in self.programs]
        reasons += [result.not_run for result in self.sizes]
        if self.empty:
            reasons.append(self.empty.not_run)
        ours = {all_reduce.THREADS, all_reduce.PARALLEL, whole_worlds.THREADS}
        return bool(self.failure) or any(ours & not_run.keys() for not_run in reasons)

    def judge(self, on_gpu: bool) -> list[Outcome]:
        """Return the outcomes of the targets."""
        return targets.judge(self.empty, self.sizes, self.programs, on_gpu)

    def record(self) -> dict[str, Any]:
        """Return the results for the JSON file."""
        return {
            "worlds": report.world_record(self.empty) if self.empty else None,
            "all_reduce": [report.size_record(result) for result in self.sizes],
            "programs": [report.world_record(result) for result in self.programs],
            "failure": self.failure or None,
            "all_programs": {p: report.total_record(self.programs, p) for p in self.peers},
        }


def measure(
    args: argparse.Namespace, device: torch.device, results: Results, keep: Callable[[], None]
) -> None:
    """Measure the parts that the options name: print each result, append it to `results`, and call
    `keep`.
    """
    print(report.LEGEND, flush=True)
    if "worlds" in args.parts:
        results.empty = whole_worlds.measure(
            "nothing", nothing, args.world, device, args.peers, args.rounds, _LAUNCHES
        )
        print(*report.world_lines(results.empty), sep="\n", flush=True)
        keep()
    if "all_reduce" in args.parts:
        try:
            _measure_sizes(args, device, results, keep)
        except RuntimeError as error:  # of the processes; the times up to then are right
            results.failure = str(error)
    if "programs" in args.parts:
        _measure_programs(args, device, results, keep)


def _measure_sizes(
    args: argparse.Namespace, device: torch.device, results: Results, keep: Callable[[], None]
) -> None:
    print(report.ALL_REDUCE_LEGEND, report.size_head(), sep="\n", flush=True)
    effort = Effort(args.seconds, args.iterations, warmup=1)
    with started_pool(args.world, device) as pool:
        for nbytes in args.sizes:
            floors = nbytes == min(args.sizes)
            result = all_reduce.measure(pool, args.world, device, nbytes, effort, floors)
            results.sizes.append(result)
            print(*report.size_lines(result), sep="\n", flush=True)
            keep()


def _measure_programs(
    args: argparse.Namespace, device: torch.device, results: Results, keep: Callable[[], None]
) -> None:
    print(report.program_head(args.peers), flush=True)
    for name in QUICK_PROGRAMS if args.quick else PROGRAMS:
        result = whole_worlds.measure(
            name, PROGRAMS[name], args.world, device, args.peers, args.rounds, _LAUNCHES_OF_PROGRAM
        )
        results.programs.append(result)
        print(*report.program_lines(result, args.peers), sep="\n", flush=True)
        keep()
    print(*report.total_lines(results.programs, args.peers), sep="\n", flush=True)
