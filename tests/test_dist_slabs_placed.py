"""Tensors in GPU memory that the other processes reach, without a device: taken where they are.

The jobs of test_dist_memory.py, with every mixture of ranks whose tensors lie there and ranks whose
do not; who launches what; and the memory's life.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import dist_fake
import pytest
import test_dist_memory
import torch
import torch.distributed as dist
from dist_fake import alive
from dist_pool import OURS, Caught, Me, Pools, backend_of, caught, fresh, pools_of_a_module
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="has memory of its own")
RUNGS = ("stream", "wait")
GPU = "cuda:0"  # that is not there
LARGE = 300_000  # elements: more than are copied to slots in any collective


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    for all_pools in pools_of_a_module(beside=None):
        yield all_pools
        for spec, pool in all_pools.made.items():
            assert not pool.whole or pool.run(fouls) == [[]] * spec.world


def fouls(me: Me) -> list[str]:
    return me.fake.gpu.fouls()


def make(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    import pycollect

    return pycollect.empty(*size, dtype=dtype, device=GPU)


def make_flat(count: int, dtype: torch.dtype) -> Tensor:
    return make(count, dtype=dtype)


def reached(x: Tensor) -> bool:
    import pycollect

    return pycollect._C.in_tract(backend_of(), x)


def use() -> Any:
    import pycollect

    return pycollect.Allocator(device=GPU).usage()


def launches(me: Me, call: Callable[[], Any]) -> int:
    """How many this rank makes for it."""
    before = me.fake.gpu.books().get("launch", 0)
    call()
    return me.fake.gpu.books().get("launch", 0) - before


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


# --- the memory -----------------------------------------------------------------------------------


def crowded(me: Me) -> tuple[int, int]:
    """More tensors than there are notices for; sums of each."""
    dist.all_reduce(torch.ones(1))  # the meeting
    xs = [make(100).fill_(i + me.rank) for i in range(70)]
    known = sum(map(reached, xs))
    counts = [launches(me, lambda x=x: dist.all_reduce(x)) for x in xs]
    for i, x in enumerate(xs):
        assert x.eq(me.world * i + sum(range(me.world))).all(), i
    return known, counts.count(0)  # a leader launches in any case


def test_more_parts_than_can_be_known():
    with fresh(3, staged="eager:stream") as pool:
        assert pool.run(crowded) == [(64, 0), (64, 64), (64, 64)]


def used_again(me: Me) -> None:
    """What others have open is kept, and given out again; what nobody has open is freed."""
    x = make(LARGE).fill_(1)
    first, before = x.data_ptr(), use()
    assert before.used >= x.nbytes
    assert before.used == before.reserved
    dist.all_reduce(x)
    dist.barrier()
    del x
    end = time.monotonic() + 2.0
    while use().used and time.monotonic() < end:  # the streams' own hold on it ends
        time.sleep(0.001)
    dist.barrier()
    after = use()
    assert (after.used, after.kept) == (0, 0 if me.rank == 0 else before.used)
    y = make(LARGE // 2 + 10).fill_(1)
    assert (y.data_ptr() == first) or me.rank == 0
    dist.all_reduce(y)
    assert y.eq(me.world).all()
    z = make(LARGE).fill_(2)
    assert z.data_ptr() != y.data_ptr()
    dist.all_reduce(z)
    assert z.eq(2 * me.world).all()
    assert y.eq(me.world).all()


def cycles(me: Me, count: int) -> list[Any]:
    left = []
    for i in range(count):
        made, fake = dist_fake.options(f"eager:{RUNGS[i % 2]}")
        me.init(f"cycle_{i}", pg_options=made)
        xs = [make(1000).fill_(1) for _ in range(3)]
        dist.all_reduce(xs[0])
        dist.all_reduce(xs[1])
        if i % 2:
            del xs[0]
        dist.destroy_process_group()
        assert xs[-1].eq(1).all()  # it may stay
        xs.clear()
        gc.collect()
        left += [books] if (books := in_the_end(fake)) or fake.gpu.fouls() else []
    return left


def in_the_end(fake: Any) -> dict[str, int]:
    """What is still given out when the streams have let go of what they have done."""
    end = time.monotonic() + 2.0
    while alive(fake) and time.monotonic() < end:
        time.sleep(0.001)
    return alive(fake)


def test_groups_come_and_go():
    with fresh(2, group=False) as pool:
        assert pool.run(cycles, 20, seconds=60.0) == [[], []]


def outlives(me: Me) -> None:
    made, fake = dist_fake.options("eager:stream")
    me.init("first", pg_options=made)
    x = make(1000).fill_(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    gc.collect()
    assert x.sum().item() == 3000 * me.world
    me.init("second", pg_options=dist_fake.options("eager:stream")[0])
    dist.all_reduce(x)
    assert x.eq(3 * me.world**2).all()
    assert not reached(x)
    error = caught(lambda: make(2**50))
    assert "RuntimeError" in error.kinds, error
    del x
    dist.destroy_process_group()
    assert in_the_end(fake) == {}


def test_a_tensor_outlives_its_group():
    with fresh(2, group=False) as pool:
        pool.run(outlives)


def refused(me: Me) -> list[Caught]:
    import pycollect as pc

    errors = [caught(lambda: pc.empty(3, device="meta")), caught(lambda: make(-1))]
    me.fake.capture(True)
    errors.append(caught(lambda: make(3)))
    me.fake.capture(False)
    gloo = dist.new_group(backend="gloo")
    errors.append(caught(lambda: pc.empty(3, device=GPU, group=gloo)))
    return errors


def test_what_is_refused(pools):
    for meta, negative, captured, foreign in pools(2, staged="late:stream").run(refused):
        assert "allowed are 'cpu' and GPUs" in meta.text
        assert "no dimension may be negative" in negative.text
        assert "under capture" in captured.text
        assert "make it with 'pycollect'" in foreign.text or "has no memory" in foreign.text
        assert {e.kind for e in (meta, negative, captured, foreign)} == {"ValueError"}
