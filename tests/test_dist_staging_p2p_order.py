"""Large messages of tensors on devices, without a device: whose work comes before whose, that the
copies of both devices overlap, and that no message is held up by what another one waits for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, Pools, caught, pools_of_a_module
from test_dist_staging_p2p_large import LARGE, WAYS, comes, values

pytestmark = pytest.mark.skipif(not OURS, reason="stages by itself")


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    yield from pools_of_a_module()


def on_host(me: Me, value: float) -> torch.Tensor:
    """A word for messages that no device holds up."""
    word = torch.full((1,), value)
    me.fake.put_on_host(word)
    return word


def behind_the_stream(me: Me) -> list[bool]:
    """What is sent is what the sender's stream has made of it by then, and it is the sender's again
    as soon as that is said; what is received comes behind what the stream still does there."""
    x, y = torch.zeros(LARGE), torch.full((LARGE,), -1.0)
    me.fake.stall(True)
    if me.rank == 0:
        me.fake.fill_later(x, 5.0)
        work = dist.isend(x, 1)
        me.fake.fill_later(x, 6.0)
        time.sleep(0.1)
        early = work.is_completed()
        me.fake.stall(False)
        work.wait()
        me.fake.finish_caller()
        return [not early, bool((x == 6.0).all())]
    me.fake.fill_later(y, -2.0)
    work = dist.irecv(y, 0)
    time.sleep(0.2)
    me.fake.stall(False)
    work.wait()
    return [bool((y == 5.0).all())]


def behind_the_current_stream(me: Me) -> list[bool]:
    """Whichever that is, in the thread that calls."""
    x, y = torch.zeros(LARGE), torch.full((LARGE,), -1.0)
    me.fake.stall(True)  # the other one
    me.fake.use_second_stream(True)
    if me.rank == 0:
        me.fake.fill_later(x, 5.0)
        dist.send(x, 1)
    else:
        me.fake.fill_later(y, -2.0)
        dist.recv(y, 0)
    me.fake.use_second_stream(False)
    me.fake.stall(False)
    return [me.rank == 0 or bool((y == 5.0).all())]


@pytest.mark.parametrize("staged", WAYS)
def test_behind_the_stream(pools, staged):
    pool = pools(2, staged=staged, beside=None)
    assert pool.run(behind_the_stream) == [[True] * 2, [True]]
    assert pool.run(behind_the_current_stream) == [[True], [True]]


def overlapped(me: Me) -> tuple[bool, bool]:
    """The first pieces are on the receiver's device before the last have left the sender's."""
    x, y = values(LARGE, 1), torch.zeros(LARGE)
    word, came = on_host(me, 0.0), True
    if me.rank == 0:
        me.fake.finish_caller()
        me.fake.stall(True, after=2)
        work = dist.isend(x, 1)
        dist.recv(word, 1, tag=1)  # they are there
        came = not work.is_completed()
        me.fake.stall(False)
    else:
        before = me.fake.calls().count("copy_ group")
        work = dist.irecv(y, 0)
        came = comes(me, before) and not work.is_completed()
        dist.send(word, 0, tag=1)
    work.wait()
    return came, me.rank == 0 or torch.equal(y, x)


@pytest.mark.parametrize("staged", WAYS)
def test_copies_overlap(pools, staged):
    assert pools(2, staged=staged, beside=None).run(overlapped) == [(True, True)] * 2


def sends_past(me: Me, host: torch.Tensor, word: torch.Tensor) -> list[bool]:
    me.fake.finish_caller()
    me.fake.stall(True, after=2)
    x = values(LARGE, 3)
    works = [dist.isend(x, 1, tag=5), dist.isend(x, 2, tag=5)]
    dist.recv(word, 1, tag=1)
    works += [dist.isend(host, r, tag=6) for r in (1, 2) for _ in range(4)]
    dist.recv(word, 2, tag=2)
    good = [not works[0].is_completed()]
    me.fake.stall(False)
    dist.send(word, 2, tag=3)
    for work in works:
        work.wait()
    return good


def past_a_stream_that_stops(me: Me) -> list[bool]:
    """A message whose device has stopped in the middle holds up nobody else's, nor others of its
    sender's that are from elsewhere; nor does one that nobody receives."""
    x, y, z = values(LARGE, 3), torch.zeros(LARGE), torch.zeros(LARGE)
    host, word, good = values(LARGE, 4), on_host(me, 0.0), []
    me.fake.put_on_host(host)
    me.fake.put_on_host(z)
    if me.rank == 0:
        return sends_past(me, host, word)
    if me.rank == 1:
        before = me.fake.calls().count("copy_ group")
        work = dist.irecv(y, 0, tag=5)
        good.append(comes(me, before))
        dist.send(word, 0, tag=1)
        for _ in range(4):
            z.zero_()
            dist.recv(z, 0, tag=6)
            good.append(torch.equal(z, host))
        dist.send(x, 2)
        work.wait()
    else:
        dist.recv(y, 1)
        good.append(torch.equal(y, x))
        dist.send(word, 0, tag=2)
        dist.recv(word, 0, tag=3)
        for _ in range(4):
            dist.recv(z, 0, tag=6)
        dist.recv(y, 0, tag=5)
    return [*good, torch.equal(y, x)]


