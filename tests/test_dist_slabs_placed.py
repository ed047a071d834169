"""Tensors in GPU memory that the other processes reach, without a device: taken where they are.

The jobs of test_dist_memory.py, with every mixture of ranks whose tensors lie there and ranks whose
do not; who launches what; and the memory's life.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_dist_memory
import torch
import torch.distributed as dist
from dist_pool import OURS, Me, Pools, fresh, pools_of_a_module
from dist_tracts import LARGE, RUNGS, launches, make, reached
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="has memory of its own")


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    for all_pools in pools_of_a_module(beside=None):
        yield all_pools
        for spec, pool in all_pools.made.items():
            assert not pool.whole or pool.run(fouls) == [[]] * spec.world


def fouls(me: Me) -> list[str]:
    return me.fake.gpu.fouls()


def make_flat(count: int, dtype: torch.dtype) -> Tensor:
    return make(count, dtype=dtype)


JOBS = (
    test_dist_memory.ordinary,
    test_dist_memory.same_bits,
    test_dist_memory.views,
    test_dist_memory.lives_on,
)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_what_holds_of_host_memory(pools, job, rung):
    pools(3, staged=f"eager:{rung}").run(job, make_flat, seconds=60.0)


def counted(me: Me) -> dict[str, int]:
    """Launches of a call whose tensors are all placed."""
    dist.barrier()
    dist.all_reduce(torch.ones(1))  # the meeting
    n = me.world * LARGE
    x, whole = make(LARGE), make(n)
    part = whole[me.rank * LARGE :][:LARGE]
    for t in (x, whole):
        t.fill_(1)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "of its part": lambda: dist.all_reduce(part[100 * me.rank :][: LARGE // 2]),
        "of little": lambda: dist.all_reduce(x[me.rank : me.rank + 1]),
        "broadcast": lambda: dist.broadcast(x, 1),
        "reduce": lambda: dist.reduce(x, 1),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, x),
        "all_gather in place": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, whole),
    }
    return {name: launches(me, call) for name, call in calls.items()}


LEADER = (1, 0, 0)  # one launch in all
EACH = (3, 3, 3)  # everybody fetches a part of each
WANTED = {
    "all_reduce": LEADER,
    "of its part": LEADER,
    "of little": LEADER,
    "broadcast": (1, 0, 1),
    "reduce": (0, 1, 0),
    "all_gather": EACH,
    "all_gather in place": EACH,
    "reduce_scatter": (1, 1, 1),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_nothing_is_copied(pools, rung):
    found = pools(3, staged=f"late:{rung}").run(counted)
    assert {name: tuple(f[name] for f in found) for name in WANTED} == WANTED


def by_halves(me: Me) -> list[int]:
    """One rank's tensor lies elsewhere, or is in two pieces; or there is too little of it."""
    dist.all_reduce(torch.ones(1))  # the meeting
    one, two = make(1000).fill_(1), list(make(2000).fill_(1).view(2, 1000))
    if me.rank == 1:
        one, two = torch.ones(1000), [make(1000).fill_(1) for _ in range(2)]
    small = make(10).fill_(me.rank)
    counts = [
        launches(me, lambda: dist.all_reduce(one)),
        launches(me, lambda: dist.all_reduce_coalesced(two)),
        launches(me, lambda: dist.broadcast(small, 1)),
    ]
    assert all(x.eq(me.world).all() for x in (one, *two))
    assert small.eq(1).all()
    return counts


def test_what_is_not_placed_everywhere_goes_through_slots(pools):
    found = pools(3, staged="late:stream").run(by_halves)
    for rank, (one, two, small) in enumerate(found):
        assert min(one, two, small) >= 1, found
        assert rank == 0 or min(one, two) == 2, found  # to the own slot, and from the leader's


def apart(me: Me) -> int:
    me.fake.gpu.live_on(f"GPU {me.rank}")
    dist.all_reduce(torch.ones(1))
    x = make(LARGE).fill_(me.rank)
    count = launches(me, lambda: dist.all_reduce(x))
    assert x.eq(3).all()
    return count


def test_several_gpus_share_the_folds():
    with fresh(3, staged="late:stream") as pool:
        assert pool.run(apart) == [1, 1, 1]


def gradients(me: Me) -> list[bool]:
    """DDP's buckets."""
    os.environ["DDP_DISABLE_COMM_MEM"] = "0"
    net = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 50))
    model = torch.nn.parallel.DistributedDataParallel(
        net, bucket_cap_mb=0.05, gradient_as_bucket_view=True
    )
    for _ in range(3):
        model(torch.randn(7, 100)).square().sum().backward()
    grads = torch.cat([p.grad.flatten() for p in net.parameters()])
    everybody = [torch.empty_like(grads) for _ in range(me.world)]
    dist.all_gather(everybody, grads)
    assert all(torch.equal(e, grads) for e in everybody)
    return [reached(p.grad) for p in net.parameters()]


def test_distributed_data_parallel(pools):
    for found in pools(2, staged="late:stream").run(gradients):
        assert found
        assert all(found), found
