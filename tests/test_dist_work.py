"""Asynchronous calls: Work objects and futures, execution order, and threads.

Collectives of one group run in call order. Groups and threads are independent of each other, in
whatever order their ranks wait.
"""

from __future__ import annotations

import datetime
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OLD_TORCH, OURS, Caught, RankContext, caught
from reference import assert_same
from sites import THREADS, not_on, slow_on_processes
from torch import Tensor

SIZES = (1, 5_000, 400_000)


def of(rank: int, count: int = 5) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * rank


def summed(world: int, count: int = 5) -> Tensor:
    return sum(of(r, count) for r in range(world))


# --- Work -----------------------------------------------------------------------------------------


def waited(me: RankContext) -> None:
    for count in SIZES:
        x = of(me.rank, count)
        work = dist.all_reduce(x, async_op=True)
        assert work.wait() is True
        assert work.is_completed()
        assert work.is_success()
        assert OLD_TORCH or work.exception() is None  # old torch cannot convert it to Python
        assert work.wait(datetime.timedelta(seconds=1)) is True  # a second wait returns at once
        assert_same([x], [summed(me.world, count)])
        assert_same(work.result(), [summed(me.world, count)])


def completes_without_the_caller(me: RankContext) -> None:
    """A call completes on rank 0, which neither polls nor waits: its peers need its part."""
    x = of(me.rank, 300_000)
    work = dist.all_reduce(x, async_op=True)
    if me.rank == 0:
        time.sleep(0.3)
        assert_same([x], [summed(me.world, 300_000)])
    work.wait()
    dist.barrier()


def futures(me: RankContext) -> None:
    for count in SIZES:
        x = of(me.rank, count)
        future = dist.all_reduce(x, async_op=True).get_future()
        doubled = future.then(lambda f: [2 * t for t in f.value()]).then(lambda f: f.value()[0])
        assert_same([doubled.wait()], [2 * summed(me.world, count)])
        assert isinstance(future.value(), list)
        assert_same(future.wait(), [x])
    out = [torch.zeros(5) for _ in range(me.world)]
    value = dist.all_gather(out, of(me.rank), async_op=True).get_future().wait()
    assert_same(out, [of(r) for r in range(me.world)])
    assert torch.utils._pytree.tree_leaves(value), "the outputs, nested or flat"
    works = [dist.all_reduce(of(me.rank), async_op=True) for _ in range(4)]
    torch.futures.wait_all([work.get_future() for work in works])
    torch.futures.collect_all([work.get_future() for work in works]).wait()


def kept_alive(me: RankContext) -> None:
    """The caller releases tensors and Work before the call has run."""
    kept = torch.zeros(5)
    for _ in range(30):
        dist.all_reduce(of(me.rank, 50_000), async_op=True)
        dist.all_gather(
            [torch.zeros(50_000) for _ in range(me.world)], of(me.rank, 50_000), async_op=True
        )
    dist.all_reduce(kept)


def waits_with_limits(me: RankContext) -> None:
    """A wait ends at its own limit, without harm (faults.py has the timeout of the group)."""
    x, y = torch.ones(3), torch.zeros(3)
    if me.rank == 0:
        works = [dist.irecv(y, 1), dist.all_reduce(x, async_op=True)]
        for work in works:
            error = caught(work.wait, datetime.timedelta(seconds=0.1))
            assert "CollectiveError" in error.kinds, error
            assert ("recv #" if work is works[0] else "all_reduce #") in error.text, error
        dist.send(torch.ones(1), 1, tag=1)
        for work in works:
            work.wait()
    elif me.rank == 1:
        dist.recv(torch.ones(1), 0, tag=1)
        dist.send(torch.ones(3), 0)
    if me.rank != 0:
        dist.all_reduce(x)
    assert x.tolist() == [me.world] * 3
    assert y.tolist() == [float(me.rank == 0)] * 3


# --- order ----------------------------------------------------------------------------------------


