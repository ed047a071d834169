"""Large messages of tensors on devices, without a device, when something goes wrong: an end that
dies, is late or leaves, and a device that fails. An error in time that names the rank, or the data.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import dist_fake
import pytest
import torch
import torch.distributed as dist
from dist_fake import alive
from dist_pool import OURS, Caught, Me, Pool, backend_of, begun, caught, fresh
from test_dist_staging_p2p_large import LARGE, comes, values

pytestmark = pytest.mark.skipif(not OURS, reason="stages by itself")
NOTICED = 2.0  # seconds after a death in which its peer has raised
SOME = 2  # pieces, before a device stops


def killed(after: float) -> None:
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def send_some(me: Me) -> Any:
    """A message of which only the first pieces leave the device."""
    me.fake.finish_caller()
    me.fake.stall(True, after=SOME)
    return dist.isend(values(LARGE, 1), 1)


def receive_some(me: Me) -> Any:
    """Returns when those are there."""
    before = me.fake.calls().count("copy_ group")
    work = dist.irecv(torch.zeros(LARGE), 0)
    assert comes(me, before)
    return work


# --- ends that die --------------------------------------------------------------------------------


def sender_dies_first(me: Me) -> tuple[Caught, float, list[float]]:
    """It has sent, and is gone when the receiver comes."""
    if me.rank == 0:
        work = dist.isend(values(LARGE, 1), 1)
        assert not work.is_completed()
        killed(0.2)
    time.sleep(0.5)
    y = torch.full((LARGE,), 3.0)
    start = time.monotonic()
    error = caught(dist.recv, y, 0)
    return error, time.monotonic() - start, y.unique().tolist()


def sender_dies_meanwhile(me: Me) -> tuple[Caught, float, list[float]]:
    """The receiver has some of the message already."""
    if me.rank == 0:
        send_some(me)
        killed(0.5)
    work = receive_some(me)
    start = time.monotonic()
    return caught(work.wait), time.monotonic() - start - 0.5, [3.0]


@pytest.mark.parametrize("job", [sender_dies_first, sender_dies_meanwhile])
def test_the_sender_dies(job):
    with fresh(2, staged="late") as pool:
        sender, receiver = pool.outcomes(job)
        assert sender.died
        assert not receiver.error, receiver.error
        error, took, left = receiver.value
        assert error.kind == "PeerLost", error
        assert "rank 0" in error.text
        assert took < NOTICED
        assert left == [3.0]


def receiver_dies_first(me: Me) -> tuple[Caught, float, Caught]:
    if me.rank == 1:
        killed(0.4)
    start = time.monotonic()
    error = caught(dist.send, values(LARGE, 1), 1)
    return error, error.when - start, caught(dist.send, torch.ones(LARGE), 1)


def receiver_dies_meanwhile(me: Me) -> tuple[Caught, float, Caught]:
    """What the sender's device still has to copy hides nothing."""
    if me.rank == 1:
        receive_some(me)
        killed(0.4)
    work = send_some(me)
    start = time.monotonic()
    error = caught(work.wait)
    return error, error.when - start, caught(dist.send, torch.ones(LARGE), 1)


@pytest.mark.parametrize("job", [receiver_dies_first, receiver_dies_meanwhile])
def test_the_receiver_dies(job):
    with fresh(2, staged="late") as pool:
        sender, receiver = pool.outcomes(job)
        assert receiver.died
        assert not sender.error, sender.error
        error, took, again = sender.value
        assert (error.kind, again.kind) == ("PeerLost", "PeerLost"), (error, again)
        assert "rank 1" in error.text
        assert took < 0.4 + NOTICED


# --- ends that are late ---------------------------------------------------------------------------


def never_received(me: Me) -> Caught:
    if me.rank == 1:
        time.sleep(2.0)
        return caught(dist.recv, torch.ones(LARGE), 0)
    return caught(dist.send, torch.ones(LARGE), 1)


def never_sent(me: Me) -> Caught:
    """The sender's stream does not come to it."""
    if me.rank == 0:
        me.fake.stall(True)
        return caught(dist.send, torch.ones(LARGE), 1)
    return caught(dist.recv, torch.ones(LARGE), 0)


def never_sent_whole(me: Me) -> Caught:
    """Nor to the end of it."""
    return caught((send_some(me) if me.rank == 0 else receive_some(me)).wait)


def never_looked_at(me: Me) -> Caught:
    """The same of messages that have a future, which nobody waits for."""
    work = send_some(me) if me.rank == 0 else receive_some(me)
    future = work.get_future()
    time.sleep(1.5)
    return caught(future.wait)


