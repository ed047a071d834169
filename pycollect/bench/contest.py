"""Measure one case: everyone who takes part, interleaved, and what follows from their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pycollect import _C

from .cases import COLLECTIVES, Call, Case, Workspace
from .gpu import GRAPH_CALLS, gpu_time, graph_of
from .measure import Effort, Sampler, Timing, after_rewrite, batched, interleave, ratios
from .peers import limits, peer

# What `algorithm=None` is called in tables.
DEFAULT = "default"
INSIDE = "inside"
NAIVE = "naive"
# The clocks: that of the process, the GPU's, and the GPU's for a call in a graph; between processes
# also that of the process until the call returns. Rows of all but the first are named after the
# first, such as default:gpu.
WALL, GPU, GRAPH, RETURN = "wall", "gpu", "graph", "return"

TimeAllReduce = Callable[[Sequence[Tensor], str, "str | None", int], list[float]]


@dataclass(frozen=True)
class Row:
    """One contestant's result. `limit_share` is 1.0 at the limit; `wrong` counts elements.

    `limit_rounds` are the limit's seconds by round; `speedup` has, by peer, the ratios of the
    peer's time to this one's, also by round.
    """

    name: str
    kind: str  # "pycollect", "inside", "peer" or "limit"
    timing: Timing
    wrong: int | None = None
    limit_share: float | None = None
    limit_rounds: list[float] | None = None
    speedup: dict[str, list[float]] = field(default_factory=dict)
    clock: str = WALL

    def times_faster_than(self, peer_name: str) -> float | None:
        """The median over the rounds, or None where the peer did not run."""
        rounds = self.speedup.get(peer_name)
        return statistics.median(rounds) if rounds else None


@dataclass(frozen=True)
class CaseResult:
    """All rows of a case, and who could not run and why."""

    case: Case
    rows: list[Row]
    not_run: dict[str, str]

    def row(self, name: str) -> Row | None:
        """Return the row of that name, if it was measured."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def limit(self) -> Row | None:
        """The faster of the ways to measure the limit."""
        rows = [row for row in self.rows if row.kind == "limit" and row.clock == WALL]
        return min(rows, key=lambda row: row.timing.percentile(50), default=None)


@dataclass(frozen=True)
class Contestants:
    """Whom to measure: algorithms of pycollect (None is its own choice) and peers."""

    algorithms: tuple[str | None, ...] = (None,)
    peers: tuple[str, ...] = ("naive", "stack")
    inside: bool = True


def time_inside() -> TimeAllReduce | None:
    """Return the extension's own loop around all_reduce, which leaves Python out of the time."""
    function: TimeAllReduce | None = getattr(_C, "time_all_reduce", None)
    return function


def _on_zeros(
    loop: TimeAllReduce, workspace: Workspace, algorithm: str | None, calls: int
) -> list[float]:
    workspace.rewrite(0)  # no op makes anything but zeros of zeros, however often it runs
    return loop(workspace.firsts, workspace.case.op, algorithm, calls)


