"""What ranks on several hosts have besides others: groups, calls, the link, and its bytes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .cases import OPS, Buffers, Call, Case, all_gather, reduce_scatter
from .namespaces import INTERFACE
from .ranks import SpinBarrier

# Seconds of a send of one byte, about, on a busy machine.
_LATENCY = 300e-6
# Calls of a batch whose bytes are counted: enough of them to make the bytes of acknowledgements
# and of address resolution few, and few enough to take no longer than the timed calls.
_COUNTED_BYTES, _LEAST_COUNTED, _MOST_COUNTED = 1 << 20, 4, 64


def hsdp_groups(hosts: int, ranks_per_host: int) -> tuple[Any, Any]:
    """Make the groups of HSDP's device mesh, and return this rank's two.

    They are the ranks of its host, and those in its place on each host.
    """
    mesh = torch.arange(hosts * ranks_per_host).view(hosts, ranks_per_host)
    split: Any = dist.new_subgroups_by_enumeration  # torch has no type annotations for it
    host, _ = split(mesh.tolist(), backend="pycollect")
    column, _ = split(mesh.T.tolist(), backend="gloo")
    return host, column


def hsdp_call(buffers: Buffers, groups: tuple[Any, Any]) -> Call:
    """Return the all_reduce that HSDP composes, in place."""
    case, tensor = buffers.case, buffers.input
    host, column = groups
    if case.collective != "all_reduce" or case.count % dist.get_world_size(host):
        raise NotImplementedError("HSDP composes an all_reduce of even parts")
    op, shard = OPS[case.op], tensor.new_empty(case.count // dist.get_world_size(host))

    def call() -> None:
        reduce_scatter(shard, tensor, op, host)
        dist.all_reduce(shard, op, column)
        all_gather(tensor, shard, host)

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


def link_bytes(call: Call, nbytes: int, barrier: SpinBarrier) -> dict[str, float]:
    """Return the bytes of one call on the link of the busiest host, divided by the size.

    Collective. The bytes have the headers of packets, and are counted by the interface of each
    host, in a batch of their own.
    """
    calls = max(_LEAST_COUNTED, min(_MOST_COUNTED, _COUNTED_BYTES // max(1, nbytes)))
    folder = Path("/sys/class/net", INTERFACE, "statistics")

    def counters() -> list[int]:
        barrier.barrier()
        return [int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx")]

    before = counters()
    barrier.barrier()
    for _ in range(calls):
        call()
    moved = zip(counters(), before, strict=True)
    sent, received = (max(barrier.gather((now - then) / calls / nbytes)) for now, then in moved)
    return {"sent": sent, "received": received}
