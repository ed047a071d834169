"""What ranks on several hosts have besides others: groups, calls, the link, and its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycollect

from .cases import OPS, Buffers, Call, Case, all_gather, reduce_scatter
from .namespaces import INTERFACE
from .pattern import count_wrong
from .ranks import SpinBarrier

# Seconds of a send of one byte, about, on a busy machine.
_LATENCY = 300e-6
# Calls of a batch whose bytes are counted: enough of them to make the bytes of acknowledgements
# and of address resolution few, and few enough to take no longer than the timed calls.
_COUNTED_BYTES, _LEAST_COUNTED, _MOST_COUNTED = 1 << 20, 4, 64


@dataclass(frozen=True)
class HsdpGroups:
    """Two groups of a rank: the ranks of its host, and those in its place on each host."""

    host: Any
    column: Any


def fast_group() -> Any:
    """Make pycollect's group of all ranks that adds the sums of the hosts."""
    fast = pycollect.distributed.options(hosts="fast")
    return dist.new_group(backend="pycollect", pg_options=fast)


def hsdp_groups(hosts: int, ranks_per_host: int) -> HsdpGroups:
    """Make the groups of HSDP's device mesh, (hosts, ranks of a host)."""
    of_hosts = [list(range(h * ranks_per_host, (h + 1) * ranks_per_host)) for h in range(hosts)]
    columns = [list(column) for column in zip(*of_hosts, strict=True)]
    split: Any = dist.new_subgroups_by_enumeration  # torch has no type annotations for it
    host, _ = split(of_hosts, backend="pycollect")
    column, _ = split(columns, backend="gloo")
    return HsdpGroups(host, column)


def hsdp_call(buffers: Buffers, groups: HsdpGroups) -> Call:
    """Return the all_reduce that HSDP composes, in place; a buffer of uneven parts is padded."""
    case, tensor = buffers.case, buffers.input
    if case.collective != "all_reduce":
        raise NotImplementedError(f"HSDP composes an all_reduce, no {case.collective}")
    op, count, ranks = OPS[case.op], tensor.numel(), dist.get_world_size(groups.host)
    part = -(-count // ranks)
    shard = torch.empty(part, dtype=tensor.dtype)
    even = part * ranks == count
    whole = tensor if even else torch.zeros(part * ranks, dtype=tensor.dtype)

    def call() -> None:
        if not even:
            whole[:count].copy_(tensor)
        reduce_scatter(shard, whole, op, groups.host)
        dist.all_reduce(shard, op, groups.column)
        all_gather(whole, shard, groups.host)
        if not even:
            tensor.copy_(whole[:count])

    return call


def link_call(case: Case, rank: int, ranks_per_host: int, rate: float | None) -> Call:
    """Return this rank's part of the limit: one send between the first two hosts.

    Ranks without a part sleep for about its duration, because their barrier takes time of the core.
    """
    data = torch.zeros(case.nbytes, dtype=torch.uint8)
    if rank == 0:
        return partial(dist.send, data, ranks_per_host)
    if rank == ranks_per_host:
        return partial(dist.recv, data, 0)
    return partial(time.sleep, _LATENCY + (8 * case.nbytes / rate if rate else 0))


def fold_checked(buffers: Buffers, call: Call, check: Callable[[], int]) -> int:
    """Return this rank's wrong elements, and those that differ in a bit from the fold of random
    inputs.

    The fold adds the inputs from the left in rank order, in float32 or wider, and rounds once.
    """
    case, wrong = buffers.case, check()
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
    parts = case.spec.parts(case, buffers.rank)
    whole = torch.cat([wanted[at : at + n] for _, at, n in parts])
    return wrong + count_wrong(buffers.output, whole)


def link_bytes(call: Call, nbytes: int, barrier: SpinBarrier) -> dict[str, float]:
    """Return the bytes of one call on the link of the busiest host, divided by the size.

    Collective. The bytes have the headers of packets, and are counted by the interface of each
    host, in a batch of their own.
    """
    calls = max(_LEAST_COUNTED, min(_MOST_COUNTED, _COUNTED_BYTES // max(1, nbytes)))
    barrier.barrier()
    before = own_counters()
    barrier.barrier()
    for _ in range(calls):
        call()
    barrier.barrier()
    sent, received = (
        max(barrier.gather((end - begin) / calls / nbytes))
        for begin, end in zip(before, own_counters(), strict=True)
    )
    return {"sent": sent, "received": received}


def own_counters() -> tuple[int, int]:
    """Return the bytes that the host of this process has sent and received so far."""
    folder = Path("/sys/class/net", INTERFACE, "statistics")
    sent, received = (int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received