LATE = {
    never_received: "rank 1",
    never_sent: "rank 0",
    never_sent_whole: "rank 0 did",
    never_looked_at: "rank 0 did",
}


@pytest.fixture(scope="module")
def late_ends() -> Iterator[dict[str, Pool]]:
    yield from begun({job: (job,) for job in LATE}, 2, staged="late", timeout=1.0)


@pytest.mark.parametrize("job", LATE)
def test_an_end_that_is_late(late_ends, job):
    for error in late_ends[job].results():
        assert "Timeout" in error.kinds, error
        assert LATE[job] in error.text, error


def limited(me: Me) -> tuple[Caught, bool]:
    """The limit of one wait fails that wait alone, and the message may still come."""
    import datetime

    x, y = values(LARGE, 1), torch.zeros(LARGE)
    me.fake.finish_caller()
    if me.rank == 0:
        me.fake.stall(True, after=SOME)
    work = dist.isend(x, 1) if me.rank == 0 else dist.irecv(y, 0)
    error = caught(work.wait, datetime.timedelta(seconds=0.3))
    time.sleep(0.3)
    me.fake.stall(False)
    work.wait()
    return error, me.rank == 0 or torch.equal(x, y)


@pytest.mark.parametrize("staged", ["late", "eager"])
def test_the_limit_of_one_wait(staged):
    with fresh(2, staged=staged) as pool:
        for error, right in pool.run(limited):
            assert error.kinds, error
            assert "0.3" in error.text or "300" in error.text, error
            assert right


# --- lives ----------------------------------------------------------------------------------------


def aborted(me: Me, some: bool) -> Caught:
    if me.rank == 0:
        work = send_some(me) if some else dist.isend(torch.ones(LARGE), 1)
        time.sleep(0.5)
        backend_of().abort()
    else:
        work = receive_some(me) if some else dist.irecv(torch.ones(LARGE), 0, tag=5)
    return caught(work.wait)


@pytest.mark.parametrize("some", [False, True])
def test_aborted(some):
    with fresh(2, staged="late") as pool:
        for error in pool.run(aborted, some):
            assert "CollectiveError" in error.kinds, error
            assert "abort" in error.text


def destroyed(me: Me, received: bool) -> tuple[bool, float]:
    """Nobody waits for the send; who destroys the group first gives the other some time."""
    y = torch.zeros(LARGE)
    if me.rank == 0:
        dist.isend(torch.ones(LARGE), 1)
    elif received:
        time.sleep(0.5)
        dist.recv(y, 0)
    start = time.monotonic()
    dist.destroy_process_group()
    return bool(y.all()), time.monotonic() - start


def test_destroyed_while_the_receiver_comes():
    with fresh(2, staged="late") as pool:
        (_, first), (right, _) = pool.run(destroyed, True)
        assert right
        assert first < 3.0


def destroyed_meanwhile(me: Me) -> tuple[Caught, float]:
    """The sender's device never comes to the end of the message."""
    work = send_some(me) if me.rank == 0 else receive_some(me)
    start = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - start
    return caught(work.wait), took


@pytest.fixture(scope="module")
def graceful() -> Iterator[dict[str, Pool]]:
    """Slow, for the time of grace."""
    jobs = {"lonely": (destroyed, False), "meanwhile": (destroyed_meanwhile,)}
    yield from begun(jobs, 2, staged="late")


@pytest.mark.slow
def test_destroyed_while_nobody_receives(graceful):
    assert max(took for _, took in graceful["lonely"].results()) < 12.0


@pytest.mark.slow
def test_destroyed_while_a_device_copies(graceful):
    found = graceful["meanwhile"].results()
    assert max(took for _, took in found) < 24.0  # the time of grace, once or twice
    assert all("CollectiveError" in error.kinds for error, _ in found), found


def cycles(me: Me, count: int) -> list[dict[str, int]]:
    left = []
    for i in range(count):
        made, fake = dist_fake.options("eager:best")
        me.init(f"cycle_{i}", pg_options=made)
        x, y = torch.full((LARGE,), float(me.rank)), torch.zeros(LARGE)
        works = [dist.isend(x, 1 - me.rank), dist.irecv(y, 1 - me.rank)]
        if i % 3:
            for work in works:
                work.wait()
        if i % 4 == 0:
            dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        works.clear()  # and with them the events of their results
        work = None
        left += [alive(fake)] if alive(fake) or fake.gpu.fouls() else []
        assert bool((y == 1 - me.rank).all())
    return left


def test_groups_come_and_go():
    count = int(os.environ.get("PYCOLLECT_TEST_CYCLES", "30"))
    with fresh(2, group=False) as pool:
        assert pool.run(cycles, count, seconds=60.0) == [[], []]
