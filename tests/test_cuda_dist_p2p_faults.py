"""Failures of messages of CUDA tensors: an end that dies, is late or leaves, or a failing device.
The other end gets the data, or in time an error that names the rank.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Pool, RankContext, backend_of, caught, fresh, started_jobs
from dist_ranks import NO_TRANSPORTS, between_processes
from dist_sites import REAL, sites
from test_cuda_dist_faults import NOTICE_SECONDS, die
from test_cuda_dist_p2p import FRAGMENT, LARGE, copies_to_device, values, waits_for_a_copy_to_device
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors"),
    between_processes(NO_TRANSPORTS),
]


def send(me: RankContext, partial: bool, count: int = LARGE) -> Any:
    """Start the send; with `partial`, only the first two fragments leave the device."""
    if partial:
        me.site.synchronize()
        me.fake.stall(True, after=2)
    return dist.isend(values(count, 1), 1)


def receive(me: RankContext, partial: bool, y: Tensor | None = None) -> Any:
    """Start the receive; with `partial`, return after the first fragments have arrived."""
    before = copies_to_device(me)
    work = dist.irecv(torch.zeros(LARGE) if y is None else y, 0)
    assert not partial or waits_for_a_copy_to_device(me, before)
    return work


def timed(work: Any) -> tuple[Caught, float]:
    begin = time.monotonic()
    error = caught(work.wait)
    return error, error.when - begin


# --- ends that die, or whose devices fail ---------------------------------------------------------


def lost_end(
    me: RankContext, faulty_rank: int, when: str
) -> tuple[Caught, float, Caught, list[float]]:
    """The faulty rank dies before its peer arrives, or after part of the message: the peer's error
    does not wait for copies that remain on the sender's device."""
    partial, y = when == "meanwhile", torch.full((LARGE,), 3.0)
    dist.barrier()
    if me.rank == faulty_rank and (me.rank == 0 or partial):
        work = send(me, partial) if me.rank == 0 else receive(me, partial)
        assert not work.is_completed()
    if me.rank == faulty_rank:
        die(0.5 if partial else 0.2)
    if not partial and faulty_rank == 0:
        time.sleep(0.5)
    work = send(me, partial) if me.rank == 0 else receive(me, partial, y)
    error, took = timed(work)
    again = caught(dist.send, torch.ones(3), 1) if me.rank == 0 else error
    return error, took, again, [] if partial else y.unique().tolist()


@pytest.mark.parametrize("faulty_rank", [0, 1])
@pytest.mark.parametrize("when", ["first", "meanwhile"])
@pytest.mark.parametrize("site", sites("late", *REAL, stands_in=False))
def test_the_other_end_raises_if_one_dies(site, when, faulty_rank, ranks_as):
    if site in REAL and when == "meanwhile":
        pytest.skip("no GPU stops in the middle of a message")
    with fresh(2, site=site, ranks_as=ranks_as) as pool:
        outcomes = pool.outcomes(lost_end, faulty_rank, when)
        assert outcomes[faulty_rank].died
        assert not outcomes[1 - faulty_rank].error, outcomes[1 - faulty_rank].error
        error, took, again, left = outcomes[1 - faulty_rank].value
        assert (error.kind, again.kind) == ("PeerLost", "PeerLost"), (error, again)
        assert f"rank {faulty_rank}" in error.text
        assert took < 0.5 + NOTICE_SECONDS
        assert left in ([], [3.0])


def sender_fails(me: RankContext, partial: bool) -> tuple[Caught, float]:
    """The sender's device fails before any copy, or after the receiver got the first fragments."""
    if me.rank == 0:
        if not partial:
            me.fake.stall(True)
        work = send(me, partial)
        time.sleep(0.4)
        me.fake.fail_call(0)
    else:
        work = receive(me, partial)
    return timed(work)


@pytest.mark.parametrize("partial", [False, True])
def test_a_sender_whose_device_fails(partial, ranks_as):
    with fresh(2, site="late", ranks_as=ranks_as) as pool:
        (sender, _), (receiver, took) = pool.run(sender_fails, partial)
        assert "injected failure" in sender.text, sender
        assert "CollectiveError" in receiver.kinds, receiver
        assert "the device of a rank failed in send" in receiver.text
        assert took < 0.4 + NOTICE_SECONDS


def receiver_fails(me: RankContext) -> tuple[Caught, bool]:
    """The receiver's device fails: only the receive raises, and the next message is right."""
    y, token = torch.zeros(LARGE), me.site.host(torch.zeros(1))
    if me.rank == 0:
        work = send(me, True)
        dist.recv(token, 1)
        me.fake.stall(False)
        error = caught(work.wait)
        dist.send(values(LARGE, 2), 1)
        return error, True
    work = receive(me, True)
    me.fake.fail_call(0)
    dist.send(token, 0)
    error = caught(work.wait)
    me.fake.fail_call(-1)
    dist.recv(y, 0)
    return error, torch.equal(y, values(LARGE, 2))


def small_send_fails(me: RankContext) -> tuple[Caught, bool]:
    """A small send fails on the sender alone, and the next message is right."""
    if me.rank == 0:
        me.fake.fail_call(3)  # allocation, copy and event succeed; the first query fails
        error = caught(lambda: dist.isend(torch.ones(3), 1).wait())
        dist.send(torch.full((3,), 5.0), 1)
        return error, True
    y = torch.zeros(3)
    dist.recv(y, 0)
    return Caught((), "", 0.0), bool(y.eq(5).all())


