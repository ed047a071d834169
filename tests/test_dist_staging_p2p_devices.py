"""Large messages of tensors on devices, without a device, when a call of one of them fails."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, Pool, begun, caught, fresh
from test_dist_staging_p2p_faults import NOTICED, receive_some, send_some
from test_dist_staging_p2p_large import LARGE, PIECE, values

pytestmark = pytest.mark.skipif(not OURS, reason="stages by itself")
COUNT = 3 * PIECE - 1


def failing(me: Me, end: int, after: int) -> tuple[Caught, bool]:
    """One of the calls for a message fails on one end."""
    x, y = torch.full((COUNT,), 7.0), torch.zeros(COUNT)
    if me.rank == end:
        me.fake.fail_call(after)
    error = caught(dist.send, x, 1) if me.rank == 0 else caught(dist.recv, y, 0)
    me.fake.fail_call(-1)
    return error, bool((y == 7.0).all())


CALLS = range(18)
# Pinned memory, a copy and an event for each piece, and at least two questions; or pinned memory,
# an event, a copy of any number of pieces, and what follows.
CERTAIN = {0: 1 + 2 * 3 + 2 * 3, 1: 1 + 1 + 1 + 1}


@pytest.fixture(scope="module")
def failures() -> Iterator[dict[tuple[int, int], Pool]]:
    """Some wait for the time limit, in which all must have met before."""
    jobs = {(end, after): (failing, end, after) for end in (0, 1) for after in CALLS}
    yield from begun(jobs, 2, staged="late", timeout=4.0)


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("after", CALLS)
def test_every_call_of_a_device(failures, end, after):
    """Who has the failing device hears of it; the other has an error in time, or its data."""
    errors, right = zip(*failures[end, after].results(), strict=True)
    if errors[end].kind:
        assert "made up" in errors[end].text, errors
    other = errors[1 - end]
    assert not other.kind or "CollectiveError" in other.kinds, errors
    assert errors[1].kind or right[1]
    assert after >= CERTAIN[end] or errors[end].kind, "nothing failed"


def failing_meanwhile(me: Me) -> tuple[Caught, float]:
    """The receiver has some of the message when the sender's device fails, and hears of it."""
    if me.rank == 0:
        work = send_some(me)
        time.sleep(0.5)
        me.fake.fail_call(0)
    else:
        work = receive_some(me)
    start = time.monotonic()
    return caught(work.wait), time.monotonic() - start


def test_a_sender_whose_device_fails_meanwhile():
    with fresh(2, staged="late") as pool:
        (sender, _), (receiver, took) = pool.run(failing_meanwhile)
        assert "made up" in sender.text, sender
        assert "CollectiveError" in receiver.kinds, receiver
        assert "the device of a rank failed in send" in receiver.text
        assert took < 0.5 + NOTICED


def failing_receiver(me: Me) -> tuple[Caught, bool]:
    """A receiver whose device fails fails alone: the next message is right."""
    y, word = torch.zeros(LARGE), torch.zeros(1)
    me.fake.put_on_host(word)
    if me.rank == 0:
        work = send_some(me)
        dist.recv(word, 1)
        me.fake.stall(False)
        error = caught(work.wait)
        dist.send(values(LARGE, 2), 1)
        return error, True
    work = receive_some(me)
    me.fake.fail_call(0)
    dist.send(word, 0)
    error = caught(work.wait)
    me.fake.fail_call(-1)
    dist.recv(y, 0)
    return error, torch.equal(y, values(LARGE, 2))


def test_a_receiver_whose_device_fails():
    with fresh(2, staged="late") as pool:
        (sender, _), (receiver, right) = pool.run(failing_receiver)
        assert not sender.kind, sender
        assert "made up" in receiver.text
        assert right


def broken_at_once(me: Me) -> tuple[Caught, float]:
    """The sender's device fails before anything has come from it."""
    x = torch.ones(LARGE)
    if me.rank == 0:
        me.fake.stall(True)
        work = dist.isend(x, 1)
        time.sleep(0.3)
        me.fake.fail_call(0)
    else:
        work = dist.irecv(x, 0)
    begin = time.monotonic()
    return caught(work.wait), time.monotonic() - begin


def test_a_receiver_hears_of_a_sender_whose_device_fails_at_once():
    with fresh(2, staged="late") as pool:
        (sender, _), (receiver, took) = pool.run(broken_at_once)
        assert "made up" in sender.text, sender
        assert "the device of a rank failed in send" in receiver.text, receiver
        assert took < 0.3 + NOTICED