class _Entry:
    """Collects the samplers of a case, with the reasons of those that cannot run."""

    def __init__(self, case: Case, whom: Contestants) -> None:
        self.case = case
        self.workspace = Workspace(case)
        self.samplers: dict[str, Sampler] = {}
        self.kinds: dict[str, str] = {}
        self.clocks: dict[str, str] = {}
        self.calls: dict[str, Call] = {}
        self.not_run: dict[str, str] = {}
        for algorithm in whom.algorithms:
            self._ours(algorithm)
        on_one_cpu = case.one_memory and not case.on_gpus
        if whom.inside and case.collective == "all_reduce" and on_one_cpu:
            self._inside(whom.algorithms[0])
        for name in whom.peers:
            self._try(name, "peer", partial(peer, name, case, self.workspace))
        if case.one_memory:
            self._limits()

    def _try(self, name: str, kind: str, make: Callable[[], Call]) -> None:
        """Add a contestant, unless it refuses this case; other failures are not caught."""
        self.workspace.rewrite()
        try:
            call = make()
            call()
        except (TypeError, ValueError, NotImplementedError) as error:
            self.not_run[name] = str(error)
            return
        self._add(name, kind, call, self.workspace.rewrite)
        self.calls[name] = call
        if kind == "pycollect" and self.case.on_gpus and self.case.one_memory:
            self._add_graph(name, call)

    def _add(self, name: str, kind: str, call: Call, rewrite: Call) -> None:
        self.samplers[name] = after_rewrite(call, rewrite, self.workspace.synchronize)
        self.kinds[name] = kind
        if self.case.on_gpus:
            sampler = gpu_time(call, rewrite, self.case.devices)
            self._add_clock(name, GPU, sampler)

    def _add_clock(self, name: str, clock: str, sampler: Sampler) -> None:
        timed = clocked(name, clock)
        self.samplers[timed], self.clocks[timed] = sampler, clock
        self.kinds[timed] = self.kinds[name]

    def _add_graph(self, name: str, call: Call) -> None:
        """The same call many times in a graph, on zeros, which no op changes."""
        zeros = partial(self.workspace.rewrite, 0)
        replay = graph_of(call, GRAPH_CALLS)
        sampler = gpu_time(replay, zeros, self.case.devices, GRAPH_CALLS)
        self._add_clock(name, GRAPH, sampler)
        self.calls[clocked(name, GRAPH)] = graph_of(call, 1)

    def _ours(self, algorithm: str | None) -> None:
        how: dict[str, Any] = {"algorithm": algorithm}
        call = COLLECTIVES[self.case.collective].call
        self._try(algorithm or DEFAULT, "pycollect", partial(call, self.workspace, how))

    def _inside(self, algorithm: str | None) -> None:
        loop = time_inside()
        if loop is None:
            self.not_run[INSIDE] = "this build of pycollect has no _C.time_all_reduce"
        elif (algorithm or DEFAULT) in self.samplers:
            self.samplers[INSIDE] = partial(_on_zeros, loop, self.workspace, algorithm)
            self.kinds[INSIDE] = "inside"

    def _limits(self) -> None:
        ways = limits(self.workspace)
        for name, (call, rewrite) in ways.items():
            self._add(name, "limit", call, rewrite)
        if INSIDE in self.samplers:
            # Inside, the buffers are not rewritten, and no torch call is paid for: neither by the
            # limit, so what a call on one element costs is taken off.
            self.samplers["_warm"] = batched(ways["memory_flat"][0], 1)
            self.samplers["_call"] = batched(partial(torch.ones(1).mul_, 1.0), 1)


def _median_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    return statistics.median(ratios(slow, fast))


def clocked(name: str, clock: str) -> str:
    """Return the name of a contestant's row by that clock.

    >>> clocked("naive", "wall"), clocked("naive", "gpu")
    ('naive', 'naive:gpu')
    """
    return name if clock == WALL else f"{name}:{clock}"


def _limit(entry: _Entry, timings: dict[str, Timing], kind: str, clock: str) -> list[float] | None:
    """The seconds a contestant of this kind is held against, by round, or None if unknown."""
    if kind == "inside":
        if "_warm" not in timings:
            return None
        call = timings["_call"].rounds
        work = [t - c for t, c in zip(timings["_warm"].rounds, call, strict=True)]
        # Where the work is much shorter than the call, the difference is noise.
        return work if min(work) > statistics.median(call) / 2 else None
    clock = WALL if clock == WALL else GPU
    limits = [n for n, k in entry.kinds.items() if k == "limit"]
    ways = [timings[n] for n in limits if entry.clocks.get(n, WALL) == clock]
    return min(ways, key=lambda t: t.percentile(50)).rounds if ways else None


def _row(entry: _Entry, timings: dict[str, Timing], name: str, peers: Sequence[str]) -> Row:
    kind, timing = entry.kinds[name], timings[name]
    clock = entry.clocks.get(name, WALL)
    limit = _limit(entry, timings, kind, clock)
    theirs = {p: clocked(p, WALL if clock == WALL else GPU) for p in peers}
    return Row(
        name,
        kind,
        timing,
        wrong=entry.workspace.wrong(entry.calls[name]) if name in entry.calls else None,
        limit_share=_median_ratio(limit, timing.rounds) if limit else None,
        limit_rounds=limit,
        speedup={
            p: ratios(timings[n].rounds, timing.rounds) for p, n in theirs.items() if n in timings
        },
        clock=clock,
    )


def run_case(case: Case, whom: Contestants, effort: Effort) -> CaseResult:
    """Measure every contestant on one case and check what each computes.

    Sizes are bytes, times seconds. Contestants that refuse the arguments are named in `not_run`;
    every other failure is raised.
    """
    entry = _Entry(case, whom)
    timings = interleave(entry.samplers, effort)
    rows = [_row(entry, timings, name, whom.peers) for name in entry.kinds]
    return CaseResult(case, rows, entry.not_run)
