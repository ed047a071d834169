"""Zero-copy calls on CUDA tensors in memory that the other processes can access.

Covers every mixture of ranks with zero-copy and ordinary tensors, and the launches of each rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import test_dist_memory
import torch
import torch.distributed as dist
from dist_pool import OURS, RankContext, fresh, pools_of_sites
from dist_sites import LARGE, Emulated, site_worlds, until
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="tests the symmetric memory of pycollect")
pools = pytest.fixture(pools_of_sites, scope="module")


def in_symmetric_gpu_memory(me: RankContext, job: Callable[..., Any]) -> None:
    job(me, lambda count, dtype: me.site.symmetric(count, dtype=dtype))


JOBS = (test_dist_memory.same_bits, test_dist_memory.views, test_dist_memory.reuse_after_calls)
SITES = site_worlds("eager:cuda_ipc", "cuda:cuda_ipc")


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize(("site", "world"), SITES)
def test_jobs_of_the_symmetric_heap(pools, site, world, job):
    pools(world, site=site).run(in_symmetric_gpu_memory, job, seconds=180.0)


def test_ordinary_tensors(pools):
    pools(3, site="eager:cuda_ipc").run(in_symmetric_gpu_memory, test_dist_memory.ordinary)


# --- launches of each rank ------------------------------------------------------------------------


def bootstrap(me: RankContext) -> None:
    dist.all_reduce(torch.ones(1))
    dist.barrier()


def launches_of_calls(me: RankContext) -> dict[str, int]:
    """Kernel launches of this rank, for calls with zero-copy tensors on all ranks."""
    bootstrap(me)
    x, whole = me.site.symmetric(LARGE).fill_(1), me.site.symmetric(me.world * LARGE).fill_(1)
    part = whole[me.rank * LARGE :][:LARGE]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce of a slice": lambda: dist.all_reduce(part[100 * me.rank :][: LARGE // 2]),
        "all_reduce of one element": lambda: dist.all_reduce(x[me.rank : me.rank + 1]),
        "broadcast": lambda: dist.broadcast(x, 1),
        "reduce": lambda: dist.reduce(x, 1),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, x),
        "all_gather in place": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, whole),
    }
    return {name: me.site.launches(call) for name, call in calls.items()}


LEADER, ROOT = (1, 0, 0), (0, 1, 0)  # one launch in total: on rank 0, on the root
EACH = (1, 1, 1)  # one launch on each rank
WANTED = dict.fromkeys(("all_reduce", "all_reduce of a slice", "all_reduce of one element"), LEADER)
WANTED |= dict.fromkeys(("broadcast", "reduce"), ROOT)
WANTED |= dict.fromkeys(("all_gather", "all_gather in place", "reduce_scatter"), EACH)


def test_zero_copy_calls_take_one_launch(pools):
    found = pools(3, site="late:cuda_ipc").run(launches_of_calls)
    assert {name: tuple(f[name] for f in found) for name in WANTED} == WANTED


def without_zero_copy(me: RankContext) -> list[tuple[int, int]]:
    """Calls without zero-copy: one rank's tensor is ordinary, or in two pieces, or too small."""
    bootstrap(me)
    one, two = (
        me.site.symmetric(1000).fill_(1),
        list(me.site.symmetric(2000).fill_(1).view(2, 1000)),
    )
    if me.rank == 1:
        one, two = torch.ones(1000), [me.site.symmetric(1000).fill_(1) for _ in range(2)]
    small = me.site.symmetric(10).fill_(me.rank)
    counts = []
    for call in (
        lambda: dist.all_reduce(one),
        lambda: dist.all_reduce_coalesced(two),
        lambda: dist.broadcast(small, 1),
    ):
        counts.append(me.site.launches_and_copies(call))
    assert all(x.eq(me.world).all() for x in (one, *two))
    assert small.eq(1).all()
    return counts


def test_calls_without_zero_copy_are_staged(pools):
    """Copy engines fill staging buffers: a kernel would need the GPU to switch to its process."""
    fold, fill, fetch = (1, 0), (0, 1), (1, 0)
    found = pools(3, site="late:cuda_ipc").run(without_zero_copy)
    for rank, (one, two, small) in enumerate(found):
        assert one == (fold if rank == 0 else (1, 1)), found
        assert two == (fold, (1, 2), (1, 1))[rank], found  # rank 1 has two separate tensors
        assert small == (fill if rank == 1 else fetch), found


def by_name(me: RankContext) -> list[str]:
    """Run every algorithm on zero-copy and ordinary tensors of integers; results are exact."""
    import pycollect

    wrong = []
    for name in pycollect.algorithms("all_reduce"):
        site = me.start(f"by_{name}", Emulated("late:cuda_ipc", algorithm=name))
        for turn in range(4):
            for x in (site.symmetric(LARGE // 10), site.symmetric(100), torch.empty(LARGE // 10)):
                dist.all_reduce(x.fill_(me.rank + turn))
                if not bool(x.eq(6 + 4 * turn).all()):
                    wrong.append(f"{name}, turn {turn}, {x.numel()} elements: {x.unique()}")
        dist.destroy_process_group()
        del x
        wrong += [str(left) for left in (site.unreleased(), site.violations()) if left]
    return wrong


def test_every_algorithm():
    with fresh(4, group=False) as pool:
        assert pool.run(by_name, seconds=60.0) == [[]] * 4


def random_calls(me: RankContext, seed: int, calls: int) -> list[str]:
    """A series of collectives with zero-copy tensors on some ranks, on streams of unlike speed."""
    common, own = random.Random(seed), random.Random(seed * 100 + me.rank)
    bootstrap(me)
    me.site.run_ahead()
    checks, works = [], []
    for i in range(calls):
        count = common.choice((1, 1000, 9000, LARGE))
        kind, root = (
            common.choice(("all_reduce", "broadcast", "all_gather", "reduce_scatter")),
            common.randrange(me.world),
        )
        all_symmetric, one_symmetric = common.random() < 0.5, own.random() < 0.5

        def new(n: int, value: float, symmetric: bool = all_symmetric or one_symmetric) -> Tensor:
            return (me.site.symmetric(n) if symmetric else torch.empty(n)).fill_(value)

        x, whole = new(count, me.rank + i), new(me.world * count, i + 1)
        if kind == "all_reduce":
            works.append(dist.all_reduce(x, async_op=True))
            checks.append((x, me.world * i + sum(range(me.world))))
        elif kind == "broadcast":
            works.append(dist.broadcast(x, root, async_op=True))
            checks.append((x, root + i))
        elif kind == "all_gather":
            works.append(dist.all_gather_into_tensor(whole, x, async_op=True))
            checks += [(part, r + i) for r, part in enumerate(whole.view(me.world, count))]
        else:
            works.append(dist.reduce_scatter_tensor(x, whole, async_op=True))
            checks.append((x, me.world * (i + 1)))
        if own.random() < 0.2:
            me.site.run_ahead(own.choice((0.0, 0.0001, 0.002)))
    assert all(until(work.is_completed, 30.0) for work in works)
    me.site.resume()
    return [f"check {n}" for n, (x, value) in enumerate(checks) if not bool(x.eq(value).all())]


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture(pools, seed):
    site = ("late:cuda_ipc", "eager:cuda_ipc")[seed % 2]
    assert pools(3, site=site).run(random_calls, seed, 40, seconds=60.0) == [[]] * 3
