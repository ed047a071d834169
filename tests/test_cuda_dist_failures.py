"""Devices that fail in a collective or a message of CUDA tensors, and messages that one end leaves.

The other ranks get their data, or in time an error that names the rank.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import (
    OURS,
    Caught,
    JobPool,
    RankContext,
    Spec,
    caught,
    check_side_by_side,
    fresh,
)
from faults import FAULTY_RANK, NOTICE_SECONDS
from sites import IN_PLACE, THREADS, not_on
from test_cuda_dist_p2p import LARGE, values

pytestmark = [
    pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors"),
    not_on(THREADS, IN_PLACE),
]
SMALL = 1000  # elements of a message of which a sender keeps no buffer between the ranks


def send(me: RankContext, stalled: bool = False, count: int = LARGE) -> Any:
    """Start the send; with `stalled`, the stream does not reach it."""
    if stalled:
        me.site.synchronize()
        me.fake.stall(me.site.stream)
    return dist.isend(values(count, 1), 1)


# --- devices that fail ----------------------------------------------------------------------------


def failing_collective(me: RankContext, call: int) -> tuple[Caught, Caught, float]:
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
    found = pools(3, site="late").run(failing_collective, call)
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


def receiver_fails(me: RankContext) -> tuple[Caught, bool]:
    """The receiver's device fails: only the receive raises, and the next message is right."""
    y, token = torch.zeros(SMALL), me.site.host(torch.zeros(1))
    if me.rank == 0:
        dist.recv(token, 1)
        error = caught(send(me, count=SMALL).wait)
        dist.recv(token, 1)
        dist.send(values(SMALL, 2), 1)
        return error, True
    work = dist.irecv(y, 0)
    me.fake.cuda.inject("fail", after=0)
    dist.send(token, 0)
    error = caught(work.wait)
    me.fake.cuda.heal()
    dist.send(token, 0)
    dist.recv(y, 0)
    return error, torch.equal(y, values(SMALL, 2))


def sender_fails(me: RankContext) -> tuple[Caught, bool]:
    """A send fails on the sender alone, and the next message is right."""
    if me.rank == 0:
        me.fake.cuda.inject(
            "fail", after=3
        )  # allocation, copy and event succeed; the first query fails
        error = caught(lambda: dist.isend(torch.ones(SMALL), 1).wait())
        dist.send(torch.full((SMALL,), 5.0), 1)
        return error, True
    y = torch.zeros(SMALL)
    dist.recv(y, 0)
    return Caught((), "", 0.0), bool(y.eq(5).all())


@pytest.mark.parametrize(("job", "faulty_rank"), [(receiver_fails, 1), (sender_fails, 0)])
def test_a_device_failure_of_one_end_affects_no_peer(job, faulty_rank, pools):
    with pools.fresh(2, site="late") as pool:
        errors, right = zip(*pool.run(job), strict=True)
        assert "injected failure" in errors[faulty_rank].text
        assert not errors[1 - faulty_rank].kind, errors
        assert all(right)


def late_sender_fails(me: RankContext) -> Caught:
    """The sender's device fails when the receiver waits already, and a message is behind."""
    if me.rank == 1:
        return caught(dist.recv, me.site.host(torch.zeros(SMALL)), 0)
    me.site.stall()
    first = dist.isend(torch.ones(SMALL), 1)
    second = dist.isend(me.site.host(torch.full((SMALL,), 2.0)), 1)
    me.fake.cuda.inject("fail", after=0)
    error = caught(first.wait)
    assert caught(second.wait).kind == "PeerLost"
    return error


def test_the_receiver_learns_that_the_device_of_its_sender_has_failed():
    with fresh(2, site="late") as pool:
        start = time.monotonic()
        sender, receiver = pool.run(late_sender_fails)
    assert "injected failure" in sender.text
    assert receiver.kind == "PeerLost"
    assert "the device of a rank failed in send: " in receiver.text
    assert receiver.when - start < NOTICE_SECONDS


def failing(me: RankContext, end: int, after: int) -> tuple[Caught, bool]:
    """One CUDA call for a message fails on one end."""
    x, y = torch.full((100_000,), 7.0), torch.zeros(100_000)
    if me.rank == end:
        me.fake.cuda.inject("fail", after=after)
    error = caught(dist.send, x, 1) if me.rank == 0 else caught(dist.recv, y, 0)
    me.fake.cuda.heal()
    return error, bool((y == 7.0).all())


CALLS = range(8)
# Least number of CUDA calls of each end. Sender: pinned memory, a copy, an event and two queries.
# Receiver: pinned memory, an event, a copy and another call.
MIN_CALLS = {0: 1 + 1 + 1 + 2, 1: 1 + 1 + 1 + 1}


def test_every_failing_cuda_call(pools):
    """The end with the failing device raises; the other end gets its data, or an error in time."""

    def check(key: tuple[int, int], pool: JobPool) -> None:
        (end, after), (errors, right) = key, zip(*pool.results(), strict=True)
        if errors[end].kind:
            assert "injected failure" in errors[end].text, errors
        other = errors[1 - end]
        assert not other.kind or "CollectiveError" in other.kinds, errors
        assert errors[1].kind or right[1]
        assert after >= MIN_CALLS[end] or errors[end].kind, "nothing failed"

    # Some jobs wait for the timeout, which must suffice to bootstrap.
    spec = Spec(2, site="late", timeout=4.0, ranks_as=pools.ranks_as)
    check_side_by_side(
        (((end, after), spec, failing, (end, after)) for end in (0, 1) for after in CALLS), check
    )


def destroyed(me: RankContext, stalled: bool) -> tuple[float, Caught, bool]:
    """Destroy the group without waiting for a message that is received late, or that is stalled."""
    y = torch.zeros(LARGE)
    if me.rank == 1 and not stalled:
        time.sleep(0.5)
    work = send(me, stalled) if me.rank == 0 else dist.irecv(y, 0)
    start = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - start
    return took, caught(work.wait), torch.equal(y, values(LARGE, 1))


@pytest.mark.parametrize("stalled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_destroy_with_a_message_in_flight(pools, stalled):
    """Rank 0 gives its peer some time: at most one or two shutdown timeouts."""
    with pools.fresh(2, site="late") as pool:
        sender, receiver = pool.run(destroyed, stalled, seconds=60.0)
    for took, error, _ in (sender, receiver):
        assert took < (12 if stalled else 3)
        assert ("CollectiveError" in error.kinds) == stalled, error
    assert receiver[2] == (not stalled)
