"""A rank that is stopped during a call on tensors in symmetric memory, and resumes later.

By then its peers have timed out: its late writes must not land in new tensors, and it must soon
notice and raise.
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
from dist_pool import BACKEND, OURS, Caught, RankContext, backend_of, caught, fresh
from torch import Tensor

import pycollect as pc

pytestmark = pytest.mark.skipif(not OURS, reason=f"{BACKEND} has no symmetric memory")

COUNT = 48 << 20  # float32 elements: a rank's share takes tens of milliseconds
TIMEOUT = 1.0  # timeout of the group, in seconds
TRIES = 20  # attempts to stop the peer during a call; some may be too slow on a loaded machine
# Elements (4 MiB) that a thread may still write before it polls the group's abort state again.
BLOCK = (4 << 20) // 4


def stop_during_call(x: Tensor, peer: int) -> bool:
    """Stop the peer once it has begun to write its share, the second half of the tensor.

    Returns true if the share was not yet complete.
    """
    share = x[COUNT // 2 :]
    while share[0] == 1:
        pass
    os.kill(peer, signal.SIGSTOP)
    time.sleep(0.1)  # until the peer has stopped
    return bool(share[-1] == 1)


def error_beside_a_stopped_peer(x: Tensor, peer: int) -> Caught:
    """Return the error of this rank's call while the peer is stopped in the same call."""
    for _ in range(TRIES):
        x.fill_(1)
        dist.barrier()
        work = dist.all_reduce(x, async_op=True)
        if stop_during_call(x, peer):
            return caught(work.wait)
        os.kill(peer, signal.SIGCONT)
        work.wait()
    pytest.fail("the peer was never stopped in the middle of a call")


def error_of_the_stopped_rank(x: Tensor) -> Caught:
    """Return the error of the call in which this rank was stopped."""
    for _ in range(TRIES):
        x.fill_(1)
        if caught(dist.barrier).kinds:
            break  # this rank was stopped in the last call
        if (error := caught(dist.all_reduce, x)).kinds:
            return error
    return Caught((), "", 0)


def run_beside_a_stopped_peer(me: RankContext, keeps: bool) -> tuple[Caught, Caught, int]:
    """Return the call's error, the error of a new tensor, and how many elements change later."""
    x = pc.symmetric_empty(COUNT)
    pids = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    backend_of().set_timeout(datetime.timedelta(seconds=TIMEOUT))
    if me.rank == 1:
        return error_of_the_stopped_rank(x), Caught((), "", 0), 0
    try:
        error = error_beside_a_stopped_peer(x, pids[1])
        if not keeps:
            x = torch.zeros(0)  # frees the memory, into which the peer still writes
        refusal = caught(pc.symmetric_empty, COUNT)
        before = x.clone()
    finally:
        os.kill(pids[1], signal.SIGCONT)
    time.sleep(1.0)  # much longer than the peer would take to write the rest of its share
    return error, refusal, int((x != before).sum())


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "freed"])
def test_late_writes_of_a_stopped_rank(keeps):
    with fresh(2) as pool, contextlib.suppress(ProcessLookupError):
        (error, refusal, changed), (late, _, _) = pool.run(
            run_beside_a_stopped_peer, keeps, seconds=60
        )
    assert error.kind == "Timeout", error
    assert "rank 1" in error.text, error
    assert changed <= (BLOCK if keeps else 0), f"{changed} elements changed"
    assert "CollectiveError" in refusal.kinds, "a broken group allocated memory"
    assert "broken since all_reduce" in refusal.text, refusal
    assert late.kind == "Timeout", "the late rank's call returned as if nothing had happened"
