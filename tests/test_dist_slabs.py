"""CUDA tensors through slabs that processes share, without a device: the ranks' memory is the
host's, their streams are lists of work that a thread does late, or at once.

What runs is what runs on GPUs, down to the calls of CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import dist_staged
import pytest
import torch
import torch.distributed as dist
from dist_fake import SLAB_BYTES
from dist_pool import OURS, Caught, Me, Pools, caught, fresh, pools_of_a_module
from reference import short

pytestmark = pytest.mark.skipif(not OURS, reason="has slabs of its own")
WAYS = ("late:stream", "eager:stream")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    for all_pools in pools_of_a_module():
        yield all_pools
        for spec, pool in all_pools.made.items():
            assert not pool.whole or pool.run(fouls) == [[]] * spec.world


def fouls(me: Me) -> list[str]:
    return me.fake.gpu.fouls()


def launches(me: Me) -> int:
    return me.fake.gpu.books().get("launch", 0)


# Quick runs have every dtype on late devices, of which much may be missed, and one on all.
EVERY = [
    pytest.param(
        w,
        d,
        marks=[] if w == "late:stream" or d == torch.float32 else [pytest.mark.slow],
        id=f"{w}-{short(d)}",
    )
    for w in WAYS
    for d in DTYPES
]


@pytest.mark.parametrize(("staged", "dtype"), EVERY)
def test_bits_of_the_host(pools, staged, dtype):
    pool = pools(3, staged=staged, beside=None)
    found = pool.run(dist_staged.sweep, dtype, "cpu", seconds=60.0)
    assert min(run for run, _ in found) > 60
    dist_staged.report([wrong for _, wrong in found])
    assert min(pool.run(launches)) > 60  # or else it went another way


@pytest.mark.parametrize("world", [1, 2, 4])
def test_worlds(pools, world):
    pool = pools(world, staged="eager:stream", beside=None)
    dist_staged.report(
        [wrong for _, wrong in pool.run(dist_staged.sweep, torch.float32, "cpu", seconds=60.0)]
    )


@pytest.mark.parametrize("staged", WAYS)
def test_products_and_own_parts(pools, staged):
    pool = pools(3, staged=staged, beside=None)
    for dtype in (torch.float32, torch.bfloat16):
        dist_staged.report(pool.run(dist_staged.premultiplied, dtype, "cpu"))
        dist_staged.report(pool.run(dist_staged.own_parts, dtype, "cpu"))


SLOT = SLAB_BYTES // 2 // 4  # elements of float32
EDGES = sorted({n + d for n in (SLOT // 3, SLOT, 2 * SLOT, 3 * SLOT) for d in (-16, -1, 0, 1, 16)})


def at_the_edges(me: Me) -> list[str]:
    """Sizes around those of a slot, of all its regions, and of several slots."""
    wrong = []
    for count in EDGES:
        x = torch.arange(count, dtype=torch.float32) % 1013 + me.rank
        wanted = (torch.arange(count) % 1013 * me.world + me.world * (me.world - 1) / 2).float()
        dist.all_reduce(x)
        out = torch.empty(me.world * count)
        dist.all_gather_into_tensor(out, torch.full((count,), float(me.rank)))
        ranks = torch.arange(me.world).float().repeat_interleave(count)
        if not torch.equal(x, wanted) or not torch.equal(out, ranks):
            wrong.append(f"{count} elements")
    return wrong


@pytest.mark.parametrize("staged", WAYS)
def test_sizes_around_a_slot(pools, staged):
    dist_staged.report(pools(3, staged=staged, beside=None).run(at_the_edges))


@pytest.mark.slow
def test_eight_ranks():
    with fresh(8, staged="eager:stream") as pool:
        dist_staged.report(pool.run(at_the_edges, seconds=60.0))
        dist_staged.report(pool.run(ahead, 3, 4, seconds=60.0))


def apart(me: Me) -> list[str]:
    """Ranks on several GPUs share the folds; on one, each has two launches a piece."""
    me.fake.gpu.live_on(f"GPU {me.rank}")
    wrong = at_the_edges(me)
    before = launches(me)
    x = torch.full((300_000,), float(me.rank))
    dist.all_reduce(x)
    made, pieces = launches(me) - before, 300_000 // SLOT + 1
    if not bool((x == 3).all()) or made <= 2 * pieces:
        wrong.append(f"{made} launches for {pieces} pieces")
    return wrong


def test_several_gpus():
    with fresh(3, staged="late:stream") as pool:
        dist_staged.report(pool.run(apart))


def overtaken(me: Me) -> list[float]:
    """What the caller's stream has still to do with a tensor comes before the call."""
    values = []
    for _ in range(10):
        x = torch.full((5,), 7.0)
        if me.rank != 0:
            me.fake.fill_later(x, -1.0)
        work = dist.broadcast(x, 0, async_op=True)
        work.wait()
        values.append(x.sum().item())
        y = torch.zeros(10)[::2]
        me.fake.fill_later(y, 1.0)
        dist.all_reduce(y)
        values.append(y.sum().item())
    return values


