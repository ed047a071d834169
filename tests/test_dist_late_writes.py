"""A rank that is stopped in the middle of a call on tensors in shared memory, and goes on later.

The others have given up by then: what it still writes must not land in tensors that are new, and
it must soon notice and raise.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Caught, Me, backend_of, caught, fresh
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason=f"{BACKEND} has no memory to share")

COUNT = 48 << 20  # elements of float32: a rank's share takes tens of milliseconds
PATIENCE = 1.0  # seconds: the group's timeout
TRIES = 20  # to stop the other rank in the middle: a crowded machine may be too slow for some
# What a thread may still write before it looks at the group again: a few MiB, in elements.
BLOCK = (4 << 20) // 4


def stopped(x: Tensor, peer: int) -> bool:
    """Stop the peer as soon as it has written into its share, the second half; was that in time?"""
    share = x[COUNT // 2 :]
    while share[0] == 1:
        pass
    os.kill(peer, signal.SIGSTOP)
    time.sleep(0.1)  # until it has
    return bool(share[-1] == 1)


def given_up(x: Tensor, peer: int) -> Caught:
    """What this rank's call raises while the peer is stopped in its own."""
    for _ in range(TRIES):
        x.fill_(1)
        dist.barrier()
        work = dist.all_reduce(x, async_op=True)
        if stopped(x, peer):
            return caught(work.wait)
        os.kill(peer, signal.SIGCONT)
        work.wait()
    pytest.fail("the peer was never stopped in the middle of a call")


def go_on_until(x: Tensor) -> Caught:
    """What the call raises in which this rank was stopped."""
    for _ in range(TRIES):
        x.fill_(1)
        if caught(dist.barrier).kinds:
            break  # the last call was that one
        if (error := caught(dist.all_reduce, x)).kinds:
            return error
    return Caught((), "", 0)


def placed() -> Tensor:
    import pycollect

    return pycollect.empty(COUNT)


def survive(me: Me, keeps: bool) -> tuple[Caught, Caught, int]:
    """What the call raises, what a new tensor does, and how much of memory changes afterwards."""
    x = placed()
    pids = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    backend_of().set_timeout(datetime.timedelta(seconds=PATIENCE))
    if me.rank == 1:
        return go_on_until(x), Caught((), "", 0), 0
    try:
        error = given_up(x, pids[1])
        if not keeps:
            del x
            x = torch.zeros(0)
        fresh: list[Tensor] = [x]
        refusal = caught(lambda: fresh.append(placed()))
        watched = x if keeps else fresh[-1].fill_(7)
        before = watched.clone()
    finally:
        os.kill(pids[1], signal.SIGCONT)
    time.sleep(1.0)  # much longer than the rest of its share takes
    return error, refusal, int((watched != before).sum())


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "freed"])
def test_a_rank_that_was_stopped_goes_on(keeps):
    with fresh(2) as pool, contextlib.suppress(ProcessLookupError):
        (error, refusal, changed), (late, _, _) = pool.run(survive, keeps, seconds=60)
    assert error.kind == "Timeout", error
    assert "rank 1" in error.text, error
    assert changed <= (BLOCK if keeps else 0), f"{changed} elements changed"
    assert "CollectiveError" in refusal.kinds, "memory of a broken group was given out"
    assert "broken since all_reduce" in refusal.text, refusal
    assert late.kind == "Timeout", "the late rank's call returned as if nothing had happened"
