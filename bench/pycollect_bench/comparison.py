"""Measurement of one case: all candidates, interleaved, and the ratios of their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pycollect import _C
from pycollect._timing import Effort, Sampler, Timing, host_time, interleave, median_ratio, ratios

from .baselines import limits, peer
from .cases import COLLECTIVES, Call, Case, Workspace
from .gpu import GRAPH_CALLS, gpu_time, graph_of

# Name of `algorithm=None` in tables.
DEFAULT = "default"
INSIDE = "inside"
NAIVE = "naive"
# The clocks: the host's until the device is done, the GPU's, the GPU's for a call in a graph, and
# (between processes) the host's until the call returns. Names of rows end with the clock, such as
# default:gpu, unless it is the first.
WALL, GPU, GRAPH, RETURN = "wall", "gpu", "graph", "return"

TimeAllReduce = Callable[[Sequence[Tensor], str, "str | None", int], list[float]]


@dataclass(frozen=True)
class Row:
    """The result of one candidate. `limit_share` is 1.0 at the limit, `wrong` counts elements.

    `speedup[peer]` has the peer's time divided by this candidate's, by round.
    """

    name: str
    kind: str  # "pycollect", "inside", "peer" or "limit"
    timing: Timing
    wrong: int | None = None
    limit_share: float | None = None
    speedup: dict[str, list[float]] = field(default_factory=dict)
    clock: str = WALL

    def times_faster_than(self, peer_name: str) -> float | None:
        """Return the median speedup over the rounds, or None if the peer did not run."""
        rounds = self.speedup.get(peer_name)
        return statistics.median(rounds) if rounds else None


@dataclass(frozen=True)
class CaseResult:
    """All rows of a case. `not_run` has the reason for each candidate that did not run."""

    case: Case
    rows: list[Row]
    not_run: dict[str, str]

    def row(self, name: str) -> Row | None:
        """Return the row of that name, if it was measured."""
        return next((row for row in self.rows if row.name == name), None)

    def failed(self, ours: str) -> bool:
        """Return whether an element is wrong, or pycollect's candidate `ours` did not run.

        Its calls in a graph count as well.
        """
        refused = {name.partition(":")[0] for name in self.not_run}
        return ours in refused or any(row.wrong for row in self.rows)

    @property
    def limit(self) -> Row | None:
        """The row of the fastest limit by the host's clock, or None."""
        rows = [row for row in self.rows if row.kind == "limit" and row.clock == WALL]
        return min(rows, key=lambda row: row.timing.percentile(50), default=None)


@dataclass(frozen=True)
class Candidates:
    """The selected candidates: pycollect's algorithms (None: its own choice) and peers."""

    algorithms: tuple[str | None, ...] = (None,)
    peers: tuple[str, ...] = ("naive", "stack")
    inside: bool = True


def time_inside() -> TimeAllReduce | None:
    """Return the extension's timed loop of all_reduce calls, without Python; None if not built."""
    function: TimeAllReduce | None = getattr(_C, "time_all_reduce", None)
    return function


def _on_zeros(
    loop: TimeAllReduce, workspace: Workspace, algorithm: str | None, calls: int
) -> list[float]:
    workspace.rewrite(0)  # no op changes zeros, however often it runs
    return loop(workspace.firsts, workspace.case.op, algorithm, calls)


