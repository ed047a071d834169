"""The candidates between hosts, their calls, and the checks of their results.

gloo and pycollect are one call on a group of all ranks. hsdp is the all_reduce that torch's HSDP
composes: reduce_scatter in the group of the host, all_reduce of the shard over gloo among the ranks
in the same place of each host, all_gather in the group of the host. The limit, link, is one send of
the same bytes by gloo, from the first rank of the first host to the first rank of the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..cases import Call
from ..pattern import count_wrong
from ..processes.candidate import Candidate
from ..processes.candidates import reason
from ..processes.cases import (
    COLLECTIVES,
    OPS,
    Buffers,
    ProcessCase,
    all_gather,
    reduce_scatter,
)
from .groups import FAST, HSDP, OURS, HostRanks, HsdpGroups, agreed_refusal

LINK = "link"
# Seconds of a send of one byte, about, on a busy machine.
_LATENCY = 300e-6


class HostCandidates:
    """The candidates of one case on this rank, and why other candidates do not run.

    `first[name]` is the seconds of the first call of this case, on the slowest rank.
    """

    def __init__(self, case: ProcessCase, ranks: HostRanks, names: tuple[str, ...]) -> None:
        self.ranks, self.rank = ranks, ranks.spin_barrier.rank
        self.buffers = Buffers(case, self.rank, lambda n, dtype: torch.empty(n, dtype=dtype))
        self.found: list[Candidate] = []
        self.not_run: dict[str, str] = {}
        self.first: dict[str, float] = {}
        for name in names:
            self._try(name)
        self._add(LINK, "limit", link_call(case, ranks), None)

    def _try(self, name: str) -> None:
        """Add a candidate, unless it refuses the case on any rank; collective."""
        case, barrier = self.buffers.case, self.ranks.spin_barrier
        if name not in self.ranks.groups:
            self.not_run[name] = self.ranks.refusals[name]
            return
        barrier.barrier()
        begin, refusal = time.perf_counter(), ""
        try:
            call = self._call(name, self.ranks.groups[name])
            call()
        except (TypeError, ValueError, NotImplementedError) as error:
            refusal = reason(error)
        # The error of a peer is the reason why it does not run; one of pycollect fails the run.
        except RuntimeError as error:
            if name in (OURS, FAST):
                raise
            refusal = reason(error)
        took = max(barrier.gather(time.perf_counter() - begin))
        refusal = agreed_refusal(barrier, refusal)
        if refusal:
            self.not_run[name] = refusal
            return
        self.first[name] = took
        is_ours = name in (OURS, FAST)
        folds = name == OURS and COLLECTIVES[case.collective].reduces
        check = partial(_wrong, self.buffers, call, folds and case.dtype.is_floating_point)
        self._add(name, "pycollect" if is_ours else "peer", call, check)

    def _call(self, name: str, group: Any) -> Call:
        case = self.buffers.case
        if name != HSDP:
            return COLLECTIVES[case.collective].call(self.buffers, group)
        if case.collective != "all_reduce":
            raise NotImplementedError(f"HSDP composes an all_reduce, no {case.collective}")
        return hsdp_call(self.buffers, group, self.ranks.ranks_per_host)

    def _add(self, name: str, kind: str, call: Call, check: Callable[[], int] | None) -> None:
        """Add a candidate; the limit is timed call by call, as a batch of sends is no latency."""
        made = Candidate(name, kind, call, self.buffers.rewrite, check, kind == "limit")
        self.found.append(made)


def hsdp_call(buffers: Buffers, groups: HsdpGroups, ranks_per_host: int) -> Call:
    """Return the all_reduce that HSDP composes, in place; a buffer of uneven parts is padded."""
    tensor, op = buffers.input, OPS[buffers.case.op]
    count = tensor.numel()
    part = -(-count // ranks_per_host)
    shard = torch.empty(part, dtype=tensor.dtype)
    even = part * ranks_per_host == count
    whole = tensor if even else torch.zeros(part * ranks_per_host, dtype=tensor.dtype)

    def call() -> None:
        if not even:
            whole[:count].copy_(tensor)
        reduce_scatter(shard, whole, op, groups.host)
        dist.all_reduce(shard, op, groups.column)
        all_gather(whole, shard, groups.host)
        if not even:
            tensor.copy_(whole[:count])

    return call


def link_ends(ranks: HostRanks) -> tuple[int, int]:
    """Return the ranks that send and receive in the measurement of the link."""
    return 0, ranks.ranks_per_host


def link_call(case: ProcessCase, ranks: HostRanks) -> Call:
    """Return this rank's part of one send between the first two hosts.

    Ranks without a part sleep for about its duration, because their barrier takes time of the core.
    """
    data = torch.zeros(case.nbytes, dtype=torch.uint8)
    sender, receiver = link_ends(ranks)
    if ranks.spin_barrier.rank == sender:
        return partial(dist.send, data, receiver)
    if ranks.spin_barrier.rank == receiver:
        return partial(dist.recv, data, sender)
    seconds = 8 * case.nbytes / ranks.rate if ranks.rate else 0
    return partial(time.sleep, _LATENCY + seconds)


def _wrong(buffers: Buffers, call: Call, folds: bool) -> int:
    """Return this rank's wrong elements on exact inputs and, if it folds, on random ones."""
    wrong = buffers.wrong(call)
    return wrong + fold_wrong(buffers, call) if folds else wrong


def fold_wrong(buffers: Buffers, call: Call) -> int:
    """Return this rank's elements that differ in a bit from the fold of random inputs.

    The fold adds the inputs from the left in rank order, in float32 or wider, and rounds once.
    """
    case = buffers.case
    wide = torch.promote_types(case.dtype, torch.float32)
    total = torch.zeros(())
    for rank in range(case.world):
        values = torch.empty(case.count, dtype=wide)
        # No uniform values: those are multiples of 2**-24, whose sums are exact in any order.
        values.normal_(generator=torch.Generator().manual_seed(rank))
        values = values.to(case.dtype)
        if rank == buffers.rank:
            buffers.input.copy_(values)
        total = total + values.to(wide) if rank else values.to(wide)
    call()
    wanted = total.to(case.dtype)
    parts = COLLECTIVES[case.collective].parts(case, buffers.rank)
    return count_wrong(buffers.output, torch.cat([wanted[at : at + n] for _, at, n in parts]))
