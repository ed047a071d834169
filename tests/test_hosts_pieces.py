"""Data of many pieces, of which one rank has much more than the others, in groups over hosts.

What passes between hosts is cut into pieces, whose memory is used again and again: a piece that
comes too early or too late would have another one's data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, RankContext, fresh
from reference import as_bits, left_fold, short
from sites import PROCESSES, only_on
from torch import Tensor

from pycollect.distributed import options

pytestmark = [
    pytest.mark.skipif(not OURS, reason="PYCOLLECT_HOST is pycollect's"),
    only_on(PROCESSES, "names its own hosts"),
]

FEW = (40, 5000)  # elements of most ranks' blocks, and of one rank's
MANY = (60_000, 1_500_000)  # some MiB: more pieces than are under way at a time
SIXTY_FOUR = "".join(chr(ord("0") + host) for host in range(64))
QUICK = ("abcd", "abab", "abbbbbbbbb")
PLACEMENTS = ("ab", "aaaab", "aaaaaabbbbbb", "abbcccc", "abcdefgh", "abbbbbbbbba")

Sizes = Sequence[int]
Call = Callable[[RankContext, Sizes, torch.dtype], bool]
CALLS: list[Call] = []


def block(source: int, number: int, count: int, dtype: torch.dtype) -> Tensor:
    """Values of a rank, different for each block; the order of additions changes a float's bits."""
    bits = torch.arange(count, dtype=torch.int32) * 7919 + 1000003 * source + 104729 * number
    return bits if dtype == torch.int32 else (bits.float().sin() * 10 ** (source % 5)).to(dtype)


def tried(call: Call) -> Call:
    CALLS.append(call)
    return call


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(as_bits(found), as_bits(wanted))


def total(me: RankContext, number: int, count: int, dtype: torch.dtype) -> Tensor:
    return left_fold([block(r, number, count, dtype) for r in range(me.world)], "sum")


@tried
def all_reduce(me: RankContext, sizes: Sizes, dtype: torch.dtype) -> bool:
    x = block(me.rank, 0, max(sizes), dtype)
    dist.all_reduce(x)
    return same(x, total(me, 0, max(sizes), dtype))


@tried
def reduce(me: RankContext, sizes: Sizes, dtype: torch.dtype) -> bool:
    x, ok = block(me.rank, 0, max(sizes), dtype), True
    for root in (0, me.world - 1):
        y = x.clone()
        dist.reduce(y, root)
        ok &= me.rank != root or same(y, total(me, 0, max(sizes), dtype))
    return ok


@tried
def reduce_scatter(me: RankContext, sizes: Sizes, dtype: torch.dtype) -> bool:
    part = torch.empty(sizes[me.rank], dtype=dtype)
    dist.reduce_scatter(part, [block(me.rank, n, size, dtype) for n, size in enumerate(sizes)])
    return same(part, total(me, me.rank, sizes[me.rank], dtype))


@tried
def all_gather(me: RankContext, sizes: Sizes, dtype: torch.dtype) -> bool:
    parts = [torch.empty(size, dtype=dtype) for size in sizes]
    dist.all_gather(parts, block(me.rank, 0, sizes[me.rank], dtype))
    return all(same(part, block(r, 0, sizes[r], dtype)) for r, part in enumerate(parts))


@tried
def broadcast(me: RankContext, sizes: Sizes, dtype: torch.dtype) -> bool:
    ok = True
    for root in (0, me.world - 1):
        x = block(me.rank, 0, max(sizes), dtype)
        dist.broadcast(x, root)
        ok &= same(x, block(root, 0, max(sizes), dtype))
    return ok


@tried
def all_to_all(me: RankContext, sizes: Sizes, dtype: torch.dtype) -> bool:
    """Rank r sends sizes[(r + to) % world] elements."""
    count = [sizes[(me.rank + r) % me.world] for r in range(me.world)]
    sent = torch.cat([block(me.rank, to, count[to], dtype) for to in range(me.world)])
    found = torch.empty(sum(count), dtype=dtype)
    dist.all_to_all_single(found, sent, count, count)
    wanted = [block(r, me.rank, count[r], dtype) for r in range(me.world)]
    return same(found, torch.cat(wanted))


@tried
def gather_and_scatter(me: RankContext, sizes: Sizes, dtype: torch.dtype) -> bool:
    root, count, ranks = me.world - 1, min(sizes), range(me.world)
    parts = [torch.empty(count, dtype=dtype) for _ in ranks] if me.rank == root else None
    dist.gather(block(me.rank, 0, count, dtype), parts, root)
    back = torch.empty(count, dtype=dtype)
    dist.scatter(back, parts, root)
    return same(back, block(me.rank, 0, count, dtype)) and (
        parts is None or all(same(parts[r], block(r, 0, count, dtype)) for r in ranks)
    )


def wrong_calls(
    me: RankContext, counts: tuple[int, int], dtypes: Sequence[torch.dtype]
) -> list[str]:
    few, many = counts
    return [
        f"{call.__name__} of {short(dtype)}, rank {large} has most"
        for dtype in dtypes
        for large in (0, me.world - 1)
        for call in CALLS
        if not call(me, [many if r == large else few for r in range(me.world)], dtype)
    ]


def wrong_with_small_buffers(me: RankContext) -> list[str]:
    me.init("small buffers", pg_options=options(buffer_bytes=4096))
    return wrong_calls(me, FEW, (torch.int32, torch.bfloat16))


@pytest.mark.parametrize(
    "placement", [*QUICK, *[pytest.param(p, marks=pytest.mark.slow) for p in PLACEMENTS]]
)
def test_blocks_of_very_different_sizes(pools, placement):
    dtypes = (torch.int32, torch.bfloat16)
    found = pools(len(placement), placement=placement).run(wrong_calls, MANY, dtypes, seconds=120)
    assert found == [[]] * len(placement)


@pytest.mark.parametrize(
    "placement",
    [
        "abbb",
        pytest.param("abbcccc", marks=pytest.mark.slow),
        pytest.param(SIXTY_FOUR, marks=pytest.mark.slow, id="64-hosts"),
    ],
)
def test_hosts_of_unequal_sizes_with_small_buffers(placement):
    """Each host has other regions in its memory, and all must cut the data into the same pieces."""
    with fresh(len(placement), placement=placement, group=False) as pool:
        found = pool.run(wrong_with_small_buffers, seconds=120)
    assert found == [[]] * len(placement)
