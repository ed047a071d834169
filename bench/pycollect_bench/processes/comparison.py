"""Measurement of one case between processes: every rank runs this code at the same time.

In every round the candidates run in a new order, the same on all ranks. A call's time is that of
its slowest rank; only rank 0 gets the result.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from pycollect._timing import Effort, Timing, no_garbage_collection, ratios

from ..comparison import GPU, RETURN, WALL, CaseResult, Row, clocked
from .candidate import Candidate
from .candidates import DEVICE_PEERS, PEERS, CandidateSet, RankState
from .cases import ProcessCase
from .clocks import LARGEST_IN_BATCHES, CallByCall, InBatches, OnDevice, Seconds, Stopwatch
from .limits import LIMITS
from .rank_device import RankDevice

Samples = list[list[float]]  # by round


class _Turn:
    """A candidate with one way of timing, and its number of samples in every round."""

    def __init__(self, candidate: Candidate, stopwatch: Stopwatch, effort: Effort, of: int) -> None:
        self._candidate, self._watch = candidate, stopwatch
        self.calls = effort.calls(stopwatch.warm(candidate, effort.warmup), of)

    def take(self, number: int) -> Seconds:
        return self._watch.sample(self._candidate, self.calls[number])


def _stopwatches(
    candidate: Candidate, candidate_set: CandidateSet, rank_device: RankDevice
) -> list[Stopwatch]:
    """Return the ways to time a candidate: one, or the host's and the device's clock."""
    spin_barrier = candidate_set.ranks.spin_barrier
    if candidate_set.ranks.apart:
        return [CallByCall(spin_barrier, rank_device, True), OnDevice(spin_barrier, rank_device)]
    if candidate_set.case.nbytes <= LARGEST_IN_BATCHES and not candidate.always_rewritten:
        return [InBatches(spin_barrier)]
    return [CallByCall(spin_barrier, rank_device, False)]


def _rounds(candidate_set: CandidateSet, effort: Effort, seed: int) -> dict[str, Samples]:
    """Return the seconds measured on this rank, by row name."""
    samples: dict[str, Samples] = {}
    rank_device = RankDevice(candidate_set.case.devices[candidate_set.ranks.spin_barrier.rank])
    ways = [
        (c, stopwatch)
        for c in candidate_set.found
        for stopwatch in _stopwatches(c, candidate_set, rank_device)
    ]
    turns = [(c.name, _Turn(c, stopwatch, effort, len(ways))) for c, stopwatch in ways]
    order = random.Random(seed)
    for number in range(max((len(turn.calls) for _, turn in turns), default=0)):
        order.shuffle(turns)
        for name, turn in turns:
            for clock, seconds in turn.take(number).items():
                samples.setdefault(clocked(name, clock), []).append(seconds)
    return samples


def slowest_rank(of_ranks: list[dict[str, Samples]]) -> dict[str, Timing]:
    """Return the time of each call on its slowest rank.

    >>> slowest_rank([{"a": [[1.0, 4.0]]}, {"a": [[2.0, 3.0]]}])["a"].samples
    ((2.0, 4.0),)
    """
    timings = {}
    for name, mine in of_ranks[0].items():
        all_ranks = [samples[name] for samples in of_ranks]
        rounds = (zip(*(rank[i] for rank in all_ranks), strict=True) for i in range(len(mine)))
        timings[name] = Timing(tuple(tuple(map(max, calls)) for calls in rounds))
    return timings


def _row(candidate: Candidate, clock: str, timings: Mapping[str, Timing], wrong: int | None) -> Row:
    name = clocked(candidate.name, clock)
    timing = timings[name]
    ways = [clocked(limit, clock) for limit in LIMITS]
    limit = next((timings[w].rounds for w in ways if w in timings and clock != RETURN), None)
    theirs = {peer: clocked(peer, clock) for peer in (*PEERS, *DEVICE_PEERS)}
    return Row(
        name,
        candidate.kind,
        timing,
        wrong=wrong if clock == WALL else None,
        limit_share=statistics.median(ratios(limit, timing.rounds)) if limit else None,
        speedup={
            p: ratios(timings[n].rounds, timing.rounds) for p, n in theirs.items() if n in timings
        },
        clock=clock,
    )


def run_case(
    case: ProcessCase, ranks: RankState, names: tuple[str, ...], effort: Effort, seed: int
) -> CaseResult | None:
    """Measure the candidates of these names and check their results; rank 0 gets the result.

    Candidates that refuse the case are listed in `not_run`; every other error is raised.
    """
    candidate_set = CandidateSet(case, ranks, names)
    with no_garbage_collection():
        mine = _rounds(candidate_set, effort, seed)
    wrong = {}
    for candidate in candidate_set.found:
        if candidate.checked:
            wrong[candidate.name] = int(sum(ranks.spin_barrier.gather(candidate.checked())))
    first = ranks.spin_barrier.rank == 0
    everyone: list[Any] | None = [None] * ranks.spin_barrier.world if first else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return None
    timings = slowest_rank(everyone)
    rows = [
        _row(candidate, clock, timings, wrong.get(candidate.name))
        for candidate in candidate_set.found
        for clock in (WALL, RETURN, GPU)
        if clocked(candidate.name, clock) in timings
        and (candidate.kind, clock) != ("limit", RETURN)  # the return clock has no limit
    ]
    return CaseResult(case, rows, candidate_set.not_run)
