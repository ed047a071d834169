"""Groups over hosts of unequal sizes with small staging buffers.

A host that keeps more of a call's data in its buffers has smaller regions than another one, so it
needs more runs; all hosts must cut the data into the same pieces.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, RankContext
from sites import PROCESSES, only_on

from pycollect.distributed import options

pytestmark = [
    pytest.mark.skipif(not OURS, reason="PYCOLLECT_HOST is pycollect's"),
    only_on(PROCESSES, "names its own hosts"),
]

PLACEMENTS = ("abbb", "aaaab", "abcca", "abbcccc")
QUICK = "abbb"
COUNTS = (1, 40, 375, 5000)  # elements of 4 bytes; 375 fit into one run on some hosts only


def data(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32) * 7 + 1000003 * rank


def split(source: int, target: int, count: int) -> int:
    """The elements that a rank sends to another one, a different number for each two ranks."""
    return count * ((source + 2 * target) % 4) // 3


def all_reduce(me: RankContext, count: int, group: dist.ProcessGroup) -> bool:
    x = data(me.rank, count)
    dist.all_reduce(x, group=group)
    return torch.equal(x, sum(data(rank, count) for rank in range(me.world)))


def broadcast(me: RankContext, count: int, group: dist.ProcessGroup) -> bool:
    x = data(me.rank, count)
    dist.broadcast(x, me.world - 1, group=group)
    return torch.equal(x, data(me.world - 1, count))


def all_gather(me: RankContext, count: int, group: dist.ProcessGroup) -> bool:
    whole = torch.empty(count * me.world, dtype=torch.int32)
    dist.all_gather_into_tensor(whole, data(me.rank, count), group=group)
    return torch.equal(whole, torch.cat([data(rank, count) for rank in range(me.world)]))


def reduce_scatter(me: RankContext, count: int, group: dist.ProcessGroup) -> bool:
    part = torch.empty(count, dtype=torch.int32)
    dist.reduce_scatter_tensor(part, data(me.rank, count * me.world), group=group)
    whole = sum(data(rank, count * me.world) for rank in range(me.world))
    return torch.equal(part, whole[count * me.rank :][:count])


def all_to_all(me: RankContext, count: int, group: dist.ProcessGroup) -> bool:
    ranks = range(me.world)
    sent = [split(me.rank, to, count) for to in ranks]
    received = [split(source, me.rank, count) for source in ranks]
    result = torch.empty(sum(received), dtype=torch.int32)
    dist.all_to_all_single(result, data(me.rank, sum(sent)), received, sent, group=group)
    parts = []
    for source in ranks:
        before = sum(split(source, to, count) for to in range(me.rank))
        parts.append(data(source, before + received[source])[before:])
    return torch.equal(result, torch.cat(parts))


def gather(me: RankContext, count: int, group: dist.ProcessGroup) -> bool:
    root, ranks = me.world - 1, range(me.world)
    parts = [torch.empty(count, dtype=torch.int32) for _ in ranks] if me.rank == root else None
    dist.gather(data(me.rank, count), parts, root, group=group)
    return parts is None or all(torch.equal(parts[r], data(r, count)) for r in ranks)


CALLS: tuple[Callable[[RankContext, int, dist.ProcessGroup], bool], ...] = (
    all_reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    all_to_all,
    gather,
)


def wrong_calls(me: RankContext, buffer_bytes: int) -> list[str]:
    group = dist.new_group(backend="pycollect", pg_options=options(buffer_bytes=buffer_bytes))
    wrong = [
        f"{call.__name__} of {count}"
        for count in COUNTS
        for call in CALLS
        if not call(me, count, group)
    ]
    dist.destroy_process_group(group)
    return wrong


@pytest.mark.parametrize("buffer_bytes", [4096, 12288, 1 << 16])
@pytest.mark.parametrize(
    "placement", [pytest.param(p, marks=[] if p == QUICK else pytest.mark.slow) for p in PLACEMENTS]
)
def test_all_hosts_cut_the_data_into_the_same_pieces(pools, placement, buffer_bytes):
    found = pools(len(placement), placement=placement).run(wrong_calls, buffer_bytes)
    assert found == [[]] * len(placement)
