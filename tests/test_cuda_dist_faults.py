"""CUDA tensors and ranks that die, are late, or lose work: all ranks raise an error in time.

No stream stays blocked, and memory that a peer's late kernel may still write is not reused. Most
tests start their own processes, because they break them.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Pool, RankContext, backend_of, caught, fresh, pools_of_sites
from dist_sites import LARGE, REAL, is_real, sites, until
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
pools = pytest.fixture(pools_of_sites, scope="module")
FAULTY_RANK = 1
NOTICE_SECONDS = 2.0  # seconds after a death within which every rank raises, on a busy machine


def warm(me: RankContext, zero_copy: bool = False) -> Tensor:
    """Run a first call on all ranks, and return a tensor of threes.

    With `zero_copy`, the tensors are in symmetric memory.
    """
    new: Callable[[int], Tensor] = me.site.symmetric if zero_copy else torch.empty
    count = LARGE if me.site.real else 1000
    x = new(count).fill_(3)
    used = me.site.usage().used if zero_copy else 0
    dist.all_reduce(new(count).fill_(3))
    me.site.synchronize()
    if zero_copy:
        until(lambda: me.site.usage().used == used)
    dist.barrier()
    return x


def die(after: float) -> None:
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def survivors(pool: Pool, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a job in which the faulty rank dies, and return the results of the survivors."""
    outcomes = pool.outcomes(job, *args)
    assert [outcome.died for outcome in outcomes] == [
        r == FAULTY_RANK for r in range(len(outcomes))
    ]
    del outcomes[FAULTY_RANK]
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


# --- ranks that die -------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "async all_reduce": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "future": lambda x: dist.all_reduce(x, async_op=True).get_future().wait(),
    "recv": lambda x: dist.recv(x, FAULTY_RANK),
}


def lost_rank_before_call(me: RankContext, call: str) -> tuple[float, Caught, Caught]:
    x = warm(me)
    if me.rank == FAULTY_RANK:
        die(0.2)
    begin = time.monotonic()
    error = caught(CALLS[call], x)
    later = caught(dist.all_reduce, x)
    me.site.synchronize()  # no stream is left blocked
    return error.when - begin, error, later


@pytest.mark.parametrize("site", sites("late:cuda_ipc", "late", *REAL, stands_in=False))
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_is_killed_before_its_call(call, site):
    with fresh(3, site=site) as pool:
        for took, error, later in survivors(pool, lost_rank_before_call, call):
            assert call == "future" or error.kind == "PeerLost", error
            assert f"rank {FAULTY_RANK}" in error.text
            assert took < 0.2 + NOTICE_SECONDS
            assert "CollectiveError" in later.kinds, later


def lost_rank_after_enqueue(me: RankContext, zero_copy: bool) -> tuple[Any, ...]:
    """The faulty rank dies after it enqueued its part, and before its stream executes it.

    With `zero_copy`, its tensor is exposed to the peers. No host has waited, and no data has moved.
    """
    x = warm(me, zero_copy)
    if me.rank == FAULTY_RANK:
        me.site.stall(5.0)
    me.site.run_ahead()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    if me.rank == FAULTY_RANK:
        die(0.2)
    begin = time.monotonic()
    over = until(work.is_completed)
    took, message = time.monotonic() - begin, str(work.exception())
    errors = [caught(work.wait), caught(dist.all_reduce, x)]
    values, address = x.unique().tolist(), x.data_ptr()
    if not zero_copy:
        me.site.resume()
        errors.append(caught(work.wait))
    count = x.numel()
    del x, work
    me.site.synchronize()
    time.sleep(0.1)
    reused = zero_copy and me.site.symmetric(count).data_ptr() == address
    return over, took, message, errors, values, reused, me.site.violations()


@pytest.mark.parametrize("zero_copy", [False, True], ids=["staged", "zero-copy"])
@pytest.mark.parametrize("site", sites("eager:cuda_ipc", "cuda:cuda_ipc", stands_in=False))
def test_a_rank_is_killed_with_its_work_enqueued(site, zero_copy):
    with fresh(3, site=site) as pool:
        for over, took, message, errors, values, reused, violations in survivors(
            pool, lost_rank_after_enqueue, zero_copy
        ):
            assert over
            assert took < 0.2 + NOTICE_SECONDS
            assert f"rank {FAULTY_RANK}" in message
            for error in errors:
                assert error.kind == "PeerLost", error
                assert f"rank {FAULTY_RANK}" in error.text, error
            assert values == [3.0]  # no result is written after that
            assert not reused
            assert violations == []


# --- ranks that are late --------------------------------------------------------------------------


def late(
    me: RankContext, limit: float, stream_only: bool, zero_copy: bool
) -> tuple[float, list[Caught], list[float], bool]:
    """The faulty rank, or with `stream_only` its stream alone, is later than the timeout."""
    x = warm(me, zero_copy)
    backend_of().set_timeout(datetime.timedelta(seconds=limit))
    if me.rank == FAULTY_RANK and stream_only:
        me.site.stall(7.0)
    elif me.rank == FAULTY_RANK:
        time.sleep(2 * limit)
    me.site.run_ahead()
    begin = time.monotonic()
    errors = [caught(CALLS["async all_reduce"], x)]
    if not errors[0].kind:  # the host has waited for no stream; the next call raises
        time.sleep(1.5 * limit)
        errors = [caught(dist.all_reduce, x)]
    errors.append(caught(dist.all_reduce, x))
    me.site.resume()
    values, kept = x.unique().tolist(), True
    if zero_copy:
        before = me.site.usage().used
        del x
        time.sleep(0.1)
        kept = me.site.usage().used == before
    return errors[0].when - begin, errors, values, kept


