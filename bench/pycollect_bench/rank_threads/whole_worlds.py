"""Seconds of a program from the start to the end of its world, on threads and in processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from pycollect import threads
from pycollect._timing import Timing, host_time, median_ratio, ratios, turns

from . import spawned

THREADS = "threads"


@dataclass(frozen=True)
class WorldResult:
    """The timings of a program by way of running it, and why other ways did not run.

    `first` is the seconds of the first run on threads, in which this process imports the modules
    that the program needs; it is not among the timings.
    """

    program: str
    first: float = 0.0
    timings: dict[str, Timing] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    def speedup(self, peer: str) -> list[float]:
        """Return how many times faster threads were than the peer, by round; [] if unknown."""
        if not {THREADS, peer} <= self.timings.keys():
            return []
        return ratios(self.timings[peer].rounds, self.timings[THREADS].rounds)


def run_on_threads(program: spawned.Program, world: int, device: torch.device) -> None:
    """Run the program with ranks as threads."""
    threads.launch(program, world, device, device=device if device.type == "cuda" else None)


def measure(
    name: str,
    program: spawned.Program,
    world: int,
    device: torch.device,
    backends: Sequence[str],
    rounds: int,
    launches: int,
) -> WorldResult:
    """Run the program in turns: in a round, `launches` times on threads and once on each backend.

    A way that fails leaves the turns, and its error is in `not_run`.
    """
    runs = {THREADS: partial(run_on_threads, program, world, device)}
    for backend in backends:
        runs[backend] = partial(spawned.run, program, world, backend, device)
    not_run: dict[str, str] = {}
    samples: dict[str, list[tuple[float, ...]]] = {way: [] for way in runs}
    begin = time.perf_counter()
    _try(THREADS, partial(host_time(runs[THREADS]), 1), not_run)
    first = time.perf_counter() - begin
    for _, way in turns(list(runs), rounds):
        calls = launches if way == THREADS else 1
        samples[way].append(tuple(_try(way, partial(host_time(runs[way]), calls), not_run)))
    timings = {way: Timing(tuple(taken)) for way, taken in samples.items() if way not in not_run}
    return WorldResult(name, first, timings, not_run)


def _try(way: str, run: Callable[[], list[float]], not_run: dict[str, str]) -> list[float]:
    """Return the seconds of the runs; if one fails or has failed, [] and its error in `not_run`."""
    if way in not_run:
        return []
    try:
        return run()
    except Exception as error:  # any error of a program is the reason why it has no time
        not_run[way] = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        return []


@dataclass(frozen=True)
class Total:
    """The seconds of all programs that ran in both ways, by round; `first`: of the first runs."""

    programs: int
    first: float
    on_threads: list[float]
    of_peer: list[float]

    @property
    def speedup(self) -> float:
        """How many times faster threads were, the median over the rounds."""
        return median_ratio(self.of_peer, self.on_threads)


def total(results: Sequence[WorldResult], peer: str) -> Total | None:
    """Return the total of the programs that ran on threads and on the peer; None without any.

    >>> timings = {"threads": Timing(((1.0,),)), "gloo": Timing(((8.0,),))}
    >>> found = total([WorldResult(name, 0.0, timings) for name in "ab"], "gloo")
    >>> found.on_threads, found.of_peer, found.speedup
    ([2.0], [16.0], 8.0)
    """
    both = [result for result in results if result.speedup(peer)]
    if not both:
        return None
    mine, theirs = (
        [sum(seconds) for seconds in zip(*(r.timings[way].rounds for r in both), strict=True)]
        for way in (THREADS, peer)
    )
    return Total(len(both), sum(result.first for result in both), mine, theirs)
