"""Inputs are read when their call runs, in every kind of memory.

Calls of a group run in the order of their issue, so the result of one call can be the input of the
next one without a wait in between.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, RankContext
from sites import slow_on_processes
from torch import Tensor

SHAPE = (30, 30)
pytestmark = pytest.mark.skipif(not OURS, reason="runs two collectives of a group at once")


def strided(x: Tensor) -> Tensor:
    return x.t()


def contiguous(x: Tensor) -> Tensor:
    return x


VIEWS = {"strided": strided, "contiguous": contiguous}


def new(x: Tensor) -> Tensor:
    return torch.full_like(x, -1.0, memory_format=torch.contiguous_format)


def call_that_reads(me: RankContext, x: Tensor, name: str) -> tuple[dist.Work, list[Tensor], int]:
    """Start a call that reads `x`; return its Work, its results, and their multiple of `x`."""
    ranks, root = range(me.world), 1
    mine = [new(x) for _ in ranks]
    product = dist._make_nccl_premul_sum(3.0)
    if name == "all_reduce":
        return dist.all_reduce(x, async_op=True), [x], me.world
    if name == "all_reduce of products":
        return dist.all_reduce(x, product, async_op=True), [x], 3 * me.world
    if name == "reduce":
        results = [x] if me.rank == root else []
        return dist.reduce(x, root, async_op=True), results, me.world
    if name == "broadcast":
        return dist.broadcast(x if me.rank == root else mine[0], root, async_op=True), mine[:1], 1
    if name == "all_gather":
        return dist.all_gather(mine, x, async_op=True), mine, 1
    if name == "gather":
        out = mine if me.rank == root else None
        return dist.gather(x, out, root, async_op=True), out or [], 1
    if name == "scatter":
        lists = [x for _ in ranks] if me.rank == root else None
        return dist.scatter(mine[0], lists, root, async_op=True), mine[:1], 1
    if name == "reduce_scatter":
        return dist.reduce_scatter(mine[0], [x for _ in ranks], async_op=True), mine[:1], me.world
    if name == "reduce_scatter of products":
        work = dist.reduce_scatter(mine[0], [x for _ in ranks], product, async_op=True)
        return work, mine[:1], 3 * me.world
    if name == "all_to_all":
        return dist.all_to_all(mine, [x for _ in ranks], async_op=True), mine, 1
    assert name == "all_to_all_single"
    return dist.all_to_all_single(mine[0], x, async_op=True), mine[:1], 1


CALLS = ("all_reduce", "all_reduce of products", "reduce", "broadcast", "all_gather", "gather")
CALLS += ("scatter", "reduce_scatter", "reduce_scatter of products", "all_to_all")
CALLS += ("all_to_all_single",)


DTYPES = [torch.float32]
DTYPES += [pytest.param(d, marks=slow_on_processes) for d in (torch.bfloat16, torch.int32)]


def dependent_calls(me: RankContext, name: str, dtype: torch.dtype) -> list[str]:
    """The second call's input is the first call's result, and the last rank is late."""
    wrong = []
    for how, view in VIEWS.items():
        x = torch.full(SHAPE, float(me.rank), dtype=torch.float32).to(dtype)
        dist.barrier()
        if me.rank == me.world - 1:
            me.be_late(0.1)
        first = dist.all_reduce(x, async_op=True)
        second, results, times = call_that_reads(me, view(x), name)
        second.wait()
        first.wait()
        wanted = times * sum(range(me.world))
        if name == "broadcast" and me.rank == 1:
            results = [x]
        wrong += [
            f"{how}: {r.flatten()[:3]}, not {wanted}" for r in results if not r.eq(wanted).all()
        ]
    return wrong


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_the_results_of_earlier_calls(pools, name, dtype):
    assert pools(3).run(dependent_calls, name, dtype) == [[]] * 3


def narrow_products(me: RankContext) -> list[float]:
    """PREMUL_SUM of 8-bit floats, which torch itself cannot multiply."""
    x = torch.full((16,), float(me.rank)).to(torch.float8_e4m3fn)
    me.be_late(0.1 * me.rank)
    first = dist.all_reduce(x, async_op=True)
    dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
    first.wait()
    return x.float().tolist()


def test_products_of_narrow_floats(pools):
    assert pools(3).run(narrow_products) == [[18.0] * 16] * 3
