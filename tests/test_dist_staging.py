"""Tensors on devices without a device: staging through the host, on one that only keeps books.

A late device does nothing before somebody waits for it, an eager one does all that it may at once;
pinned memory is poison until it has been filled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import dist_staged
import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, Pools, backend_of, caught, fresh, pools_of_a_module
from reference import DTYPES, short

pytestmark = pytest.mark.skipif(not OURS, reason="stages by itself")
WAYS = ("late", "eager")


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    yield from pools_of_a_module()


# Quick runs have one type of each kind: what is staged is bytes, and the host's calls fold them.
USUAL = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
TYPES = [
    pytest.param(d, marks=[] if d in USUAL else [pytest.mark.slow], id=short(d)) for d in DTYPES
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("staged", WAYS)
def test_bits_of_the_host(pools, staged, dtype):
    found = pools(3, staged=staged, beside=None).run(dist_staged.sweep, dtype, "cpu")
    assert min(run for run, _ in found) > 80
    dist_staged.report([wrong for _, wrong in found])


@pytest.mark.parametrize("staged", ["", *WAYS])
def test_products_and_own_parts(pools, staged):
    pool = pools(3, staged=staged, beside=None)
    for dtype in (torch.float32, torch.bfloat16):
        dist_staged.report(pool.run(dist_staged.premultiplied, dtype, "cpu"))
        dist_staged.report(pool.run(dist_staged.own_parts, dtype, "cpu"))


def traced(me: Me, call: str, later: bool) -> list[str]:
    before = len(me.fake.calls())
    x = torch.full((1000,), float(me.rank))
    work = {
        "all_reduce": lambda: dist.all_reduce(x, async_op=later),
        "broadcast": lambda: dist.broadcast(x, 0, async_op=later),
        "all_gather": lambda: dist.all_gather_into_tensor(
            torch.empty(me.world * 1000), x, async_op=later
        ),
    }[call]()
    if later:
        work.wait()
    return me.fake.calls()[before:]


@pytest.mark.parametrize("later", [False, True])
def test_the_order_of_things(pools, later):
    pool = pools(3, staged="late", beside=None)
    out = ["copy_ caller", "record caller"]
    back = ["wait group", "copy_ group", "record group", "wait caller"]
    for _ in range(3):
        assert pool.run(traced, "all_reduce", later) == [[*out, "done caller", *back]] * 3
        assert pool.run(traced, "all_gather", later) == [[*out, "done caller", *back]] * 3
        root, *others = pool.run(traced, "broadcast", later)
        assert root == [*out, "done caller"]  # nothing comes back
        assert others == [["record caller", *back]] * 2  # nobody waits for what is overwritten


def overtaken(me: Me) -> list[float]:
    """What the caller's stream has still to do with an output comes before the result."""
    values = []
    for _ in range(20):
        x = torch.full((5,), 7.0)
        if me.rank != 0:
            me.fake.fill_later(x, -1.0)
        work = dist.broadcast(x, 0, async_op=True)
        while not work.is_completed():
            time.sleep(0)
        work.wait()
        values.append(x.sum().item())
        y = torch.zeros(5)
        me.fake.fill_later(y, 1.0)
        dist.all_reduce(y)
        values.append(y.sum().item())
    return values


@pytest.mark.parametrize("staged", WAYS)
def test_behind_what_the_stream_has_to_do(pools, staged):
    for values in pools(3, staged=staged, beside=None).run(overtaken):
        assert values == [35.0, 15.0] * 20


def later(me: Me) -> tuple[bool, list[float]]:
    """A stream that is held up, here until both calls have returned, holds up nobody else."""
    x, y = torch.ones(1000), torch.ones(3)
    me.fake.stall(True)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    futures = [w.get_future() for w in works]
    time.sleep(0.05)
    early = any(w.is_completed() for w in works)
    me.fake.stall(False)
    works[1].wait()
    futures[0].wait()
    return early, [x.sum().item(), y.sum().item(), futures[0].value()[0].sum().item()]


def test_an_async_call_returns_at_once(pools):
    for early, sums in pools(2, staged="late", beside=None).run(later):
        assert not early
        assert sums == [2000.0, 6.0, 2000.0]


def held_up(me: Me) -> tuple[Caught, Caught]:
    x = torch.ones(1000)
    if me.rank == 0:
        me.fake.stall(True)
    return caught(dist.all_reduce, x), caught(dist.all_reduce, x)


