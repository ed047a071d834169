"""Whose stream waits for whom: CUDA tensors through torch.distributed, processes on one GPU.

A stream that sleeps for a while shows who looks at a tensor too early.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import Caught, Me, Pools, caught, pools_of_a_module
from dist_rungs import RUNGS, on_rung
from homes import GPU, several_gpus

pytestmark = pytest.mark.cuda
WORLDS = (2, 4)
COUNT = 300_007
SECONDS = 120.0
_NAP = 100_000_000  # cycles: some 50 ms


@pytest.fixture(scope="module", params=RUNGS)
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    yield from pools_of_a_module(environ=on_rung(request.param))


def nap() -> None:
    torch.cuda._sleep(_NAP)


def before_and_after(me: Me) -> list[bool]:
    """The tensor is made on a side stream and used on another, behind a stream that sleeps."""
    good = []
    first, second = torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)
    for later in (False, True, False, True):
        x = torch.zeros(COUNT, device=GPU)
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            nap()
            x.fill_(float(me.rank + 1))
            work = dist.all_reduce(x, async_op=later)
        if later:
            with torch.cuda.stream(second):
                work.wait()
                y = x * 2
            second.synchronize()
        else:
            with torch.cuda.stream(first):
                y = x * 2
            first.synchronize()
        good.append(bool((y == me.world * (me.world + 1)).all()))
    return good


@pytest.mark.parametrize("world", WORLDS)
def test_side_streams(pools, world):
    assert pools(world, beside=None).run(before_and_after, seconds=SECONDS) == [[True] * 4] * world


def on_another_gpu(me: Me) -> bool:
    """The group's slab is on one GPU; the tensor, and who makes and reads it, are on another."""
    home, other = several_gpus()[:2]
    dist.all_reduce(torch.ones(COUNT, device=home))
    side = torch.cuda.Stream(other)
    with torch.cuda.stream(side):
        x = torch.zeros(COUNT, device=other)
        nap()
        x.fill_(float(me.rank))
        dist.all_reduce(x)
        y = x * 2
    side.synchronize()
    return bool((y == me.world * (me.world - 1)).all())


@pytest.mark.parametrize("world", WORLDS)
def test_a_side_stream_of_another_gpu(pools, world):
    several_gpus()
    found = pools(world, beside=None).run(on_another_gpu, seconds=SECONDS)
    assert found == [True] * world


def overwritten(me: Me) -> list[bool]:
    """What the stream has still to do with an output comes before the result."""
    x = torch.zeros(COUNT, device=GPU)
    values = []
    for root in range(me.world):
        nap()
        x.fill_(float(me.rank if me.rank == root else -1))
        dist.broadcast(x, root)
        values.append(x.clone())
    return [bool((v == root).all()) for root, v in enumerate(values)]


@pytest.mark.parametrize("world", WORLDS)
def test_outputs_are_not_written_too_early(pools, world):
    found = pools(world, beside=None).run(overwritten, seconds=SECONDS)
    assert found == [[True] * world] * world


def at_once(me: Me) -> tuple[float, bool, bool]:
    x = torch.zeros(COUNT, device=GPU)
    # Contexts, and as much pinned memory as two calls at once need: to get it takes long.
    for work in [dist.all_reduce(x, async_op=True) for _ in range(2)]:
        work.wait()
    x.fill_(1.0)
    torch.cuda.synchronize()
    for _ in range(4):
        nap()
    start = time.monotonic()
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    took = time.monotonic() - start
    asleep = not torch.cuda.current_stream().query()
    while not all(w.is_completed() for w in works):
        time.sleep(0.001)
    works[1].wait()
    return took, asleep, bool((x == me.world**2).all())


def test_async_calls_return_at_once(pools):
    for took, asleep, right in pools(2, beside=None).run(at_once, seconds=SECONDS):
        assert asleep, "the stream was done before the calls returned: nothing was tested"
        assert took < 0.1  # of the 200 ms that the stream sleeps
        assert right


def dropped(me: Me) -> bool:
    """Nobody holds inputs, outputs or works; freed memory is given to others at once."""
    good = True
    for _ in range(20):
        x = torch.full((COUNT,), float(me.rank), device=GPU)
        out = torch.zeros(me.world * COUNT, device=GPU)
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        del x
        junk = [torch.full((COUNT,), -7.0, device=GPU) for _ in range(3)]
        work.wait()
        good &= bool((out.view(me.world, -1).sum(0) == me.world * (me.world - 1) / 2).all())
        dist.all_reduce(torch.ones(COUNT, device=GPU), async_op=True)
        del junk, work, out
        gc.collect()
    dist.barrier()
    return good


def test_memory_that_nobody_holds(pools):
    assert pools(2, beside=None).run(dropped, seconds=SECONDS) == [True] * 2


def through_futures(me: Me) -> list[bool]:
    x = torch.full((COUNT,), float(me.rank), device=GPU)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda f: f.value()[0] * 2)
    doubled.wait()
    wanted = me.world * (me.world - 1)
    with dist._coalescing_manager(async_ops=True) as manager:
        y = torch.ones(COUNT, device=GPU)
        z = torch.ones(7, device=GPU)
        dist.all_reduce(y)
        dist.all_reduce(z)
    manager.wait()
    return [bool((doubled.value() == wanted).all()), bool((y == me.world).all() & (z[0] == y[0]))]


def test_futures_and_coalesced_calls(pools):
    assert pools(2, beside=None).run(through_futures, seconds=SECONDS) == [[True, True]] * 2


def captured(me: Me) -> tuple[list[Caught], bool]:
    x = torch.ones(5, device=GPU)
    dist.all_reduce(x.clone())
    open_work = dist.all_reduce(torch.ones(3, device=GPU), async_op=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream(GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin()
        errors = [caught(dist.all_reduce, x), caught(open_work.wait)]
        errors.append(caught(dist.send, x, (me.rank + 1) % me.world))
        y = x + 1
        graph.capture_end()  # the capture is whole
    open_work.wait()
    graph.replay()
    torch.cuda.synchronize()
    whole = bool((x == 1).all() & (y == 2).all())
    dist.all_reduce(x)
    return errors, whole and bool((x == me.world).all())


def test_refused_in_a_capture(pools):
    for errors, whole in pools(2, beside=None).run(captured, seconds=SECONDS):
        assert all(e.kind == "ValueError" and "capture" in e.text for e in errors), errors
        assert whole


def beside_a_capture(me: Me) -> bool:
    """A capture forbids much to all threads; those of the group work on meanwhile."""
    x = torch.ones(COUNT, device=GPU)
    dist.all_reduce(torch.ones(COUNT, device=GPU))
    torch.cuda.synchronize()
    side = torch.cuda.Stream(GPU)
    nap()
    work = dist.all_reduce(x, async_op=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin()
        z = torch.ones(3, device=GPU)
        time.sleep(0.3)
        z = z + 1
        graph.capture_end()
    work.wait()
    graph.replay()
    torch.cuda.synchronize()
    return bool((x == me.world).all() & (z == 2).all())


def test_a_capture_while_a_call_is_under_way(pools):
    assert pools(2, beside=None).run(beside_a_capture, seconds=SECONDS) == [True] * 2
