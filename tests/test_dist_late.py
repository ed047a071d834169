"""A rank that is late, leaves, or never comes: waiting ranks raise after the group's timeout.

The error names the missing rank. Then the group refuses further work, also that of the late rank.
"""

from __future__ import annotations

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Caught, RankContext, backend_of, caught, fresh
from dist_waits import (
    AT_ONCE,
    DESTROYED,
    KILLED_RANK,
    NOTICED,
    WAITS,
    after,
    begin,
    heard,
    others,
    say,
)

pytestmark = pytest.mark.skipif(not OURS, reason=f"{BACKEND} has no type for this error, or hangs")
PATIENCE = 0.5  # timeout of the group, in seconds


def kept_waiting(me: RankContext, wait: str) -> tuple[Caught, float, tuple]:
    """The victim makes its call after all its peers have timed out."""
    begin(me)
    backend_of().set_timeout(datetime.timedelta(seconds=PATIENCE))
    dist.barrier()
    start = time.monotonic()
    if me.rank == KILLED_RANK:
        heard(me, "raised", others(me))
    error = (
        caught(WAITS[wait][1]) if me.rank != KILLED_RANK else caught(dist.all_reduce, torch.ones(3))
    )
    say(me, "raised")
    return error, error.when - start, after(me)


LATE_FOR = [
    "all_reduce",
    "large all_reduce",
    "async all_reduce",
    "broadcast",
    "barrier",
    "recv",
    "send",
]


@pytest.mark.parametrize("wait", LATE_FOR)
def test_a_late_rank(wait):
    with fresh(3) as pool:
        found = pool.run(kept_waiting, wait)
    for rank, (error, seconds, (refusal, _, destroyed)) in enumerate(found):
        assert "CollectiveError" in error.kinds, error
        assert "CollectiveError" in refusal.kinds, refusal
        assert destroyed < DESTROYED
        if rank == KILLED_RANK:
            continue  # raises at once, because the group is aborted
        assert error.kind in ("Timeout", "PeerLost"), error
        assert seconds < PATIENCE + NOTICED, error
        assert f"rank {KILLED_RANK}" in error.text, error
    waited = [(e, s) for e, s, _ in found if e.kind == "Timeout"]
    assert waited, found
    assert all(s > 0.8 * PATIENCE for e, s in waited[:1])
    assert any(WAITS[wait][0] in e.text for e, _ in waited), waited


def left_behind(me: RankContext) -> Caught | None:
    begin(me)
    if me.rank == KILLED_RANK:
        time.sleep(0.3)
        dist.destroy_process_group()
        return None
    error = caught(dist.all_reduce, torch.ones(3))
    dist.destroy_process_group()
    return error


def test_a_rank_destroys_its_group():
    with fresh(3) as pool:
        start = time.monotonic()
        errors = pool.run(left_behind)
    for error in errors[:KILLED_RANK] + errors[KILLED_RANK + 1 :]:
        assert error.kind == "PeerLost", error
        assert f"rank {KILLED_RANK}" in error.text, error
        assert error.when - start < 0.3 + NOTICED + 1


def aborted(me: RankContext) -> tuple[Caught, float]:
    """A second thread of rank 0 aborts the group."""
    begin(me)
    start = time.monotonic()
    if me.rank == 0:
        threading.Timer(0.4, dist.group.WORLD.abort).start()
    if me.rank == KILLED_RANK:
        time.sleep(1.2)
    error = caught(dist.all_reduce, torch.ones(3))
    caught(dist.destroy_process_group)
    return error, error.when - start


def test_abort():
    with fresh(3) as pool:
        found = pool.run(aborted)
    for error, seconds in found:
        assert "CollectiveError" in error.kinds, error
        assert seconds < 1.2 + AT_ONCE


def lonely(me: RankContext) -> tuple[Caught, float]:
    """Rank 0 initialises alone: no peer joins the bootstrap."""
    start = time.monotonic()
    options = {"timeout": datetime.timedelta(seconds=1)}
    error = caught(me.init, "nobody", **options) if me.rank == 0 else caught(time.sleep, 0)
    return error, error.when - start


def test_ranks_that_never_come():
    with fresh(3, group=False) as pool:
        (error, seconds), *_ = pool.run(lonely)
    assert error.kind, "nothing was raised"
    assert seconds < 6, error
