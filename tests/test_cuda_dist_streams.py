"""Stream order of CUDA tensors through torch.distributed.

Late streams expose code that reads a tensor, or frees its memory, too early.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import LARGE, until
from dist_pool import OLD_TORCH, OURS, Caught, RankContext, backend_of, caught
from sites import EMULATED, GPU, HOSTS, IN_PLACE, REAL, THREADS, not_on, several_gpus, site_worlds

pytestmark = [
    pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors"),
    not_on(HOSTS, "tests what precedes and follows the exchange"),
]

CALLS = 40  # that free memory in use


def earlier_stream_work(me: RankContext) -> None:
    """Earlier work of the caller's stream on a tensor comes before the call."""
    for turn in range(12):
        count, async_op, root = (5, LARGE // 10)[turn % 2], turn % 4 < 2, turn % me.world
        x, y = torch.full((count,), 7.0), torch.zeros(2 * count)[::2]
        me.site.fill_later(x, float(turn if me.rank == root else -1))
        work = dist.broadcast(x, root, async_op=async_op)
        if async_op:
            assert until(work.is_completed)
            work.wait()
        me.site.fill_later(y, 1.0)
        dist.all_reduce(y)
        assert x.eq(turn).all(), turn
        assert y.eq(me.world).all(), turn


def on_a_side_stream(me: RankContext) -> None:
    """A call on a side stream; its result is used there or, after wait(), on the main stream."""
    for async_op in (False, True, False, True):
        x = torch.zeros(LARGE)
        me.site.synchronize()
        with me.site.second_stream():
            me.site.fill_later(x, me.rank + 1.0)
            work = dist.all_reduce(x, async_op=async_op)
            y = x if async_op else x * 2
        if async_op:
            work.wait()
            y = x * 2
        me.site.synchronize()
        assert y.eq(me.world * (me.world + 1)).all()


def return_while_blocked(me: RankContext) -> None:
    """Async calls return while the caller's stream is blocked. So do waits and a barrier of ranks
    that are threads; between processes they wait for the exchange."""
    x, y = torch.ones(1000), torch.ones(3)
    for work in [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(2)]:
        work.wait()  # creates contexts and pinned memory, which is slow
    dist.barrier()
    with me.site.stalled():
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
        futures = [work.get_future() for work in works]
        if me.spec.ranks_as == "threads":
            works[0].wait()
            dist.barrier()
        time.sleep(0.05)
        early = any(work.is_completed() for work in works)
    works[1].wait()
    futures[0].wait()
    works[0].wait()
    assert not early
    for t in (x, y, futures[0].value()[0]):
        assert t.eq(me.world).all()


def freed_while_in_use(me: RankContext) -> None:
    """Tensors are freed while the group's stream uses them; new tensors may reuse the memory."""
    outs = [torch.zeros(64 * me.world) for _ in range(CALLS)]
    works = []
    me.site.run_ahead(0.001)
    for i, out in enumerate(outs):
        x = me.site.empty(128)[::2] if i % 2 else me.site.empty(64)
        me.site.fill_later(x, float(i + me.rank))
        works.append(dist.all_gather_into_tensor(out, x, async_op=True))
        del x
        time.sleep(0.002)
        for n in (64, 128):
            me.site.fill_later(me.site.empty(n), -1.0)
        dist.all_reduce(torch.ones(64), async_op=True)  # neither tensor nor Work is kept
    for work in works:
        work.wait()
    me.site.resume()
    dist.barrier()
    dist.all_reduce(torch.ones(3))
    for i, out in enumerate(outs):
        assert out.view(me.world, 64).eq(torch.arange(me.world)[:, None] + i).all(), i


def work_of_a_block(me: RankContext) -> list[float]:
    """The work of several calls, and its future, have the results of all, and no exception."""
    backend, xs = backend_of(), [torch.full((n,), 1.0) for n in (3, LARGE, 5)]
    backend._start_coalescing()
    for x in xs:
        backend.allreduce([x])
    work = backend._end_coalescing()
    future = work.get_future()
    chained = future.then(lambda done: [t * 2 for t in done.value()])
    future.wait()
    chained.wait()
    work.wait()
    me.site.synchronize()
    assert until(work.is_completed)
    assert work.is_success()
    assert OLD_TORCH or work.exception() is None
    tensors = (*xs, *future.value(), *work.result(), *chained.value())
    return [t.mean().item() / me.world for t in tensors]


@pytest.mark.parametrize(("site", "world"), site_worlds("", *EMULATED, *REAL))
def test_the_work_of_a_block(pools, site, world):
    for means in pools(world, site=site).run(work_of_a_block):
        assert means == [1.0] * 9 + [2.0] * 3


def in_a_callback(me: RankContext) -> None:
    """The callback of a host call starts a call of device tensors, beside another one."""
    host, x, y = me.site.host(torch.ones(4)), torch.full((5,), 3.0), torch.full((5,), 2.0)
    inner = []

    def then(future: torch.futures.Future[Any]) -> Any:
        inner.append(dist.all_reduce(x, async_op=True))
        return future.value()

    chained = dist.all_reduce(host, async_op=True).get_future().then(then)
    dist.all_reduce(y)
    chained.wait()
    inner[0].wait()
    assert x.eq(3 * me.world).all()
    assert y.eq(2 * me.world).all()


def captured(me: RankContext) -> tuple[list[Caught], list[Caught], list[str], list[float]]:
    """In a capture, calls and waits for earlier works are refused; afterwards both succeed."""
    x, out, y, z = torch.ones(7), torch.zeros(7 * me.world), *(torch.ones(LARGE) for _ in range(2))
    mine = me.rank == 0 or me.site.real
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    dist.all_reduce(torch.ones(2))
    works = [dist.all_reduce(torch.ones(2), async_op=True)]
    works += [dist.isend(y * me.rank, right), dist.irecv(z, left)]
    with me.site.capturing() if mine else contextlib.nullcontext():
        before = len(me.site.calls()), me.site.pinned()
        errors = [
            caught(dist.all_reduce, x),
            caught(dist.all_gather_into_tensor, out, x),
            caught(lambda: dist.all_reduce(x, async_op=True).wait()),
        ]
        own = [caught(call, y, right) for call in (dist.send, dist.recv) if mine]
        own += [caught(call, x, right) for call in (dist.isend, dist.irecv) if mine]
        own += [caught(work.wait) for work in works if mine]
        moved = [c for c in me.site.calls()[before[0] :] if mine and c.startswith("copy_ caller")]
        moved += ["pinned"] * bool(mine and me.site.pinned() != before[1])
    for work in works:
        work.wait()
    dist.all_reduce(x)
    return errors, own, moved, [x.sum().item(), out.sum().item(), z.mean().item() - left]


@pytest.mark.parametrize(("site", "world"), site_worlds(*EMULATED, *REAL, stands_in=False))
def test_calls_in_a_capture_are_refused(pools, site, world):
    """One rank captures and all ranks refuse (emulated), or all ranks capture (GPU)."""
    for errors, own, moved, sums in pools(world, site=site).run(captured):
        assert all(e.kind == "ValueError" for e in errors + own), errors + own
        assert all("capture" in e.text for e in errors + own), errors + own
        assert all("rank 0" in e.text for e in errors) or site in REAL, errors
        assert moved == []
        assert sums == [7.0 * world, 0.0, 0.0]


def beside_a_capture(me: RankContext) -> None:
    """A capture restricts CUDA calls of all threads; the group's threads still make progress."""
    x = torch.zeros(LARGE)
    dist.all_reduce(torch.ones(LARGE))
    me.site.fill_later(x, 1.0)
    work = dist.all_reduce(x, async_op=True)
    with me.site.capturing():
        time.sleep(0.3)
    work.wait()
    assert x.eq(me.world).all()


def on_the_host_of_one_rank(me: RankContext) -> None:
    """One rank's tensor is on the CPU, the others' are on their devices."""
    for count in (5, LARGE):
        x = torch.full((count,), me.rank + 1.0)
        if me.rank == 1:
            x = me.site.host(x)
        else:
            me.site.fill_later(x, me.rank + 1.0)
        dist.all_reduce(x)
        if me.rank != 1:
            me.site.synchronize()
        assert x.eq(me.world * (me.world + 1) / 2).all()


JOBS = {  # job -> why it does not run on threads
    earlier_stream_work: "",
    on_a_side_stream: "",
    return_while_blocked: "",
    freed_while_in_use: "",
    beside_a_capture: "",
    in_a_callback: "a callback runs in the turn of the rank that completes the call",
    on_the_host_of_one_rank: "ranks that are threads make one call on all tensors",
}


@pytest.mark.parametrize(("site", "world"), site_worlds(*EMULATED, *REAL, stands_in=False))
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=job.__name__, marks=[not_on(THREADS, why)] if why else [])
        for job, why in JOBS.items()
    ],
)
def test_calls_follow_their_streams(pools, site, world, job):
    pools(world, site=site).run(job)