def in_order(me: RankContext) -> None:
    """Collectives that depend on each other through a tensor, with waits in any order."""
    for seed in range(6):
        chance = random.Random(seed)
        x = of(me.rank, chance.choice(SIZES))
        wanted = [of(r, x.numel()) for r in range(me.world)]
        works = []
        for step in range(12):
            if chance.random() < 0.5:
                works.append(dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True))
                wanted = [sum(wanted) / me.world] * me.world
            else:
                root = step % me.world
                works.append(dist.broadcast(x, root, async_op=True))
                wanted = [wanted[root]] * me.world
        random.Random(me.rank).shuffle(works)
        for work in works:
            work.wait()
        torch.testing.assert_close(x, wanted[me.rank])


def barrier_behind_queued_calls(me: RankContext) -> None:
    """A barrier runs after a thousand queued calls of large and small tensors, without any wait."""
    tensors = [torch.full((1 + 10_000 * (n % 7 == 0),), float(n)) for n in range(1000)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    dist.barrier()
    assert all(work.is_completed() for work in works)
    assert all(t.eq(n * me.world).all() for n, t in enumerate(tensors))


def value(number: int, count: int = 5) -> Tensor:
    return torch.full((count,), float(number))


HOW_CALLBACKS_CALL = ("now", "later", "waits", "waits for the future", "nested")
HOW_CALLBACKS_CALL += ("coalesced",)


def calls_of_callbacks(me: RankContext) -> None:
    """What a callback calls comes directly after the call of its future, however late or early the
    ranks are. All calls have the same shape, so two that change places are a wrong number."""
    chance = random.Random(me.rank)
    for n, how in enumerate(HOW_CALLBACKS_CALL * 12):
        results: list[tuple[Tensor, int]] = []
        x, work = called(me, 1, "later")
        chained = (
            work.get_future()
            .then(lambda f, to=results, how=how: call(me, 2, how, to))
            .then(lambda f, to=results, how=how: call(me, 4, how, to))
        )
        if chance.random() < 0.5:
            me.be_late(0.002 * chance.random())
        y, other = called(me, 6, "now" if n % 2 else "later")
        z, last = called(me, 7, "later")
        chained.wait()
        for work in (other, last):
            if work is not None:
                work.wait()
        dist.barrier()
        for got, number in [(x, 1), (y, 6), (z, 7), *results]:
            assert_same([got], [value(sum(number * 1000**r for r in range(me.world)))])
        assert len(results) == (4 if how == "nested" else 2)


def called(me: RankContext, number: int, how: str) -> tuple[Tensor, Any]:
    """Start an all_reduce of a number, which is 1000 times as much on the next rank."""
    x = value(number * 1000**me.rank)
    if how == "coalesced":
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(value(9))
            dist.all_reduce(x)
        return x, manager
    return x, dist.all_reduce(x, async_op=how != "now")


def call(me: RankContext, number: int, how: str, results: list[tuple[Tensor, int]]) -> None:
    """A callback: start a call, and wait for it in some way, or call in its callback."""
    x, work = called(me, number, how)
    results.append((x, number))
    if how == "waits":
        work.wait()
    elif how == "waits for the future":
        work.get_future().wait()
    elif how == "nested":
        work.get_future().then(lambda f: call(me, number + 1, "now", results))


def callback_waits_for_a_later_call(me: RankContext) -> None:
    """A callback may wait for a call that was made before it ran."""
    x, y = value(1), value(2)
    made, waited = threading.Event(), []

    def wait(f) -> None:
        made.wait(10)
        waited.append(later[0].wait())

    later: list[Any] = []
    if me.rank != 0:
        time.sleep(0.2)  # rank 0 adds its callback before
    future = dist.all_reduce(x, async_op=True).get_future()
    if me.rank == 0:
        future = future.then(wait)
    later.append(dist.all_reduce(y, async_op=True))
    made.set()
    future.wait()
    later[0].wait()
    assert_same([x, y], [me.world * value(1), me.world * value(2)])
    assert waited == [True] * (me.rank == 0)


def callbacks_of_two_groups(me: RankContext) -> None:
    """Callbacks of one group's calls make calls of another one, and destroy it."""
    for n in range(5):
        group = dist.new_group()
        x, y = value(n), value(n + 1)

        def call(f, y=y, group=group) -> None:
            dist.all_reduce(y, group=group)
            dist.destroy_process_group(group)

        future = dist.all_reduce(x, async_op=True).get_future().then(call)
        dist.all_reduce(z := value(3))
        future.wait()
        assert_same([x, y, z], [me.world * value(k) for k in (n, n + 1, 3)])


# --- groups and threads ---------------------------------------------------------------------------


def cycle(me: RankContext) -> None:
    """Groups {0,1}, {1,2}, {0,2}: each rank starts with another group, so blocking would hang."""
    pairs = [(0, 1), (1, 2), (0, 2)]
    groups = [dist.new_group(list(pair)) for pair in pairs]
    for count in SIZES:
        for turn in range(5):
            order = [(me.rank + turn + k) % 3 for k in range(3)]
            mine = [k for k in order if me.rank in pairs[k]]
            tensors = {k: of(me.rank, count) for k in mine}
            works = {k: dist.all_reduce(tensors[k], group=groups[k], async_op=True) for k in mine}
            for k in mine if turn % 2 else mine[::-1]:
                works[k].wait()
            for k in mine:
                assert_same([tensors[k]], [sum(of(r, count) for r in pairs[k])], pairs[k])
    for group in groups:
        dist.destroy_process_group(group)


def threads(me: RankContext) -> None:
    """One thread per group; all run concurrently and unsynchronised."""
    groups = [dist.new_group(list(range(me.world))) for _ in range(4)]

    def work(number: int) -> None:
        torch.set_num_threads(1)
        for turn in range(min(40, 120 // me.world)):
            x = of(me.rank, SIZES[turn % 3] // (1 + number))
            pending = dist.all_reduce(x, group=groups[number], async_op=turn % 2 == 1)
            out = [torch.zeros(number + 1) for _ in range(me.world)]
            dist.all_gather(out, of(me.rank, number + 1), group=groups[number])
            assert_same(out, [of(r, number + 1) for r in range(me.world)], number)
            if pending is not None:
                pending.wait()
            assert_same([x], [summed(me.world, x.numel())], number)

    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(work, range(len(groups))))
    for group in groups:
        dist.destroy_process_group(group)


JOBS = (waited, completes_without_the_caller, futures, kept_alive, in_order, cycle, threads)
JOBS += (calls_of_callbacks, callback_waits_for_a_later_call, callbacks_of_two_groups)
JOBS += (barrier_behind_queued_calls, waits_with_limits)
GLOO_LACKS = {
    barrier_behind_queued_calls: "runs two collectives of a group at once",
    in_order: "runs two collectives of a group at once",
    waits_with_limits: "aborts the group",
    calls_of_callbacks: "lets calls of callbacks change places",
}
TURNS = not_on(THREADS, "while a rank sleeps, no other has its turn")
MARKS = {completes_without_the_caller: TURNS, callback_waits_for_a_later_call: TURNS}


IN_WORLDS = [pytest.param(3, job, marks=MARKS.get(job, [])) for job in JOBS]
IN_WORLDS += [(world, job) for world in (1, 8) for job in (waited, futures, threads)]


@pytest.mark.parametrize(("world", "job"), IN_WORLDS)
def test_work(pools, world, job):
    if not OURS and job in GLOO_LACKS:
        pytest.skip(f"{BACKEND} {GLOO_LACKS[job]}")
    pools(world).run(job, seconds=40)


def late_callback(me: RankContext) -> Caught:
    """Rank 0 adds its callback before it makes the next call, the others after."""
    x, y = torch.ones(3), torch.ones(4)
    if me.rank == me.world - 1:
        time.sleep(0.3)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    if me.rank == 0:
        future.then(lambda f: dist.all_reduce(torch.ones(5)))
    error = caught(dist.all_reduce, y)
    future.wait()
    if me.rank != 0:
        caught(dist.all_reduce, torch.ones(5))
    return error


@not_on(THREADS, "ranks that take turns have one order")
def test_a_callback_that_came_too_late_is_named(pools):
    if not OURS:
        pytest.skip(f"{BACKEND} does not notice it")
    with pools.fresh(3) as pool:
        errors = pool.run(late_callback)
    assert all(error.kind == "ValueError" for error in errors), errors
    assert any("callback is added before the next call is made" in e.text for e in errors), errors


# --- inputs that earlier calls write --------------------------------------------------------------

ROOT = 1
READERS = ("all_reduce", "all_reduce of products", "reduce", "broadcast", "all_gather", "gather")
READERS += ("scatter", "reduce_scatter", "reduce_scatter of products", "all_to_all")
READERS += ("all_to_all_single",)


def call_that_reads(me: RankContext, x: Tensor, name: str) -> tuple[dist.Work, list[Tensor], int]:
    """Start a call that reads `x`; return its Work, its results, and their multiple of `x`."""
    is_root, inputs, more = me.rank == ROOT, [x for _ in range(me.world)], {"async_op": True}
    out = [torch.zeros(x.shape, dtype=x.dtype) for _ in inputs]
    if name.endswith(" of products"):
        more["op"] = dist._make_nccl_premul_sum(2.0)
    y = x if is_root else out[0]
    rooted = (inputs if is_root else None, ROOT)
    # The arguments of the call, and its results.
    calls: dict[str, tuple[tuple[Any, ...], list[Tensor]]] = {
        "all_reduce": ((x,), [x]),
        "reduce": ((x, ROOT), [x] * is_root),
        "reduce_scatter": ((out[0], inputs), out[:1]),
        "broadcast": ((y, ROOT), [y]),
        "all_gather": ((out, x), out),
        "gather": ((x, out if is_root else None, ROOT), out * is_root),
        "scatter": ((out[0], *rooted), out[:1]),
        "all_to_all": ((out, inputs), out),
        "all_to_all_single": ((out[0], x), out[:1]),
    }
    call = name.removesuffix(" of products")
    args, results = calls[call]
    factor = (me.world if "reduce" in call else 1) * (2 if "op" in more else 1)
    return getattr(dist, call)(*args, **more), results, factor


def dependent_calls(me: RankContext, name: str, dtype: torch.dtype) -> list[str]:
    """The second call's input is the first call's result, and the last rank is late."""
    wrong = []
    for is_strided in (True, False):
        x = torch.full((30, 30), float(me.rank)).to(dtype)
        dist.barrier()
        if me.rank == me.world - 1:
            me.be_late(0.1)
        first = dist.all_reduce(x, async_op=True)
        second, results, factor = call_that_reads(me, x.t() if is_strided else x, name)
        second.wait()
        first.wait()
        wanted = factor * sum(range(me.world))
        wrong += [
            f"strided: {is_strided}: {r.flatten()[:3]}, not {wanted}"
            for r in results
            if not r.float().eq(wanted).all()
        ]
    return wrong


READ = [(name, torch.float32) for name in READERS]
READ += [("all_reduce of products", torch.float8_e4m3fn)]  # which torch itself cannot multiply
READ += [
    pytest.param(name, dtype, marks=slow_on_processes)
    for name in READERS
    for dtype in (torch.bfloat16, torch.int32)
]


@pytest.mark.skipif(not OURS, reason="runs two collectives of a group at once")
@pytest.mark.parametrize(("name", "dtype"), READ)
def test_inputs_are_the_results_of_earlier_calls(pools, name, dtype):
    assert pools(3).run(dependent_calls, name, dtype) == [[]] * 3