@pytest.mark.parametrize(
    ("stream_only", "zero_copy"), [(False, False), (True, False), (True, True)], ids=str
)
@pytest.mark.parametrize("site", sites("late", "eager:cuda_ipc", *REAL, stands_in=False))
def test_a_late_rank_times_out(site, stream_only, zero_copy):
    if zero_copy and not site.endswith("cuda_ipc"):
        pytest.skip("no zero-copy tensors with host staging")
    limit = 3.0 if is_real(site) else 1.0
    with fresh(3, site=site, timeout=60.0) as pool:  # the first call creates contexts
        found = pool.run(late, limit, stream_only, zero_copy)
        for rank, (took, errors, values, kept) in enumerate(found):
            assert "Timeout" in errors[0].kinds, errors
            assert f"rank {FAULTY_RANK}" in errors[0].text
            assert "CollectiveError" in errors[1].kinds, errors
            assert rank == FAULTY_RANK or took < 1.5 * limit + NOTICE_SECONDS
            assert values == [3.0]
            assert kept


def stopped_after_its_entry(me: RankContext) -> tuple[str, bool]:
    """The rank that launches the kernel, with all tensors exposed to it, is stopped before that."""
    x, store = warm(me, zero_copy=True), dist.distributed_c10d._get_default_store()
    if me.rank == 0:
        store.set("pid", str(os.getpid()))
        me.fake.gpu.delay("launch", 0.5)
    else:
        pid = int(store.get("pid"))
    me.site.run_ahead()
    work = dist.all_reduce(x, async_op=True)
    if me.rank == 1:
        time.sleep(0.25)
        os.kill(pid, signal.SIGSTOP)
    error = caught(work.wait)
    used = me.site.usage().used
    del x, work
    time.sleep(0.1)
    kept = me.site.usage().used == used
    if me.rank == 1:
        time.sleep(0.2)
        os.kill(pid, signal.SIGCONT)
    return error.kind, kept


def test_exposed_memory_of_a_failed_call_is_not_reused():
    """Rank 0 launches its kernel after its peers have timed out."""
    with fresh(3, site="eager:cuda_ipc", timeout=1.0) as pool:
        pool.outcomes(warm)
        assert pool.run(stopped_after_its_entry)[1:] == [("Timeout", True)] * 2


# --- devices that fail ----------------------------------------------------------------------------


def failing(me: RankContext, call: int) -> tuple[Caught, Caught, float]:
    """One CUDA call of the faulty rank fails."""
    if me.rank == FAULTY_RANK:
        me.fake.fail_call(call)
    first = caught(dist.all_reduce, torch.ones(100))
    me.fake.fail_call(-1)
    y = torch.ones(3)
    second = caught(dist.all_reduce, y)
    return first, second, y.sum().item()


BEFORE = 6  # CUDA calls before the exchange: allocate, copy, create and record event, two queries


@pytest.mark.parametrize("call", range(BEFORE + 2))
def test_a_failing_cuda_call_is_reported(pools, call):
    found = pools(3, site="late").run(failing, call)
    for rank, (first, second, total) in enumerate(found):
        if rank == FAULTY_RANK:
            assert "injected failure" in first.text, first
        elif call < BEFORE:
            assert first.kind == "ValueError", first
            assert f"rank {FAULTY_RANK}" in first.text
            assert "injected failure" in first.text
        else:
            assert first.kind == "", first
        assert (second.kind, total) == ("", 9.0), second


def failed_device(me: RankContext) -> tuple[float, Caught]:
    """The faulty rank's device fails under a call that its host has enqueued."""
    x = warm(me)
    if me.rank == FAULTY_RANK:
        me.site.stall()
        me.fake.gpu.fail("query", 0)
    me.site.run_ahead()
    begin = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    until(work.is_completed)
    took, error = time.monotonic() - begin, caught(work.wait)
    time.sleep(0.5)  # a device that goes on before the peers have noticed would end their calls
    me.site.resume()
    return took, error


def test_a_failed_device_ends_the_call():
    with fresh(3, site="eager:cuda_ipc") as pool:
        for rank, (took, error) in enumerate(pool.run(failed_device)):
            assert took < NOTICE_SECONDS
            failed = rank == FAULTY_RANK
            assert ("injected failure in query" if failed else "its GPU failed") in error.text


def dropped_calls(me: RankContext, call: str) -> tuple[list[bool], Caught]:
    """On the faulty rank, CUDA calls of this kind do nothing; the streams of its peers are slow."""
    dist.all_reduce(torch.ones(3))
    me.site.run_ahead(None if me.rank == FAULTY_RANK else 0.03)
    if me.rank == FAULTY_RANK:
        me.fake.gpu.drop(call)
    right = []
    for i in range(4):
        x, out = torch.full((100,), float(i)), torch.zeros(100 * me.world)
        dist.all_reduce(x, async_op=True)
        last = dist.all_gather_into_tensor(out, torch.full((100,), i + 1.0), async_op=True)
        until(last.is_completed, 2.0)
        right.append(bool((x == i * me.world).all() & (out == i + 1).all()))
    return right, caught(dist.all_reduce, torch.ones(3))


@pytest.mark.parametrize("call", ["write_value", "wait_value", "launch"])
def test_dropped_cuda_calls_are_detected(call):
    """Check the tests themselves: a dropped CUDA call gives wrong results or an error."""
    with fresh(3, site="eager:cuda_ipc", timeout=1.0) as pool:
        outcomes = [o.value for o in pool.outcomes(dropped_calls, call, seconds=30.0)]
        assert not all(all(right) and error.kind == "" for right, error in outcomes), call