class _CandidateSet:
    """The samplers of a case by name, and why other candidates do not run."""

    def __init__(self, case: Case, selection: Candidates) -> None:
        self.case = case
        self.workspace = Workspace(case)
        self.samplers: dict[str, Sampler] = {}
        self.kinds: dict[str, str] = {}
        self.clocks: dict[str, str] = {}
        self.calls: dict[str, Call] = {}
        self.not_run: dict[str, str] = {}
        for algorithm in selection.algorithms:
            self._add_algorithm(algorithm)
        on_one_cpu = case.one_memory and not case.on_gpus
        if selection.inside and case.collective == "all_reduce" and on_one_cpu:
            self._add_inside(selection.algorithms[0])
        for name in selection.peers:
            self._try(name, "peer", partial(peer, name, case, self.workspace))
        if case.one_memory:
            self._add_limits()

    def _try(self, name: str, kind: str, make: Callable[[], Call]) -> None:
        """Add a candidate, or its reason if it refuses the case; other errors are not caught.

        Any error of a peer is the reason why it does not run: what a GPU library needs is not known
        before.
        """
        self.workspace.rewrite()
        try:
            call = make()
            call()
        except (TypeError, ValueError, NotImplementedError) as error:
            self.not_run[name] = str(error)
            return
        except Exception as error:
            if kind != "peer":
                raise
            self.not_run[name] = _first_line(error)
            return
        self._add(name, kind, call, self.workspace.rewrite)
        self.calls[name] = call
        if kind == "pycollect" and self.case.on_gpus and self.case.one_memory:
            try:
                self._add_graph(name, call)
            except RuntimeError as error:  # the calls themselves are still measured
                self.not_run[clocked(name, GRAPH)] = _first_line(error)

    def _add(self, name: str, kind: str, call: Call, rewrite: Call) -> None:
        self.samplers[name] = host_time(call, rewrite, self.workspace.synchronize)
        self.kinds[name] = kind
        if self.case.on_gpus:
            sampler = gpu_time(call, rewrite, self.case.devices)
            self._add_clock(name, GPU, sampler)

    def _add_clock(self, name: str, clock: str, sampler: Sampler) -> None:
        timed = clocked(name, clock)
        self.samplers[timed], self.clocks[timed] = sampler, clock
        self.kinds[timed] = self.kinds[name]

    def _add_graph(self, name: str, call: Call) -> None:
        """Add the call, captured many times in a graph and run on zeros, which no op changes."""
        zeros = partial(self.workspace.rewrite, 0)
        replay, once = graph_of(call, GRAPH_CALLS), graph_of(call, 1)
        sampler = gpu_time(replay, zeros, self.case.devices, GRAPH_CALLS)
        self._add_clock(name, GRAPH, sampler)
        self.calls[clocked(name, GRAPH)] = once

    def _add_algorithm(self, algorithm: str | None) -> None:
        options: dict[str, Any] = {"algorithm": algorithm}
        call = COLLECTIVES[self.case.collective].call
        self._try(algorithm or DEFAULT, "pycollect", partial(call, self.workspace, options))

    def _add_inside(self, algorithm: str | None) -> None:
        loop = time_inside()
        if loop is None:
            self.not_run[INSIDE] = "this build of pycollect has no _C.time_all_reduce"
        elif (algorithm or DEFAULT) in self.samplers:
            self.samplers[INSIDE] = partial(_on_zeros, loop, self.workspace, algorithm)
            self.kinds[INSIDE] = "inside"

    def _add_limits(self) -> None:
        ways = limits(self.workspace)
        for name, (call, rewrite) in ways.items():
            self._add(name, "limit", call, rewrite)
        if INSIDE in self.samplers:
            # The loop inside the extension neither rewrites buffers nor calls torch. So its limit
            # is measured without rewrites, and the time of a torch call on one element subtracted.
            self.samplers["_warm"] = host_time(ways["memory_flat"][0])
            self.samplers["_call"] = host_time(partial(torch.ones(1).mul_, 1.0))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def clocked(name: str, clock: str) -> str:
    """Return the name of a candidate's row for a clock.

    >>> clocked("naive", "wall"), clocked("naive", "gpu")
    ('naive', 'naive:gpu')
    """
    return name if clock == WALL else f"{name}:{clock}"


def _limit(
    entry: _CandidateSet, timings: dict[str, Timing], kind: str, clock: str
) -> list[float] | None:
    """Return the seconds of the limit by round for this kind and clock, or None if unknown."""
    if kind == "inside":
        if "_warm" not in timings:
            return None
        call = timings["_call"].rounds
        work = [t - c for t, c in zip(timings["_warm"].rounds, call, strict=True)]
        # If the work takes much less time than the call, the difference is noise.
        return work if min(work) > statistics.median(call) / 2 else None
    clock = WALL if clock == WALL else GPU
    limits = [n for n, k in entry.kinds.items() if k == "limit"]
    ways = [timings[n] for n in limits if entry.clocks.get(n, WALL) == clock]
    return min(ways, key=lambda t: t.percentile(50)).rounds if ways else None


def compared(
    row: Row, timings: Mapping[str, Timing], limit: list[float] | None, peers: Mapping[str, str]
) -> Row:
    """Return the row with its ratios to the limit's seconds by round, and to the rows of peers."""
    mine = row.timing.rounds
    speedup = {p: ratios(timings[n].rounds, mine) for p, n in peers.items() if n in timings}
    return replace(row, limit_share=median_ratio(limit, mine) if limit else None, speedup=speedup)


def _row(entry: _CandidateSet, timings: dict[str, Timing], name: str, peers: Sequence[str]) -> Row:
    kind, clock = entry.kinds[name], entry.clocks.get(name, WALL)
    wrong = entry.workspace.wrong(entry.calls[name]) if name in entry.calls else None
    theirs = {p: clocked(p, WALL if clock == WALL else GPU) for p in peers}
    row = Row(name, kind, timings[name], wrong, clock=clock)
    return compared(row, timings, _limit(entry, timings, kind, clock), theirs)


def run_case(case: Case, selection: Candidates, effort: Effort) -> CaseResult:
    """Measure every selected candidate on one case, and check its result.

    Sizes are bytes, times seconds. Candidates that refuse the case are listed in `not_run`; every
    other error is raised.
    """
    entry = _CandidateSet(case, selection)
    timings = interleave(entry.samplers, effort)
    rows = [_row(entry, timings, name, selection.peers) for name in entry.kinds]
    return CaseResult(case, rows, entry.not_run)