@pytest.mark.parametrize(("job", "faulty_rank"), [(receiver_fails, 1), (small_send_fails, 0)])
def test_a_device_failure_of_one_end_affects_no_peer(job, faulty_rank, ranks_as):
    with fresh(2, site="late", ranks_as=ranks_as) as pool:
        errors, right = zip(*pool.run(job), strict=True)
        assert "injected failure" in errors[faulty_rank].text
        assert not errors[1 - faulty_rank].kind, errors
        assert all(right)


def failing(me: RankContext, end: int, after: int) -> tuple[Caught, bool]:
    """One CUDA call for a message fails on one end."""
    x, y = torch.full((3 * FRAGMENT - 1,), 7.0), torch.zeros(3 * FRAGMENT - 1)
    if me.rank == end:
        me.fake.fail_call(after)
    error = caught(dist.send, x, 1) if me.rank == 0 else caught(dist.recv, y, 0)
    me.fake.fail_call(-1)
    return error, bool((y == 7.0).all())


CALLS = range(18)
# Least number of CUDA calls of each end. Sender: pinned memory, then a copy, an event and two
# queries for each of three fragments. Receiver: pinned memory, an event, a copy and another call.
MIN_CALLS = {0: 1 + 2 * 3 + 2 * 3, 1: 1 + 1 + 1 + 1}


@pytest.fixture(scope="module")
def failures(ranks_as: str) -> Iterator[dict[tuple[int, int], Pool]]:
    """A pool per failing call. Some jobs wait for the timeout, which must suffice to bootstrap."""
    jobs = {(end, after): (failing, end, after) for end in (0, 1) for after in CALLS}
    yield from started_jobs(jobs, 2, site="late", timeout=4.0, ranks_as=ranks_as)


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("after", CALLS)
def test_every_failing_cuda_call(failures, end, after):
    """The end with the failing device raises; the other end gets its data, or an error in time."""
    errors, right = zip(*failures[end, after].results(), strict=True)
    if errors[end].kind:
        assert "injected failure" in errors[end].text, errors
    other = errors[1 - end]
    assert not other.kind or "CollectiveError" in other.kinds, errors
    assert errors[1].kind or right[1]
    assert after >= MIN_CALLS[end] or errors[end].kind, "nothing failed"


# --- ends that are late ---------------------------------------------------------------------------


def late(me: RankContext, how: str) -> Caught:
    partial, count = how in ("in part", "future alone"), 3 if how == "small" else LARGE
    if how == "not received" and me.rank == 1:
        time.sleep(2.0)
        return caught(dist.recv, torch.ones(LARGE), 0)
    if how in ("not sent", "small") and me.rank == 0:
        me.fake.stall(True)  # the stream does not reach the send
    work = send(me, partial, count) if me.rank == 0 else receive(me, partial, torch.zeros(count))
    if how == "future alone":  # the timeout expires while no thread waits for the future
        future = work.get_future()
        time.sleep(1.5)
        return caught(future.wait)
    return caught(work.wait)


IN_TIME = r"rank 0 (on host a \(rank 0\) )?did not arrive"
LATE = {
    "not received": ("Timeout", "rank 1"),
    "not sent": ("Timeout", "rank 0"),
    "small": ("CollectiveError", "rank 0"),
    "in part": ("Timeout", IN_TIME),
    "future alone": ("Timeout", IN_TIME),
}


@pytest.fixture(scope="module")
def late_ends(ranks_as: str) -> Iterator[dict[str, Pool]]:
    jobs = {how: (late, how) for how in LATE}
    yield from started_jobs(jobs, 2, site="late", timeout=1.0, ranks_as=ranks_as)


@pytest.mark.parametrize("how", LATE)
def test_a_late_end_times_out(late_ends, how):
    kind, words = LATE[how]
    for error in late_ends[how].results():
        assert kind in error.kinds, error
        assert re.search(words, error.text), error


def wait_with_timeout(me: RankContext) -> tuple[Caught, bool]:
    """An expired timeout of one wait() fails only that wait; the message may still complete."""
    y = torch.zeros(LARGE)
    work = send(me, True) if me.rank == 0 else dist.irecv(y, 0)
    error = caught(work.wait, datetime.timedelta(seconds=0.3))
    time.sleep(0.3)
    me.fake.stall(False)
    work.wait()
    return error, me.rank == 0 or torch.equal(y, values(LARGE, 1))


@pytest.mark.parametrize("site", ["late", "eager"])
def test_the_timeout_of_one_wait(site, ranks_as):
    with fresh(2, site=site, ranks_as=ranks_as) as pool:
        for error, right in pool.run(wait_with_timeout):
            assert error.kinds, error
            assert "0.3" in error.text or "300" in error.text, error
            assert right


# --- ends that leave ------------------------------------------------------------------------------


def aborted(me: RankContext, partial: bool) -> Caught:
    if me.rank == 0:
        work = send(me, partial)
        time.sleep(0.5)
        backend_of().abort()
    else:
        work = receive(me, True) if partial else dist.irecv(torch.ones(LARGE), 0, tag=5)
    return caught(work.wait)


@pytest.mark.parametrize("partial", [False, True])
def test_abort_fails_both_ends(partial, ranks_as):
    with fresh(2, site="late", ranks_as=ranks_as) as pool:
        for error in pool.run(aborted, partial):
            assert "CollectiveError" in error.kinds, error
            assert "abort" in error.text
