"""Measure one case on one rank of many: all of them run this at the same time.

In every round the contestants come in a new order, the same on all ranks. A call's time is that of
the rank it took longest on; only rank 0 has the result.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..contest import GPU, RETURN, WALL, CaseResult, Row, clocked
from ..measure import Effort, Timing, no_garbage_collection, ratios
from .cases import ProcessCase
from .clocks import LARGEST_IN_BATCHES, CallByCall, InBatches, OnDevice, Seconds, Watch
from .contestant import Contestant
from .contestants import DEVICE_PEERS, PEERS, Entry, Ranks
from .limits import LIMITS
from .place import Place

Samples = list[list[float]]  # by round


class _Turn:
    """A contestant's share of every round by one way of timing, the same on all ranks."""

    def __init__(self, contestant: Contestant, watch: Watch, effort: Effort, of: int) -> None:
        self._contestant, self._watch = contestant, watch
        self.calls = effort.calls(watch.warm(contestant, effort.warmup), of)

    def take(self, number: int) -> Seconds:
        return self._watch.sample(self._contestant, self.calls[number])


def _watches(contestant: Contestant, entry: Entry, place: Place) -> list[Watch]:
    """The ways to time it: one, or both clocks apart."""
    meeting = entry.ranks.meeting
    if entry.ranks.apart:
        return [CallByCall(meeting, place, True), OnDevice(meeting, place)]
    if entry.case.nbytes <= LARGEST_IN_BATCHES and not contestant.always_rewritten:
        return [InBatches(meeting)]
    return [CallByCall(meeting, place, False)]


def _rounds(entry: Entry, effort: Effort, seed: int) -> dict[str, Samples]:
    """What this rank's clocks say, by row."""
    samples: dict[str, Samples] = {}
    place = Place(entry.case.devices[entry.ranks.meeting.rank])
    ways = [(c, watch) for c in entry.found for watch in _watches(c, entry, place)]
    turns = [(c.name, _Turn(c, watch, effort, len(ways))) for c, watch in ways]
    order = random.Random(seed)
    for number in range(max((len(turn.calls) for _, turn in turns), default=0)):
        order.shuffle(turns)
        for name, turn in turns:
            for clock, seconds in turn.take(number).items():
                samples.setdefault(clocked(name, clock), []).append(seconds)
    return samples


def slowest_rank(of_ranks: list[dict[str, Samples]]) -> dict[str, Timing]:
    """Return the time of each call on the rank that it took longest on.

    >>> slowest_rank([{"a": [[1.0, 4.0]]}, {"a": [[2.0, 3.0]]}])["a"].samples
    ((2.0, 4.0),)
    """
    timings = {}
    for name, mine in of_ranks[0].items():
        all_ranks = [samples[name] for samples in of_ranks]
        rounds = (zip(*(rank[i] for rank in all_ranks), strict=True) for i in range(len(mine)))
        timings[name] = Timing(tuple(tuple(map(max, calls)) for calls in rounds))
    return timings


def _row(
    contestant: Contestant, clock: str, timings: Mapping[str, Timing], wrong: int | None
) -> Row:
    name = clocked(contestant.name, clock)
    timing = timings[name]
    ways = [clocked(limit, clock) for limit in LIMITS]
    limit = next((timings[w].rounds for w in ways if w in timings and clock != RETURN), None)
    theirs = {peer: clocked(peer, clock) for peer in (*PEERS, *DEVICE_PEERS)}
    return Row(
        name,
        contestant.kind,
        timing,
        wrong=wrong if clock == WALL else None,
        limit_share=statistics.median(ratios(limit, timing.rounds)) if limit else None,
        limit_rounds=limit,
        speedup={
            p: ratios(timings[n].rounds, timing.rounds) for p, n in theirs.items() if n in timings
        },
        clock=clock,
    )


def run_case(
    case: ProcessCase, ranks: Ranks, names: tuple[str, ...], effort: Effort, seed: int
) -> CaseResult | None:
    """Measure every contestant of these names and check what each computes; return it on rank 0.

    Whoever refuses the case is named in `not_run`; every other failure is raised.
    """
    entry = Entry(case, ranks, names)
    with no_garbage_collection():
        mine = _rounds(entry, effort, seed)
    wrong = {}
    for contestant in entry.found:
        if contestant.checked:
            wrong[contestant.name] = int(sum(ranks.meeting.gather(contestant.checked())))
    first = ranks.meeting.rank == 0
    everyone: list[Any] | None = [None] * ranks.meeting.world if first else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return None
    timings = slowest_rank(everyone)
    rows = [
        _row(contestant, clock, timings, wrong.get(contestant.name))
        for contestant in entry.found
        for clock in (WALL, RETURN, GPU)
        if clocked(contestant.name, clock) in timings
        and (contestant.kind, clock) != ("limit", RETURN)  # of which there is none
    ]
    return CaseResult(case, rows, entry.not_run)