def test_a_stream_that_never_comes_to_it():
    with fresh(3, staged="late", timeout=1.0) as pool:
        for first, second in pool.run(held_up):
            assert first.kinds[:2] == ("Timeout", "CollectiveError"), first
            assert "rank 0" in first.text
            assert "all_reduce" in first.text
            assert "CollectiveError" in second.kinds


def captured(me: Me) -> tuple[list[Caught], list[str], list[float]]:
    x, out = torch.ones(7), torch.zeros(7 * me.world)
    open_work = dist.all_reduce(torch.ones(2), async_op=True)
    dist.all_reduce(torch.ones(2))
    me.fake.capture(me.rank == 0)
    before = len(me.fake.calls())
    errors = [
        caught(dist.all_reduce, x),
        caught(dist.all_gather_into_tensor, out, x),
        caught(lambda: dist.all_reduce(x, async_op=True).wait()),
    ]
    mine = me.fake.calls()[before:] if me.rank == 0 else []
    if me.rank == 0:
        errors += [caught(dist.send, x, 1), caught(dist.recv, x, 1), caught(open_work.wait)]
    me.fake.capture(False)
    open_work.wait()
    dist.all_reduce(x)
    return errors, mine, [x.sum().item(), out.sum().item()]


def test_no_collective_in_a_capture(pools):
    found = pools(3, staged="late", beside=None).run(captured)
    for errors, moved, sums in found:
        assert all(e.kind == "ValueError" for e in errors), errors
        assert all("capture" in e.text for e in errors), errors
        assert all("rank 0" in e.text for e in errors[:3]), errors
        assert moved == []
        assert sums == [21.0, 0.0]


def mixed(me: Me) -> tuple[Caught, Caught, float]:
    x, y = torch.ones(4), torch.ones(4)
    me.fake.put_on_host(y)
    errors = caught(dist.all_reduce_coalesced, [x, y]), caught(dist.all_to_all_single, y, x)
    dist.all_reduce(x)
    dist.all_reduce(y)  # by itself it is as good as any
    return *errors, (x + y).sum().item()


def test_tensors_here_and_there(pools):
    for *errors, total in pools(2, staged="late", beside=None).run(mixed):
        for error in errors:
            assert error.kind == "ValueError", error
            assert "all in host memory or all on GPUs" in error.text
        assert total == 16.0


def failing(me: Me, call: int) -> tuple[Caught, Caught, float]:
    """One call of rank 1's device goes wrong."""
    if me.rank == 1:
        me.fake.fail_call(call)
    first = caught(dist.all_reduce, torch.ones(100))
    me.fake.fail_call(-1)
    y = torch.ones(3)
    second = caught(dist.all_reduce, y)
    return first, second, y.sum().item()


BEFORE = 6  # memory, copy, event and record, two questions: then the ranks exchange


@pytest.mark.parametrize("call", range(BEFORE + 2))
def test_a_device_that_fails(pools, call):
    found = pools(3, staged="late", beside=None).run(failing, call)
    for rank, (first, second, total) in enumerate(found):
        if rank == 1:
            assert "made up" in first.text, first
        elif call < BEFORE:
            assert first.kind == "ValueError", first
            assert "rank 1" in first.text
            assert "made up" in first.text
        else:
            assert first.kind == "", first
        assert (second.kind, total) == ("", 9.0), second


def coalesced(me: Me) -> list[float]:
    xs = [torch.full((n,), 1.0) for n in (3, 1000, 0, 7)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    backend = backend_of()
    backend._start_coalescing()
    ys = [torch.full((n,), 1.0) for n in (3, 5)]
    backend.allreduce([ys[0]])
    backend.allreduce([ys[1]])
    future = backend._end_coalescing().get_future()
    future.wait()
    return [t.sum().item() for t in (*xs, *ys, *future.value())]


@pytest.mark.parametrize("staged", WAYS)
def test_coalesced_calls(pools, staged):
    for sums in pools(2, staged=staged, beside=None).run(coalesced):
        assert sums == [6.0, 2000.0, 0.0, 14.0, 6.0, 10.0, 6.0, 10.0]


@pytest.mark.parametrize("staged", WAYS)
def test_distributed_data_parallel(pools, staged):
    # Two ranks: the sum of two numbers has one order.
    assert pools(2, staged=staged, beside=None).run(dist_staged.trained) == [0.0, 0.0]
