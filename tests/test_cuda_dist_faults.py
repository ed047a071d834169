"""CUDA tensors and ranks that die or are late, or whose devices fail: all ranks raise an error in
time.

Most tests start their own processes, because they break them.
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
from dist_sites import LARGE, REAL, is_real, sites
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
pools = pytest.fixture(pools_of_sites, scope="module")
FAULTY_RANK = 1
NOTICE_SECONDS = 2.0  # seconds after a death within which every rank raises, on a busy machine


def warm(me: RankContext) -> Tensor:
    """Run a first call on all ranks, and return a tensor of threes."""
    count = LARGE if me.site.real else 1000
    dist.all_reduce(torch.full((count,), 3.0))
    me.site.synchronize()
    dist.barrier()
    return torch.full((count,), 3.0)


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
    "all_reduce of a stalled stream": lambda x: dist.all_reduce(x),
}


def lost_rank(me: RankContext, call: str) -> tuple[float, Caught, Caught, list[float]]:
    """The faulty rank dies before its call, or after it, before its stream has reached it."""
    x = warm(me)
    if me.rank == FAULTY_RANK:
        if "stalled" in call:
            me.site.stall(5.0)
            dist.all_reduce(x, async_op=True)
        die(0.2)
    begin = time.monotonic()
    error = caught(CALLS[call], x)
    later = caught(dist.all_reduce, x)
    me.site.synchronize()  # no stream is left blocked
    return error.when - begin, error, later, x.unique().tolist()


@pytest.mark.parametrize("site", sites("late", *REAL, stands_in=False))
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_is_killed(call, site):
    with fresh(3, site=site) as pool:
        for took, error, later, values in survivors(pool, lost_rank, call):
            assert call == "future" or error.kind == "PeerLost", error
            assert f"rank {FAULTY_RANK}" in error.text
            assert took < 0.2 + NOTICE_SECONDS
            assert "CollectiveError" in later.kinds, later
            assert values == [3.0]  # no result is written


# --- ranks that are late --------------------------------------------------------------------------


def late(
    me: RankContext, limit: float, stream_only: bool
) -> tuple[float, list[Caught], list[float]]:
    """The faulty rank, or with `stream_only` its stream alone, is later than the timeout."""
    x = warm(me)
    backend_of().set_timeout(datetime.timedelta(seconds=limit))
    if me.rank == FAULTY_RANK and stream_only:
        me.site.stall(7.0)
    elif me.rank == FAULTY_RANK:
        time.sleep(2 * limit)
    me.site.run_ahead()
    begin = time.monotonic()
    errors = [caught(CALLS["async all_reduce"], x), caught(dist.all_reduce, x)]
    me.site.resume()
    return errors[0].when - begin, errors, x.unique().tolist()


@pytest.mark.parametrize("stream_only", [False, True])
@pytest.mark.parametrize("site", sites("late", "eager", *REAL, stands_in=False))
def test_a_late_rank_times_out(site, stream_only):
    limit = 3.0 if is_real(site) else 1.0
    with fresh(3, site=site, timeout=60.0) as pool:  # the first call creates contexts
        found = pool.run(late, limit, stream_only)
        for rank, (took, errors, values) in enumerate(found):
            assert "Timeout" in errors[0].kinds, errors
            assert f"rank {FAULTY_RANK}" in errors[0].text
            assert "CollectiveError" in errors[1].kinds, errors
            assert rank == FAULTY_RANK or took < limit + NOTICE_SECONDS
            assert values == [3.0]


# --- devices that fail ----------------------------------------------------------------------------


def failing(me: RankContext, call: int) -> tuple[Caught, Caught, float]:
    """One CUDA call of the faulty rank fails."""
    if me.rank == FAULTY_RANK:
        me.fake.cuda.inject("fail", after=call)
    first = caught(dist.all_reduce, torch.ones(100))
    me.fake.cuda.heal()
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
