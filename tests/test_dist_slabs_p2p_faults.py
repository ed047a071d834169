"""Large messages of tensors on devices, without a device, when something goes wrong: an end that
dies, is late or leaves, and a device that fails. An error in time that names the rank, or the data.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import dist_fake
import pytest
import torch
import torch.distributed as dist
from dist_fake import alive
from dist_pool import OURS, Caught, Me, Pool, backend_of, begun, caught, fresh

pytestmark = pytest.mark.skipif(not OURS, reason="has memory of its own for messages")
COUNT = 100_000  # large
NOTICED = 2.0  # seconds after a death in which its peer has raised


def killed(after: float) -> None:
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def acquaint(me: Me) -> None:
    """Messages both ways, so that all memory that is to be opened has been."""
    x = torch.ones(COUNT)
    for rank in (0, 1):
        if me.rank == rank:
            dist.send(x, 1 - me.rank)
        else:
            dist.recv(x, 1 - me.rank)


def sender_dies_first(me: Me, known: bool) -> tuple[Caught, float, list[float]]:
    """It has sent, and is gone when the receiver comes: its memory may be gone as well."""
    if known:
        acquaint(me)
    if me.rank == 0:
        work = dist.isend(torch.ones(COUNT), 1)
        assert not work.is_completed()
        killed(0.2)
    time.sleep(0.5)
    y = torch.full((COUNT,), 3.0)
    start = time.monotonic()
    error = caught(dist.recv, y, 0)
    return error, time.monotonic() - start, y.unique().tolist()


def sender_dies_meanwhile(me: Me, _: bool) -> tuple[Caught, float, list[float]]:
    """The receiver's device has begun, or is about to, and does not come to an end before."""
    acquaint(me)
    y = torch.full((COUNT,), 3.0)
    if me.rank == 0:
        dist.isend(torch.ones(COUNT), 1)
        killed(0.5)
    me.fake.look(False)
    me.fake.stall(True)
    me.fake.fill_later(y, 3.0)
    work = dist.irecv(y, 0)
    time.sleep(0.8)
    me.fake.stall(False)
    start = time.monotonic()
    return caught(work.wait), time.monotonic() - start, [3.0]


@pytest.mark.parametrize("job", [sender_dies_first, sender_dies_meanwhile])
@pytest.mark.parametrize("known", [True, False])
def test_the_sender_dies(job, known):
    with fresh(2, staged="late:stream") as pool:
        sender, receiver = pool.outcomes(job, known)
        assert sender.died
        assert not receiver.error, receiver.error
        error, took, values = receiver.value
        assert error.kind == "PeerLost", error
        assert "rank 0" in error.text
        assert took < NOTICED
        assert values == [3.0]


def receiver_dies(me: Me, known: bool) -> tuple[Caught, float, Caught]:
    """It has not said that it has fetched the message, and who knows whether it has."""
    if known:
        acquaint(me)
    if me.rank == 1:
        me.fake.stall(True)
        y = torch.zeros(COUNT)
        me.fake.fill_later(y, 3.0)
        dist.irecv(y, 0)
        killed(0.4)
    start = time.monotonic()
    error = caught(dist.send, torch.ones(COUNT), 1)
    again = caught(dist.send, torch.ones(COUNT), 1)
    return error, error.when - start, again


@pytest.mark.parametrize("known", [True, False])
def test_the_receiver_dies(known):
    with fresh(2, staged="late:stream") as pool:
        sender, receiver = pool.outcomes(receiver_dies, known)
        assert receiver.died
        assert not sender.error, sender.error
        error, took, again = sender.value
        assert (error.kind, again.kind) == ("PeerLost", "PeerLost"), (error, again)
        assert "rank 1" in error.text
        assert took < 0.4 + NOTICED


def never_received(me: Me) -> Caught:
    if me.rank == 1:
        time.sleep(2.0)
        return caught(dist.recv, torch.ones(COUNT), 0)
    return caught(dist.send, torch.ones(COUNT), 1)


def never_sent(me: Me) -> Caught:
    """The sender's stream does not come to it."""
    if me.rank == 0:
        me.fake.stall(True)
        return caught(dist.send, torch.ones(COUNT), 1)
    return caught(dist.recv, torch.ones(COUNT), 0)


def never_fetched(me: Me) -> Caught:
    """The receiver's stream does not."""
    if me.rank == 0:
        return caught(dist.send, torch.ones(COUNT), 1)
    me.fake.stall(True)
    y = torch.zeros(COUNT)
    me.fake.fill_later(y, 3.0)
    return caught(dist.recv, y, 0)


