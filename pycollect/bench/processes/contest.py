"""Measure one case on one rank of many: all of them run this at the same time.

In every round the contestants come in a new order, the same on all ranks. A call's time is that of
the rank it took longest on; only rank 0 has the result.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..contest import CaseResult, Row
from ..measure import Effort, Timing, no_garbage_collection, ratios
from .cases import ProcessCase
from .contestants import PEERS, Contestant, Entry, Ranks
from .meeting import Meeting

# Up to here a call costs so little that it is timed in batches. They run on zeros, which no
# reduction changes, and on what the last call left in the caches: its own result, like a producer.
LARGEST_IN_BATCHES = 16 << 10
# A batch takes so long at least, and so many calls: the skew of the ranks at its beginning must not
# count. It is some microseconds, and for each rank more than there are cores a turn of another:
# 8 ranks on 2 cores lost 100 us to it.
_BATCH_SECONDS, _CROWDED_BATCH_SECONDS, _LEAST_BATCH, _MOST_BATCH = 500e-6, 5e-3, 8, 1_000

Samples = list[list[float]]  # by round


def _one_by_one(contestant: Contestant, meeting: Meeting, calls: int) -> list[float]:
    call, seconds = contestant.call, []
    for _ in range(calls):
        contestant.rewrite(1)
        meeting.barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _in_batches(contestant: Contestant, meeting: Meeting, batches: int, batch: int) -> list[float]:
    call, turns, seconds = contestant.call, range(batch), []
    contestant.rewrite(0)
    for _ in range(batches):
        meeting.barrier()
        begin = time.perf_counter()
        for _ in turns:
            call()
        seconds.append((time.perf_counter() - begin) / batch)
    return seconds


class _Turn:
    """A contestant's share of every round, the same on all ranks."""

    def __init__(
        self, contestant: Contestant, case: ProcessCase, meeting: Meeting, effort: Effort, of: int
    ) -> None:
        self._contestant, self._meeting = contestant, meeting
        self._batch = 0
        small = case.nbytes <= LARGEST_IN_BATCHES and not contestant.always_rewritten
        if small:
            self._slowest(effort.warmup)
            each = self._fill_batch()
        else:
            self._slowest(max(1, effort.warmup))
            each = self._slowest(1)
        self.calls = effort.calls(each, of)

    def _fill_batch(self) -> float:
        """Find how many calls take so long that their beginning does not count; return how long."""
        meeting = self._meeting
        crowded = meeting.world > len(os.sched_getaffinity(0))
        wanted = _CROWDED_BATCH_SECONDS if crowded else _BATCH_SECONDS
        self._batch = _LEAST_BATCH
        while True:
            (each,) = _in_batches(self._contestant, meeting, 1, self._batch)
            took = max(meeting.gather(each)) * self._batch
            if took >= wanted or self._batch == _MOST_BATCH:
                return took
            self._batch = min(_MOST_BATCH, math.ceil(1.1 * self._batch * wanted / took))

    def _slowest(self, calls: int) -> float:
        """The seconds that so many calls take with all that belongs to them."""
        self._meeting.barrier()
        begin = time.perf_counter()
        _one_by_one(self._contestant, self._meeting, calls)
        return max(self._meeting.gather(time.perf_counter() - begin))

    def take(self, number: int) -> list[float]:
        if self._batch:
            return _in_batches(self._contestant, self._meeting, self.calls[number], self._batch)
        return _one_by_one(self._contestant, self._meeting, self.calls[number])


def _rounds(entry: Entry, effort: Effort, seed: int) -> dict[str, Samples]:
    meeting, found = entry.ranks.meeting, entry.found
    samples: dict[str, Samples] = {contestant.name: [] for contestant in found}
    turns = {c.name: _Turn(c, entry.case, meeting, effort, len(found)) for c in found}
    order = random.Random(seed)
    names = list(turns)
    for number in range(max((len(turn.calls) for turn in turns.values()), default=0)):
        order.shuffle(names)
        for name in names:
            samples[name].append(turns[name].take(number))
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


def _row(contestant: Contestant, timings: Mapping[str, Timing], wrong: int | None) -> Row:
    timing = timings[contestant.name]
    limit = timings["memory"].rounds if "memory" in timings else None
    return Row(
        contestant.name,
        contestant.kind,
        timing,
        wrong=wrong,
        limit_share=statistics.median(ratios(limit, timing.rounds)) if limit else None,
        limit_rounds=limit,
        speedup={p: ratios(timings[p].rounds, timing.rounds) for p in PEERS if p in timings},
    )


def run_case(
    case: ProcessCase, ranks: Ranks, peers: tuple[str, ...], effort: Effort, seed: int
) -> CaseResult | None:
    """Measure every contestant and check what each computes; return it on rank 0.

    Whoever refuses the case is named in `not_run`; every other failure is raised.
    """
    entry = Entry(case, ranks, peers)
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
    rows = [_row(c, timings, wrong.get(c.name)) for c in entry.found]
    return CaseResult(case, rows, entry.not_run)
