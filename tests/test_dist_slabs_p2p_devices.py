"""Large messages of tensors on devices, without a device, when a call of one of them fails."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, Pool, begun, caught, fresh
from test_dist_slabs_p2p_faults import COUNT, NOTICED, acquaint

pytestmark = pytest.mark.skipif(not OURS, reason="has memory of its own for messages")


def failing(me: Me, end: int, after: int) -> tuple[Caught, list[bool]]:
    """One of the calls for a message fails on one end."""
    acquaint(me)
    x, y = torch.full((COUNT,), 7.0), torch.zeros(COUNT)
    if me.rank == end:
        me.fake.fail_call(after)
    error = caught(dist.send, x, 1) if me.rank == 0 else caught(dist.recv, y, 0)
    me.fake.fail_call(-1)
    return error, [bool((y == 7.0).all())]


CALLS = range(6)


@pytest.fixture(scope="module")
def failures() -> Iterator[dict[tuple[int, int], Pool]]:
    """Most wait for the time limit, in which all must have met before."""
    jobs = {(end, after): (failing, end, after) for end in (0, 1) for after in CALLS}
    yield from begun(jobs, 2, staged="late:stream", timeout=2.0)


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("after", CALLS)
def test_every_call_of_a_device(failures, end, after):
    """Who has the failing device hears of it; the other has an error in time, or its data."""
    errors, right = zip(*failures[end, after].results(), strict=True)
    if errors[end].kind:
        assert "made up" in errors[end].text, errors
    other = errors[1 - end]
    assert not other.kind or "CollectiveError" in other.kinds, errors
    assert errors[1].kind or right[1] == [True]
    assert after > 3 or errors[end].kind, "nothing failed"


def failing_to_stage(me: Me) -> tuple[Caught, float]:
    """The receiver asks for the bytes, and the sender's device does not give them."""
    x = torch.ones(COUNT)
    if me.rank == 0:
        work = dist.isend(x, 1)
        time.sleep(0.3)  # until it has been posted
        me.fake.fail_call(0)
        return caught(work.wait), 0.0
    me.fake.gpu.fail("open")
    time.sleep(0.6)
    start = time.monotonic()
    return caught(dist.recv, x, 0), time.monotonic() - start


def test_a_sender_that_cannot_give_the_bytes():
    with fresh(2, staged="late:stream") as pool:
        (sender, _), (receiver, took) = pool.run(failing_to_stage)
        assert "made up" in sender.text, sender
        assert "CollectiveError" in receiver.kinds, receiver
        assert took < NOTICED