@pytest.mark.parametrize("staged", WAYS)
def test_past_a_stream_that_stops(pools, staged):
    found = pools(3, staged=staged, beside=None).run(past_a_stream_that_stops)
    assert found == [[True], [True] * 6, [True] * 2]


def late_receiver(me: Me) -> bool:
    """A receiver whose stream is late holds up nobody: neither its host nor the sender."""
    x, y = values(LARGE, 3), torch.zeros(LARGE)
    if me.rank == 0:
        dist.send(x, 1)
        return True
    me.fake.look(False)
    me.fake.stall(True)
    me.fake.fill_later(y, -2.0)
    work = dist.irecv(y, 0)
    work.wait()
    early = work.is_completed() or torch.equal(y, x)
    me.fake.stall(False)
    while not work.is_completed():
        time.sleep(0.001)
    me.fake.look(True)
    return not early and torch.equal(y, x)


@pytest.mark.parametrize("staged", ["late", "late:best"])
def test_a_receiver_whose_stream_is_late(pools, staged):
    assert pools(2, staged=staged, beside=None).run(late_receiver) == [True, True]


def beside_a_collective(me: Me) -> bool:
    """The group's streams wait for the last rank's, whose caller has something else to do."""
    x, y = values(LARGE, 3), torch.zeros(LARGE)
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    dist.barrier()
    me.fake.look(False)
    total = torch.ones(1000)
    if me.rank == 2:
        me.fake.stall(True)
        me.fake.fill_later(total, 1.0)
    work = dist.all_reduce(total, async_op=True)
    time.sleep(0.2)  # until the streams have it
    message = None
    if me.rank == 0:
        message = dist.isend(x, 1)
    elif me.rank == 1:
        message = dist.irecv(y, 0)
    if message:
        message.wait()
        while not message.is_completed():
            time.sleep(0.001)
    early = work.is_completed()
    if me.rank == 2:
        time.sleep(1.0)
        me.fake.stall(False)
    while not work.is_completed():
        time.sleep(0.001)
    me.fake.look(True)
    return not early and (me.rank != 1 or torch.equal(y, x))


@pytest.mark.parametrize("staged", ["late:stream", "eager:stream"])
def test_a_message_waits_for_no_collective(pools, staged):
    assert all(pools(3, staged=staged, beside=None).run(beside_a_collective))


def captured(me: Me) -> tuple[list[Caught], bool]:
    x, y = values(LARGE, 1), torch.zeros(LARGE)
    me.fake.capture(True)
    before = me.fake.pinned()
    errors = [caught(dist.isend, x, 1 - me.rank), caught(dist.irecv, y, 1 - me.rank)]
    taken = me.fake.pinned() - before
    me.fake.capture(False)
    works = [dist.isend(x, 1 - me.rank), dist.irecv(y, 1 - me.rank)]
    me.fake.capture(True)
    errors += [caught(work.wait) for work in works]
    me.fake.capture(False)
    for work in works:
        work.wait()
    return errors, taken == 0 and torch.equal(x, y)


@pytest.mark.parametrize("staged", WAYS)
def test_no_message_in_a_capture(pools, staged):
    for errors, right in pools(2, staged=staged, beside=None).run(captured):
        assert [e.kind for e in errors] == ["ValueError"] * 4, errors
        assert all("capture" in e.text for e in errors), errors
        assert right