def traced(me: RankContext, async_op: bool) -> list[list[str]]:
    x, out, found = torch.ones(1000), torch.empty(me.world * 1000), []
    for call in (
        lambda: dist.all_reduce(x, async_op=async_op),
        lambda: dist.all_gather_into_tensor(out, x, async_op=async_op),
        lambda: dist.broadcast(x, 0, async_op=async_op),
    ):
        before = len(me.site.calls())
        work = call()
        if async_op:
            work.wait()
        found.append(me.site.calls()[before:])
    return found


@not_on(THREADS, IN_PLACE)
@pytest.mark.parametrize("async_op", [False, True])
def test_the_order_of_staging_operations(pools, async_op):
    there = ["copy_ caller", "record caller", "done caller"]
    back = ["wait group", "copy_ group", "record group", "wait caller"]
    for _ in range(3):
        root, *others = pools(3, site="late").run(traced, async_op)
        assert root == [there + back, there + back, there]  # no copy back after a root's broadcast
        # Other ranks of a broadcast wait for no copy off the device: it overwrites their tensors.
        assert others == [[there + back, there + back, ["record caller", *back]]] * 2


def on_all_gpus(me: RankContext) -> list[float]:
    """all_reduce with each rank on its own GPU, in host memory, and with all ranks on one GPU."""
    mine = torch.device("cuda", me.rank % torch.cuda.device_count())
    xs = [torch.ones(9, device=device) for device in (mine, "cpu", GPU)]
    for x in xs:
        dist.all_reduce(x)
    dist.barrier()
    gathered: list[Any] = [None] * me.world
    dist.all_gather_object(gathered, me.rank)
    return [x.sum().item() for x in xs] + [sum(gathered)]


def on_another_gpu(me: RankContext) -> bool:
    """A call on a side stream of one GPU after a call on another GPU."""
    placement, other = several_gpus()[:2]
    dist.all_reduce(torch.ones(LARGE, device=placement))
    side = torch.cuda.Stream(other)
    with torch.cuda.stream(side):
        x = torch.zeros(LARGE, device=other)
        me.site.fill_later(x, float(me.rank))
        dist.all_reduce(x)
        y = x * 2
    side.synchronize()
    return bool((y == me.world * (me.world - 1)).all())


@not_on(THREADS, "ranks that are threads make one call on all tensors")
@pytest.mark.cuda
@pytest.mark.parametrize("world", [2, 4])
def test_several_gpus(pools, world):
    pool = pools(world, site="cuda")
    wanted = [9.0 * world] * 3 + [world * (world - 1) / 2]
    assert pool.run(on_all_gpus) == [wanted] * world
    if torch.cuda.device_count() > 1:
        assert pool.run(on_another_gpu) == [True] * world