LATE = {"never_received": 1, "never_sent": 0, "never_fetched": 1}  # and whose end is missing


@pytest.fixture(scope="module")
def late_ends() -> Iterator[dict[str, Pool]]:
    jobs = {job.__name__: (job,) for job in (never_received, never_sent, never_fetched)}
    yield from begun(jobs, 2, staged="late:stream", timeout=1.0)


@pytest.mark.parametrize("job", LATE)
def test_an_end_that_is_late(late_ends, job):
    for error in late_ends[job].results():
        assert "Timeout" in error.kinds, error
        assert f"rank {LATE[job]}" in error.text, error


def aborted(me: Me) -> Caught:
    x = torch.ones(COUNT)
    if me.rank == 0:
        work = dist.isend(x, 1)
        time.sleep(0.2)
        backend_of().abort()
    else:
        work = dist.irecv(x, 0, tag=5)
    return caught(work.wait)


def test_aborted():
    with fresh(2, staged="late:stream") as pool:
        for error in pool.run(aborted):
            assert "CollectiveError" in error.kinds, error
            assert "abort" in error.text


def destroyed(me: Me, received: bool) -> tuple[bool, float]:
    """Nobody waits for the send; who destroys the group first gives the other some time."""
    y = torch.zeros(COUNT)
    if me.rank == 0:
        dist.isend(torch.ones(COUNT), 1)
    elif received:
        time.sleep(0.5)
        dist.recv(y, 0)
    start = time.monotonic()
    dist.destroy_process_group()
    return bool(y.all()), time.monotonic() - start


def test_destroyed_while_the_receiver_comes():
    with fresh(2, staged="late:stream") as pool:
        (_, first), (right, _) = pool.run(destroyed, True)
        assert right
        assert first < 3.0


def destroyed_while_fetching(me: Me, ends: bool) -> tuple[Caught, dict[str, int], list[str]]:
    """A device that is yet to copy, or never will: until then nobody lets go of the memory."""
    made, fake = dist_fake.options("late:stream")
    me.init("fetching", pg_options=made)
    x = torch.zeros(COUNT)
    if me.rank == 0:
        error = caught(dist.send, x, 1)
    else:
        fake.stall(True)
        fake.fill_later(x, 3.0)
        error = caught(dist.recv, x, 0)
    if ends:
        threading.Timer(0.5, fake.stall, (False,)).start()
    dist.destroy_process_group()
    left = alive(fake)
    fake.stall(False)
    time.sleep(0.2)
    return error, left, fake.gpu.fouls()


@pytest.fixture(scope="module")
def graceful() -> Iterator[dict[Any, Pool]]:
    """Slow, for the time of grace."""
    for lonely in begun({"lonely": (destroyed, False)}, 2, staged="late:stream"):
        jobs = {ends: (destroyed_while_fetching, ends) for ends in (True, False)}
        for pools in begun(jobs, 2, group=False, timeout=1.0):
            yield lonely | pools


@pytest.mark.slow
def test_destroyed_while_nobody_receives(graceful):
    assert max(took for _, took in graceful["lonely"].results()) < 12.0


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_destroyed_while_a_device_fetches(graceful, ends):
    (first, sender, _), (second, receiver, _) = found = graceful[ends].results()
    assert "Timeout" in first.kinds, first
    assert "Timeout" in second.kinds, second
    assert sender == ({} if ends else {"allocated": 1})
    assert receiver == ({} if ends else {"opened": 1})
    assert [fouls for _, _, fouls in found] == [[], []]


# --- lives ----------------------------------------------------------------------------------------


def cycles(me: Me, count: int) -> list[dict[str, int]]:
    left = []
    for i in range(count):
        made, fake = dist_fake.options("eager:best")
        me.init(f"cycle_{i}", pg_options=made)
        x, y = torch.full((COUNT,), float(me.rank)), torch.zeros(COUNT)
        works = [dist.isend(x, 1 - me.rank), dist.irecv(y, 1 - me.rank)]
        if i % 3:
            for work in works:
                work.wait()
        if i % 4 == 0:
            dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        left += [alive(fake)] if alive(fake) or fake.gpu.fouls() else []
        assert bool((y == 1 - me.rank).all())
    return left


def test_groups_come_and_go():
    count = int(os.environ.get("PYCOLLECT_TEST_CYCLES", "30"))
    with fresh(2, group=False) as pool:
        assert pool.run(cycles, count, seconds=60.0) == [[], []]
