"""Measurement of one case between processes: every rank runs this code at the same time.

In every round the candidates run in a new order, the same on all ranks. The time of a call is that
of its slowest rank. Only rank 0 gets the result.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pycollect._timing import Effort, Sampler, Timing, interleave, shuffled

from ..comparison import GPU, RETURN, WALL, CaseResult, Row, clocked, compared
from .candidate import Candidate
from .candidates import PEERS, CandidateSet, RankState
from .cases import ProcessCase
from .speed_limit import LIMITS
from .timers import Clocks


def _measured(candidate_set: CandidateSet, effort: Effort, seed: int) -> dict[str, Timing]:
    """Return this rank's times by row name."""
    case, ranks = candidate_set.case, candidate_set.ranks
    clocks = Clocks(ranks.spin_barrier, case.devices[ranks.spin_barrier.rank], ranks.both_clocks)
    samplers: dict[str, Sampler] = {}
    for candidate in candidate_set.found:
        samplers |= clocks.samplers(candidate, case.nbytes)
    # All ranks take the same turns. The order is shuffled, because the threads of a peer may still
    # be busy after its turn: they must not always disturb the same candidate.
    timings = interleave(samplers, effort, shuffled(seed), clocks.slowest)
    for name, seconds in clocks.returned.items():
        timings[clocked(name, RETURN)] = timings[name].of_same_calls(seconds)
    return timings


def slowest_rank(of_ranks: list[dict[str, Timing]]) -> dict[str, Timing]:
    """Return the time of each call on its slowest rank.

    >>> ranks = [{"a": Timing(((1.0, 4.0),))}, {"a": Timing(((2.0, 3.0),))}]
    >>> slowest_rank(ranks)["a"].samples
    ((2.0, 4.0),)
    """

    def slowest(name: str) -> Timing:
        rounds = zip(*(timings[name].samples for timings in of_ranks), strict=True)
        return Timing(tuple(tuple(map(max, zip(*ranks, strict=True))) for ranks in rounds))

    return {name: slowest(name) for name in of_ranks[0]}


def _row(candidate: Candidate, clock: str, timings: dict[str, Timing], wrong: int | None) -> Row:
    name = clocked(candidate.name, clock)
    ways = [clocked(limit, clock) for limit in LIMITS]
    limit = next((timings[w].rounds for w in ways if w in timings and clock != RETURN), None)
    theirs = {peer: clocked(peer, clock) for peer in PEERS}
    wrong = wrong if clock == WALL else None
    row = Row(name, candidate.kind, timings[name], wrong, clock=clock)
    return compared(row, timings, limit, theirs)


def run_case(
    case: ProcessCase, ranks: RankState, names: tuple[str, ...], effort: Effort, seed: int
) -> CaseResult | None:
    """Measure the candidates of these names and check their results; rank 0 gets the result.

    Candidates that refuse the case are listed in `not_run`; every other error is raised.
    """
    candidate_set = CandidateSet(case, ranks, names)
    mine = _measured(candidate_set, effort, seed)
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
        and (candidate.kind, clock) != ("limit", RETURN)  # no limit is measured until the return
    ]
    return CaseResult(case, rows, candidate_set.not_run)