@pytest.mark.parametrize("staged", WAYS)
def test_behind_what_the_stream_has_to_do(pools, staged):
    for values in pools(3, staged=staged, beside=None).run(overtaken):
        assert values == [35.0, 15.0] * 10


def given_away(me: Me, calls: int) -> list[float]:
    """Tensors go while the group's stream has to do with them; their stream takes the memory."""
    me.fake.gpu.pace(0.001)
    me.fake.look(False)
    outs = [torch.zeros(64 * me.world) for _ in range(calls)]
    works = []
    for i, out in enumerate(outs):
        x = me.fake.empty(128)[::2] if i % 2 else me.fake.empty(64)
        me.fake.fill_later(x, float(i + me.rank))
        works.append(dist.all_gather_into_tensor(out, x, async_op=True))
        del x
        time.sleep(0.002)
        for n in (64, 128):
            me.fake.fill_later(me.fake.empty(n), -1.0)
    for work in works:
        work.wait()
    me.fake.look(True)
    me.fake.gpu.pace(0.0001)
    dist.barrier()
    dist.all_reduce(torch.ones(3))
    return [
        abs(out.view(me.world, 64).sub(torch.arange(me.world)[:, None] + i)).max().item()
        for i, out in enumerate(outs)
    ]


@pytest.mark.parametrize("staged", WAYS)
def test_memory_is_given_to_nobody_else_while_a_stream_has_to_do_with_it(pools, staged):
    for differences in pools(3, staged=staged, beside=None).run(given_away, 40):
        assert differences == [0.0] * 40


def ahead(me: Me, slow: int, calls: int) -> list[str]:
    """The hosts and most streams run ahead of one whose stream is slow.

    A root waits for nobody but until its slot may be filled again, so broadcasts come in a row.
    """
    me.fake.gpu.pace(0.002 if me.rank == slow else 0.0)
    me.fake.look(False)
    xs = [torch.full((100,), float(i if me.rank == 0 else -1)) for i in range(calls)]
    ys = [torch.full((100,), float(i + me.rank)) for i in range(calls)]
    outs = [torch.empty(100 * me.world) for _ in range(calls)]
    works = [dist.broadcast(x, 0, async_op=True) for x in xs]
    works += [dist.all_reduce(y, async_op=True) for y in ys]
    for x, out in zip(xs, outs, strict=True):
        works.append(dist.all_gather_into_tensor(out, x, async_op=True))
    for work in works:
        work.wait()
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    me.fake.look(True)
    me.fake.gpu.pace(0.0001)
    wrong = []
    for i, (x, y, out) in enumerate(zip(xs, ys, outs, strict=True)):
        total = me.world * i + me.world * (me.world - 1) / 2
        if not bool((x == i).all() & (y == total).all() & (out == i).all()):
            wrong.append(f"call {i}")
    return wrong


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_stream_holds_up_who_needs_it(pools, slow):
    dist_staged.report(
        pools(3, staged="late:stream", beside=None).run(ahead, slow, 12, seconds=60.0)
    )


def behind(me: Me) -> tuple[bool, float]:
    """On streams alone, nothing makes the host wait for the device."""
    x = torch.ones(1000)
    dist.all_reduce(x)
    me.fake.look(False)
    if me.rank == 1:
        me.fake.stall(True)
        me.fake.fill_later(x, 3.0)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    time.sleep(0.05)
    early = work.is_completed()
    dist.barrier()
    me.fake.stall(False)
    me.fake.look(True)
    work.wait()
    return early, x.sum().item()


def test_the_host_waits_for_no_device(pools):
    for early, total in pools(3, staged="late:stream", beside=None).run(behind):
        assert not early
        assert total == 9000.0


def disagreeing(me: Me) -> tuple[list[Caught], float]:
    x = torch.ones(10)
    dist.all_reduce(x)
    errors = [
        caught(dist.all_reduce, torch.ones(10 + (me.rank == 1))),
        caught(dist.broadcast, torch.ones(3), 0) if me.rank == 1 else caught(dist.all_reduce, x),
        caught(dist.all_reduce, torch.ones(1).expand(4 if me.rank == 1 else 1)),
    ]
    y, z = torch.ones(4), torch.ones(4)
    if me.rank == 1:
        me.fake.put_on_host(y)
    errors.append(caught(dist.all_reduce, y))
    dist.all_reduce(z)
    return errors, z.sum().item()


def test_ranks_disagree(pools):
    for errors, total in pools(3, staged="late:stream", beside=None).run(disagreeing):
        assert [e.kind for e in errors] == ["ValueError"] * 4, errors
        assert "rank 1 called all_reduce of 11 float32" in errors[0].text
        assert "rank 1 called broadcast" in errors[1].text
        assert "rank 1 refused all_reduce" in errors[2].text
        assert "rank 1 called all_reduce of 4 float32, op sum, on the host" in errors[3].text
        assert total == 12.0


@pytest.mark.parametrize("staged", WAYS)
def test_distributed_data_parallel(pools, staged):
    # Two ranks: the sum of two numbers has one order.
    assert pools(2, staged=staged, beside=None).run(dist_staged.trained) == [0.0, 0.0]
