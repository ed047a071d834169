"""Failures of messages of CUDA tensors: an end that dies, is late or leaves, or a failing device.
The other end gets the data, or in time an error that names the rank.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Pool, RankContext, backend_of, caught, fresh, started_jobs
from dist_ranks import IN_PLACE, between_processes
from dist_sites import REAL, sites
from test_cuda_dist_faults import NOTICE_SECONDS, die
from test_cuda_dist_p2p import LARGE, values

pytestmark = [
    pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors"),
    between_processes(IN_PLACE),
]
SMALL = 1000  # elements of a message of which a sender keeps no buffer between the ranks


def send(me: RankContext, stalled: bool = False, count: int = LARGE) -> Any:
    """Start the send; with `stalled`, the stream does not reach it."""
    if stalled:
        me.site.synchronize()
        me.fake.stall(me.site.stream)
    return dist.isend(values(count, 1), 1)


# --- ends that die, or whose devices fail ---------------------------------------------------------


def lost_end(
    me: RankContext, faulty_rank: int, stalled: bool
) -> tuple[Caught, float, Caught, list[float]]:
    """The faulty rank dies before its peer arrives, or, with `stalled`, while the message is still
    on its device."""
    y = torch.full((LARGE,), 3.0)
    dist.barrier()
    if me.rank == faulty_rank:
        if me.rank == 0:
            assert not send(me, stalled).is_completed()
        die(0.2)
    if faulty_rank == 0 and not stalled:
        time.sleep(0.5)
    begin = time.monotonic()
    work = send(me) if me.rank == 0 else dist.irecv(y, 0)
    error = caught(work.wait)
    again = caught(dist.send, torch.ones(3), 1) if me.rank == 0 else error
    return error, error.when - begin, again, y.unique().tolist()


@pytest.mark.parametrize(("faulty_rank", "stalled"), [(0, False), (1, False), (0, True)])
@pytest.mark.parametrize("site", sites("late", *REAL, stands_in=False))
def test_the_other_end_raises_if_one_dies(site, faulty_rank, stalled, ranks_as):
    if site in REAL and stalled:
        pytest.skip("tests on emulated devices suffice")
    with fresh(2, site=site, ranks_as=ranks_as) as pool:
        outcomes = pool.outcomes(lost_end, faulty_rank, stalled)
        assert outcomes[faulty_rank].died
        assert not outcomes[1 - faulty_rank].error, outcomes[1 - faulty_rank].error
        error, took, again, left = outcomes[1 - faulty_rank].value
        assert (error.kind, again.kind) == ("PeerLost", "PeerLost"), (error, again)
        assert f"rank {faulty_rank}" in error.text
        assert took < 0.2 + NOTICE_SECONDS
        assert left == [3.0]


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
def test_a_device_failure_of_one_end_affects_no_peer(job, faulty_rank, ranks_as):
    with fresh(2, site="late", ranks_as=ranks_as) as pool:
        errors, right = zip(*pool.run(job), strict=True)
        assert "injected failure" in errors[faulty_rank].text
        assert not errors[1 - faulty_rank].kind, errors
        assert all(right)


def late_sender_fails(me: RankContext) -> Caught:
    """The sender's device fails when the receiver waits already."""
    if me.rank == 1:
        return caught(dist.recv, torch.zeros(SMALL), 0)
    me.site.stall()
    work = dist.isend(torch.ones(SMALL), 1)
    me.fake.cuda.inject("fail", after=0)
    return caught(work.wait)


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
    if how == "not received" and me.rank == 1:
        time.sleep(2.0)
        return caught(dist.recv, torch.ones(LARGE), 0)
    work = send(me, how != "not received") if me.rank == 0 else dist.irecv(torch.zeros(LARGE), 0)
    if how == "future alone":  # the timeout expires while no thread waits for the future
        future = work.get_future()
        time.sleep(1.5)
        return caught(future.wait)
    return caught(work.wait)


LATE = {"not received": "rank 1", "not sent": "rank 0", "future alone": "rank 0"}


@pytest.fixture(scope="module")
def late_ends(ranks_as: str) -> Iterator[dict[str, Pool]]:
    jobs = {how: (late, how) for how in LATE}
    yield from started_jobs(jobs, 2, site="late", timeout=1.0, ranks_as=ranks_as)


@pytest.mark.parametrize("how", LATE)
def test_a_late_end_times_out(late_ends, how):
    for error in late_ends[how].results():
        assert "Timeout" in error.kinds, error
        assert LATE[how] in error.text, error


def wait_with_timeout(me: RankContext) -> tuple[Caught, bool]:
    """An expired timeout of one wait() fails only that wait; the message may still complete."""
    y = torch.zeros(LARGE)
    work = send(me, True) if me.rank == 0 else dist.irecv(y, 0)
    error = caught(work.wait, datetime.timedelta(seconds=0.3))
    time.sleep(0.3)
    me.fake.resume()
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


def aborted(me: RankContext, stalled: bool) -> Caught:
    if me.rank == 0:
        work = send(me, stalled)
        time.sleep(0.5)
        backend_of().abort()
    else:
        work = dist.irecv(torch.ones(LARGE), 0, tag=0 if stalled else 5)
    return caught(work.wait)


@pytest.mark.parametrize("stalled", [False, True])
def test_abort_fails_both_ends(stalled, ranks_as):
    with fresh(2, site="late", ranks_as=ranks_as) as pool:
        for error in pool.run(aborted, stalled):
            assert "CollectiveError" in error.kinds, error
            assert "abort" in error.text


def destroyed(me: RankContext, how: str) -> tuple[float, Caught, bool]:
    """Destroy the group without waiting for the send: rank 0 gives its peer some time."""
    y, work = torch.zeros(LARGE), None
    if me.rank == 0:
        work = send(me, how == "stalled")
    elif how == "received":
        time.sleep(0.5)
        dist.recv(y, 0)
    elif how == "stalled":
        work = dist.irecv(y, 0)
    start = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - start
    return took, caught(work.wait) if work else caught(print), bool(y.any())


# Limits in seconds for destroying the group: up to one or two shutdown timeouts.
DESTROY_LIMITS = {"received": 3.0, "unmatched": 12.0, "stalled": 12.0}


@pytest.mark.parametrize(
    "how",
    ["received", *(pytest.param(how, marks=pytest.mark.slow) for how in list(DESTROY_LIMITS)[1:])],
)
def test_destroy_with_messages_in_flight(how, ranks_as):
    with fresh(2, site="late", ranks_as=ranks_as) as pool:
        (first, sender, _), (second, receiver, right) = pool.run(destroyed, how, seconds=60.0)
    assert max(first, second if how != "received" else 0) < DESTROY_LIMITS[how]
    assert right == (how == "received")
    if how == "stalled":
        assert "CollectiveError" in sender.kinds, sender
        assert "CollectiveError" in receiver.kinds, receiver
