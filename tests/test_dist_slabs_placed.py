"""Tensors in GPU memory that the other processes reach, without a device: taken where they are.

The jobs of test_dist_memory.py, with every mixture of ranks whose tensors lie there and ranks whose
do not; who launches what; and the memory's life.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import dist_fake
import pytest
import test_dist_memory
import torch
import torch.distributed as dist
from dist_pool import OURS, Me, Pools, fresh, pools_of_a_module
from dist_tracts import LARGE, launches, make, reached
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


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_what_holds_of_host_memory(pools, job):
    pools(3, staged="eager:stream").run(job, make_flat, seconds=60.0)


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


LEADER, ROOT = (1, 0, 0), (0, 1, 0)  # one launch in all
EACH = (1, 1, 1)  # one of each rank's, for all
WANTED = {
    "all_reduce": LEADER,
    "of its part": LEADER,
    "of little": LEADER,
    "broadcast": ROOT,
    "reduce": ROOT,
    "all_gather": EACH,
    "all_gather in place": EACH,
    "reduce_scatter": EACH,
}


def test_nothing_is_copied(pools):
    found = pools(3, staged="late:stream").run(counted)
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


def by_name(me: Me) -> list[str]:
    """Every algorithm, on tensors that all reach and on others by turns: whole numbers, exactly."""
    import pycollect
    from pycollect import _testing

    wrong = []
    for name in pycollect.algorithms("all_reduce"):
        options = pycollect.distributed.options(
            algorithm=name, slab_bytes=dist_fake.SLAB_BYTES, cuda_sync="stream"
        )
        fake = _testing.emulate(options, False, True)
        me.init(f"by_{name}", pg_options=options)
        for turn in range(4):
            for placed in (make(LARGE // 10), make(100), torch.empty(LARGE // 10)):
                x = placed.fill_(me.rank + turn)
                dist.all_reduce(x)
                if not bool(x.eq(6 + 4 * turn).all()):
                    wrong.append(f"{name}, turn {turn}, {x.numel()} elements: {x.unique()}")
        wrong += fake.gpu.fouls()
        dist.destroy_process_group()
    return wrong


def test_every_algorithm():
    with fresh(4, group=False) as pool:
        assert pool.run(by_name, seconds=60.0) == [[]] * 4


def at_random(me: Me, seed: int, calls: int) -> list[str]:
    """Collectives in a row, of tensors that some ranks have placed, on streams of unlike speeds."""
    common, own = random.Random(seed), random.Random(seed * 100 + me.rank)
    dist.all_reduce(torch.ones(1))  # the meeting
    me.fake.look(False)
    checks, works = [], []
    for i in range(calls):
        count = common.choice((1, 1000, 9000, LARGE))
        kind, root = common.choice(("reduce", "spread", "join", "part")), common.randrange(me.world)
        all_placed, one_placed = common.random() < 0.5, own.random() < 0.5

        def new(n: int, value: float, placed: bool = all_placed or one_placed) -> Tensor:
            return (make(n) if placed else torch.empty(n)).fill_(value)

        x, whole = new(count, me.rank + i), new(me.world * count, i + 1)
        if kind == "reduce":
            works.append(dist.all_reduce(x, async_op=True))
            checks.append((x, me.world * i + sum(range(me.world))))
        elif kind == "spread":
            works.append(dist.broadcast(x, root, async_op=True))
            checks.append((x, root + i))
        elif kind == "join":
            works.append(dist.all_gather_into_tensor(whole, x, async_op=True))
            checks += [(part, r + i) for r, part in enumerate(whole.view(me.world, count))]
        else:
            works.append(dist.reduce_scatter_tensor(x, whole, async_op=True))
            checks.append((x, me.world * (i + 1)))
        if own.random() < 0.2:
            me.fake.gpu.pace(own.choice((0.0, 0.0001, 0.002)))
    end = time.monotonic() + 30.0
    while not all(work.is_completed() for work in works) and time.monotonic() < end:
        time.sleep(0.001)
    me.fake.look(True)
    me.fake.gpu.pace(0.0001)
    return [f"check {n}" for n, (x, value) in enumerate(checks) if not bool(x.eq(value).all())]


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture(pools, seed):
    pace = ("late", "eager")[seed % 2]
    assert pools(3, staged=f"{pace}:stream").run(at_random, seed, 40, seconds=60.0) == [[]] * 3


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
