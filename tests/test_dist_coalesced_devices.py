"""Coalesced calls on device tensors run in issue order and in the order of the caller's streams.

Some inputs are copied in when a call is issued, but not those that an earlier coalesced call still
has to write.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_in_step import assert_in_step, ones
from dist_pool import (
    OURS,
    Caught,
    Pool,
    RankContext,
    backend_of,
    caught,
    pools_of_a_module,
    started_jobs,
)
from dist_ranks import THREADS, between_processes, staged

pytestmark = pytest.mark.skipif(not OURS, reason="tests promises of pycollect alone")
HOST, DEVICES = [""], ["late", "eager"]


@pytest.fixture(scope="module")
def pools(ranks_as):
    yield from pools_of_a_module(ranks_as=ranks_as)


def filled(n: int, value: float, layout: str) -> torch.Tensor:
    if layout == "transposed":
        return torch.full((2, n), value).t()
    return torch.full((n, 2), value)[:, 0] if layout == "strided" else torch.full((n,), value)


def dependent(me: RankContext, layout: str) -> None:
    """Each call reads the result of the previous one; the third scales a part of it."""
    for turn in (1.0, 2.0):  # the second turn reuses memory of the first
        total = turn * me.world * (me.world + 1) / 2
        x = filled(6, turn * (me.rank + 1), layout)
        whole = [torch.zeros_like(x) for _ in range(me.world)]
        half, root = whole[-1][:3], torch.zeros_like(whole[-1][:3])
        backend_of()._start_coalescing()
        dist.all_reduce(x)
        dist.all_gather(whole, x)
        dist.all_reduce(half, dist._make_nccl_premul_sum(0.5))
        dist.reduce(half, 0)
        dist.scatter(root, [half] * me.world if me.rank == 0 else None, 0)
        backend_of()._end_coalescing().wait()
        assert x.unique().tolist() == [total]
        assert all(w.unique().tolist() == [total] for w in whole[:-1])
        assert whole[-1][3:].unique().tolist() == [total]
        scaled = total * me.world / 2
        assert half.unique().tolist() == [scaled * (me.world if me.rank == 0 else 1)]
        assert root.unique().tolist() == [scaled * me.world]
    assert_in_step(me)


@pytest.mark.parametrize("layout", ["dense", "transposed", "strided"])
@pytest.mark.parametrize("site", staged(*HOST, *DEVICES))
@pytest.mark.parametrize("world", [1, 3])
def test_coalesced_calls_read_results_of_earlier_ones(pools, world, site, layout):
    pools(world, site=site).run(dependent, layout)


def blocked_stream(me: RankContext, layout: str) -> tuple[list[float], list[float], list[str]]:
    """Part of the second call's input is filled late, on a stream that is blocked meanwhile.

    The call's tensors must still be allocated when it runs.
    """
    both = filled(8, 1.0, layout)
    seen = torch.empty(8 * me.world)
    dist.all_reduce(
        filled(8, 1.0, layout)
    )  # pinned memory, for which CUDA may wait for all streams
    dist.all_gather(list(torch.empty(8 * me.world).chunk(me.world)), filled(8, 1.0, layout))
    me.fake.cuda.drain_waits(False)
    backend_of()._start_coalescing()
    dist.all_reduce(both[:4])
    me.fake.cuda.finish(me.site.stream)
    me.fake.stall(me.site.stream)
    me.site.fill_later(both[4:], 3.0)
    dist.all_gather(list(seen.chunk(me.world)), both)
    dist.all_reduce(both, dist._make_nccl_premul_sum(2.0))
    work = backend_of()._end_coalescing()
    time.sleep(0.05)  # time for work that is wrongly not ordered behind the blocked stream
    assert not work.is_completed()
    me.fake.resume()
    me.fake.cuda.drain_waits(True)
    work.wait()
    assert_in_step(me)
    violations = me.fake.cuda.violations()
    return seen.view(me.world, 2, 4)[:, :, 0].flatten().tolist(), both[::4].tolist(), violations


@between_processes("the streams of all ranks are stalled")
@pytest.mark.parametrize("layout", ["dense", "strided"])
@pytest.mark.parametrize("site", staged(*DEVICES))
def test_coalesced_calls_are_ordered_behind_earlier_stream_work(pools, site, layout):
    for seen, both, violations in pools(2, site=site).run(blocked_stream, layout):
        assert both == [8.0, 12.0]
        assert seen == [2.0, 3.0] * 2
        assert violations == []


def blocked_input(me: RankContext) -> tuple[Caught, Caught]:
    """Rank 0's stream is blocked before the second call's input, so the call times out."""
    both = torch.ones(8)
    dist.all_reduce(torch.ones(3))
    me.fake.cuda.drain_waits(False)
    backend_of()._start_coalescing()
    dist.all_reduce(both[:4])
    if me.rank == 0:
        me.fake.stall(me.site.stream)
        me.site.fill_later(both[4:], 3.0)
    dist.all_reduce(both)
    work = backend_of()._end_coalescing()
    end = time.monotonic() + 10.0
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    first, second = caught(work.wait), caught(dist.all_reduce, both)
    me.fake.resume()
    return first, second


@pytest.fixture(scope="module", autouse=True)
def blocked_jobs() -> Iterator[dict[str, Pool]]:
    each = {site: {"site": site} for site in DEVICES}
    yield from started_jobs(dict.fromkeys(DEVICES, (blocked_input,)), 2, each, timeout=1.0)


@pytest.mark.parametrize("site", DEVICES)
def test_a_blocked_stream_times_out(blocked_jobs, site):
    for first, second in blocked_jobs[site].results():
        assert first.kinds[:2] == ("Timeout", "CollectiveError"), first
        assert "CollectiveError" in second.kinds, second


def device_fails(me: RankContext, most: int) -> list[tuple[Caught, float]]:
    """Rank 0's device fails in one CUDA call of the block, each time one call later."""
    found = []
    for calls in range(most):
        x, y = ones(), ones()
        backend_of()._start_coalescing()
        dist.all_reduce(x)
        dist.all_reduce(x)
        dist.broadcast(y, 1)
        if me.rank == 0:
            me.fake.cuda.inject("fail", after=calls)
        raised = caught(lambda: backend_of()._end_coalescing().wait())
        me.fake.cuda.heal()
        assert_in_step(me)
        found.append((raised, x[0].item()))
    return found


