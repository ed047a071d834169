"""Measurement of one case between hosts: every rank runs this code at the same time.

Times are those of the slowest rank, in rounds in which the candidates take turns. The bytes on the
links are counted in batches of their own, by the interface of each host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from pycollect._timing import Effort, Sampler, Timing, interleave, shuffled

from ..comparison import CaseResult, Row, compared
from ..processes.candidate import Candidate
from ..processes.cases import CPU, ProcessCase
from ..processes.comparison import slowest_rank
from ..processes.timers import Clocks
from .candidates import LINK, HostCandidates, link_ends
from .groups import GLOO, HostRanks
from .namespaces import INTERFACE

# Calls of a batch whose bytes are counted: enough of them to make the bytes of acknowledgements
# and of address resolution few, and few enough to take no longer than the timed calls.
_COUNTED_BYTES, _LEAST_COUNTED, _MOST_COUNTED = 1 << 20, 4, 64


@dataclass(frozen=True)
class HostRow(Row):
    """The result of one candidate between hosts.

    `sent` and `received` are the bytes of one call on the link of each host, with the headers of
    packets. `first` is the seconds of the candidate's first call of this size.
    """

    sent: tuple[float, ...] = ()
    received: tuple[float, ...] = ()
    first: float | None = None


def run_case(
    case: ProcessCase, ranks: HostRanks, names: tuple[str, ...], effort: Effort, seed: int
) -> CaseResult | None:
    """Measure the candidates of these names and check their results; rank 0 gets the result."""
    candidates = HostCandidates(case, ranks, names)
    mine = _measured(candidates, effort, seed)
    rows = [_counted(candidate, candidates, mine) for candidate in candidates.found]
    everyone: list[dict[str, Timing]] | None = None
    if candidates.rank == 0:
        everyone = [{}] * case.world
    dist.gather_object(mine, everyone)
    if everyone is None:
        return None
    timings = slowest_rank(everyone)
    limit = timings[LINK].rounds
    return CaseResult(case, [_compared(row, timings, limit) for row in rows], candidates.not_run)


def _measured(candidates: HostCandidates, effort: Effort, seed: int) -> dict[str, Timing]:
    """Return this rank's times by candidate; all ranks take the same turns."""
    case = candidates.buffers.case
    clocks = Clocks(candidates.ranks.spin_barrier, CPU, both_clocks=False)
    samplers: dict[str, Sampler] = {}
    for candidate in candidates.found:
        samplers |= clocks.samplers(candidate, case.nbytes)
    timings = interleave(samplers, effort, shuffled(seed), clocks.slowest)
    if candidates.rank not in link_ends(candidates.ranks):  # the sleep of other ranks is no send
        rounds = timings[LINK].samples
        timings[LINK] = Timing(tuple((0.0,) * len(seconds) for seconds in rounds))
    return timings


def _counted(candidate: Candidate, candidates: HostCandidates, mine: dict[str, Timing]) -> HostRow:
    """Return the candidate's row with its bytes and wrong elements; collective."""
    barrier = candidates.ranks.spin_barrier
    candidate.rewrite(0)
    sent, received = _link_bytes(candidate, candidates)
    wrong = None
    if candidate.checked:
        wrong = int(sum(barrier.gather(candidate.checked())))
    first = candidates.first.get(candidate.name)
    timing = mine[candidate.name]
    return HostRow(
        candidate.name, candidate.kind, timing, wrong, sent=sent, received=received, first=first
    )


def _link_bytes(
    candidate: Candidate, candidates: HostCandidates
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the bytes that each host sends and receives in one call; collective."""
    ranks, barrier = candidates.ranks, candidates.ranks.spin_barrier
    fitting = _COUNTED_BYTES // max(1, candidates.buffers.case.nbytes)
    calls = max(_LEAST_COUNTED, min(_MOST_COUNTED, fitting))
    barrier.barrier()
    before = own_counters()
    barrier.barrier()
    for _ in range(calls):
        candidate.call()
    barrier.barrier()
    after = own_counters()
    of_hosts = slice(None, None, ranks.ranks_per_host)
    sent, received = (
        tuple(barrier.gather((end - begin) / calls)[of_hosts])
        for begin, end in zip(before, after, strict=True)
    )
    return sent, received


def _compared(row: HostRow, timings: dict[str, Timing], limit: list[float]) -> HostRow:
    whole = HostRow(**{**vars(row), "timing": timings[row.name]})
    found = compared(whole, timings, limit, {GLOO: GLOO})
    assert isinstance(found, HostRow)
    return found


def own_counters() -> tuple[int, int]:
    """Return the bytes that the host of this process has sent and received so far."""
    folder = Path("/sys/class/net", INTERFACE, "statistics")
    sent, received = (int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received