def test_a_device_failure_during_a_later_call(pools, ranks_as):
    """Some failures hit only the second call: all ranks get the reason, and stay in step."""
    why = "" if ranks_as == THREADS else "rank 0 refused all_reduce: "
    most = 20 if ranks_as == THREADS else 12  # threads use more events
    first, second = pools(2, site="eager").run(device_fails, most)
    failures = [(raised.text, value) for raised, value in second if raised.kind]
    assert any(value == 2 for _, value in failures), "no failure hit the second call"
    assert all(f"{why}CUDA error: injected failure" in text for text, _ in failures)
    assert all(raised.kind for raised, _ in first)


def under_another_stream(me: RankContext) -> list[float]:
    """The block ends on another current stream than the one on which its messages were issued."""
    x, found = torch.zeros(4), []
    for step in (1.0, 2.0, 3.0):
        me.site.fill_later(x, step if me.rank == 0 else -1.0)  # filled late, on the first stream
        backend_of()._start_coalescing()
        if me.rank == 0:
            dist.isend(x, 1)
        else:
            dist.irecv(x, 0)
        with me.site.second_stream():
            backend_of()._end_coalescing().wait()
            me.fake.cuda.finish(me.site.stream)
            found += x.tolist()
        dist.barrier()
    return found


@pytest.mark.parametrize("site", staged(*DEVICES))
def test_coalesced_messages_are_ordered_behind_earlier_stream_work(pools, site):
    assert pools(2, site=site).run(under_another_stream) == [[1.0] * 4 + [2.0] * 4 + [3.0] * 4] * 2
