"""send and recv of large tensors on devices, without a device: they go through pinned memory in
pieces, which come from one device while others are on their way to the other.

Smaller ones are test_dist_staging_p2p.py's; faults test_dist_staging_p2p_faults.py's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, Pools, caught, pools_of_a_module
from test_dist_staging_p2p import batched, in_order, nobody_waits

pytestmark = pytest.mark.skipif(not OURS, reason="stages by itself")
WAYS = ("late", "eager", "late:best")
PIECE = (1 << 20) // 4  # elements of float32: smaller messages are one piece
MOST_PIECES = 64
LARGE = 3 * PIECE + 3
SECONDS = 10.0  # in which a message comes that nothing holds up


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    yield from pools_of_a_module()


def values(count: int, seed: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 1009 + seed


def on_host(me: Me, value: float) -> torch.Tensor:
    """A word for messages that no device holds up."""
    word = torch.full((1,), value)
    me.fake.put_on_host(word)
    return word


def pieces(me: Me) -> int:
    """Copies off the device until now."""
    return me.fake.trace().count("copy_out")


def comes(me: Me, before: int) -> bool:
    """Has more been copied to the device since than `before`? Waits for it, but not for ever."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if me.fake.trace().count("copy_back") > before:
            return True
        time.sleep(0.001)
    return False


def around(me: Me) -> list[str]:
    """To the right neighbour, from the left one or from anybody, strided and not."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    wrong = []
    for count in (PIECE - 1, PIECE, PIECE + 1, 2 * PIECE - 1, 2 * PIECE, 2 * PIECE + 1, LARGE):
        for stride in (1, 2):
            x = values(count * stride, me.rank)[::stride]
            y = torch.full((count * stride,), -1.0)[::stride]
            me.fake.fill_later(y, -2.0)
            before = me.fake.pinned(), pieces(me)
            sent = dist.isend(x, right)
            source = dist.recv(y, None if count == 2 * PIECE else left)
            sent.wait()
            took = me.fake.pinned() - before[0], pieces(me) - before[1]
            if source != left or not torch.equal(y, values(count * stride, left)[::stride]):
                wrong.append(f"{count} elements, stride {stride}, from {source}: {y[:3]}")
            whole = stride == 2 and count > PIECE  # to where it is contiguous
            if took != (2, -(-count // PIECE) + whole):
                wrong.append(f"{count} elements, stride {stride}: {took}")
    return wrong


@pytest.mark.parametrize("staged", WAYS)
def test_around_a_ring(pools, staged):
    assert pools(3, staged=staged, beside=None).run(around) == [[]] * 3


@pytest.mark.parametrize("staged", ["late:best", "eager:stream"])
def test_small_ones_as_on_other_rungs(pools, staged):
    found = pools(3, staged=staged, beside=None).run(in_order)
    assert found == [[], [1.0, 2.0, 3.0] * 5, [3.0] * 5]
    pool = pools(2, staged=staged, beside=None)
    assert pool.run(nobody_waits) == [2.0, 1.0]
    assert pool.run(batched) == [[1.0, 1.0], [0.0, 0.0]]


def huge(me: Me, count: int) -> tuple[bool, int]:
    x = values(count, 7)
    if me.rank == 0:
        dist.send(x, 1)
        return True, pieces(me)
    y = torch.zeros(count)
    dist.recv(y, 0)
    return torch.equal(x, y), 0


def test_so_many_pieces_at_the_most(pools):
    pool = pools(2, staged="late", beside=None)
    before = pool.run(pieces)[0]
    for count in (MOST_PIECES * PIECE, MOST_PIECES * PIECE + 1):
        (_, now), (right, _) = pool.run(huge, count)
        assert right
        assert now - before == MOST_PIECES
        before = now


DTYPES = (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


def of_dtypes(me: Me) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        x = values(LARGE, me.rank).to(dtype).reshape(3, -1)[:, 5:]  # begins within its storage
        y = torch.zeros(3, LARGE // 3, dtype=dtype)[1:].expand(2, -1)
        works = [dist.isend(x[1:], 1 - me.rank), dist.irecv(y[:, 5:], 1 - me.rank)]
        for work in works:
            work.wait()
        theirs = values(LARGE, 1 - me.rank).to(dtype).reshape(3, -1)[1:]
        if not torch.equal(y[:, 5:], theirs[:, 5:]) or y[:, :5].any():
            wrong.append(str(dtype))
    return wrong


@pytest.mark.parametrize("staged", WAYS)
def test_dtypes_and_parts_of_tensors(pools, staged):
    assert pools(2, staged=staged, beside=None).run(of_dtypes) == [[], []]


def by_tag(me: Me) -> list[str]:
    """Ten at a time, large and small, received in another order, some before they are sent."""
    counts = [PIECE + 7 * tag if tag % 3 else 11 for tag in range(10)]
    wrong = []
    for early in (True, False):
        ys = [torch.zeros(n) for n in counts]
        works = []
        if me.rank == 0:
            time.sleep(0.05 * early)
            works = [dist.isend(values(n, tag), 1, tag=tag) for tag, n in enumerate(counts)]
        else:
            time.sleep(0.05 * (not early))
            tags = sorted(range(10), key=lambda tag: (tag * 7 + 3) % 10)
            works = [dist.irecv(ys[tag], None if tag % 2 else 0, tag=tag) for tag in tags]
        for work in works:
            work.wait()
        if me.rank == 1:
            wrong += [
                f"tag {tag}"
                for tag, n in enumerate(counts)
                if not torch.equal(ys[tag], values(n, tag))
            ]
    return wrong


@pytest.mark.parametrize("staged", WAYS)
def test_tags_in_any_order(pools, staged):
    assert pools(2, staged=staged, beside=None).run(by_tag) == [[], []]


def ring_of_batches(me: Me) -> list[bool]:
    """More at a time than a receiver has buffers for, to the neighbour and to oneself."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    good = []
    for count in (PIECE + 1, LARGE):
        xs = [values(count, 10 * me.rank + i) for i in range(6)]
        ys = [torch.zeros(count) for _ in xs]
        own, mine = values(count, 99), torch.zeros(count)
        ops = [dist.P2POp(dist.irecv, y, left) for y in ys]
        ops += [dist.P2POp(dist.irecv, mine, me.rank), dist.P2POp(dist.isend, own, me.rank)]
        ops += [dist.P2POp(dist.isend, x, right) for x in xs]
        for work in reversed(dist.batch_isend_irecv(ops)):
            work.wait()
        good += [torch.equal(y, values(count, 10 * left + i)) for i, y in enumerate(ys)]
        good += [torch.equal(own, mine)]
    return good


@pytest.mark.parametrize("staged", WAYS)
def test_batches_around_a_ring(pools, staged):
    assert pools(3, staged=staged, beside=None).run(ring_of_batches) == [[True] * 14] * 3


def nobody_looks(me: Me) -> tuple[bool, bool]:
    """The group's thread moves large messages while nobody waits for them."""
    x, y = values(LARGE, me.rank), torch.zeros(LARGE)
    before = me.fake.trace().count("copy_back")
    if me.rank == 0:
        work = dist.irecv(y, 1)
        came = comes(me, before)
    else:
        time.sleep(0.1)
        work = dist.isend(x, 0)
        time.sleep(0.2)
        came = True
    work.wait()
    return me.rank == 1 or torch.equal(y, values(LARGE, 1)), came


@pytest.mark.parametrize("staged", WAYS)
def test_messages_that_nobody_waits_for(pools, staged):
    assert pools(2, staged=staged, beside=None).run(nobody_looks) == [(True, True)] * 2


def futures(me: Me) -> float:
    x, y = torch.full((LARGE,), float(me.rank)), torch.zeros(LARGE)
    works = [dist.irecv(y, 1 - me.rank), dist.isend(x, 1 - me.rank)]
    future = works[0].get_future()
    future.wait()
    works[1].wait()
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    return future.value()[0].sum().item() / LARGE


@pytest.mark.parametrize("staged", WAYS)
def test_futures(pools, staged):
    assert pools(2, staged=staged, beside=None).run(futures) == [1.0, 0.0]


# --- order ----------------------------------------------------------------------------------------


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
        before = me.fake.trace().count("copy_back")
        work = dist.irecv(y, 0)
        came = comes(me, before) and not work.is_completed()
        dist.send(word, 0, tag=1)
    work.wait()
    return came, me.rank == 0 or torch.equal(y, x)


@pytest.mark.parametrize("staged", WAYS)
def test_copies_overlap(pools, staged):
    assert pools(2, staged=staged, beside=None).run(overlapped) == [(True, True)] * 2


def past_a_stream_that_stops(me: Me) -> list[bool]:
    """A message whose device has stopped in the middle holds up nobody else's, nor others of its
    sender's that are from elsewhere; nor does one that nobody receives."""
    good = []
    x, y, z = values(LARGE, 3), torch.zeros(LARGE), torch.zeros(LARGE)
    host = values(LARGE, 4)
    me.fake.put_on_host(host)
    me.fake.put_on_host(z)
    word = on_host(me, 0.0)
    if me.rank == 0:
        me.fake.finish_caller()
        me.fake.stall(True, after=2)
        works = [dist.isend(x, 1, tag=5), dist.isend(x, 2, tag=5)]
        dist.recv(word, 1, tag=1)
        works += [dist.isend(host, r, tag=6) for r in (1, 2) for _ in range(4)]
        dist.recv(word, 2, tag=2)
        good.append(not works[0].is_completed())
        me.fake.stall(False)
        dist.send(word, 2, tag=3)
        for work in works:
            work.wait()
    elif me.rank == 1:
        before = me.fake.trace().count("copy_back")
        work = dist.irecv(y, 0, tag=5)
        good.append(comes(me, before))
        dist.send(word, 0, tag=1)
        for _ in range(4):
            z.zero_()
            dist.recv(z, 0, tag=6)
            good.append(torch.equal(z, host))
        dist.send(x, 2)
        work.wait()
        good.append(torch.equal(y, x))
    else:
        dist.recv(y, 1)
        good.append(torch.equal(y, x))
        dist.send(word, 0, tag=2)
        dist.recv(word, 0, tag=3)
        for _ in range(4):
            dist.recv(z, 0, tag=6)
        dist.recv(y, 0, tag=5)
        good.append(torch.equal(y, x))
    return good


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


# --- ends that are not alike ----------------------------------------------------------------------


def mixed(me: Me) -> list[bool]:
    """One end is in host memory, by turns; then both are on devices again."""
    good = []
    for turn in range(6):
        x, y = values(LARGE, turn), torch.zeros(LARGE)
        if turn % 3 == me.rank:
            me.fake.put_on_host(x if me.rank == 0 else y)
        if me.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(y, 0)
            good.append(torch.equal(y, x))
    return good


@pytest.mark.parametrize("staged", WAYS)
def test_one_end_on_the_host(pools, staged):
    assert pools(2, staged=staged, beside=None).run(mixed) == [[], [True] * 6]


def unlike(me: Me, sent: torch.Tensor, out: torch.Tensor) -> tuple[Caught, bool]:
    before = out.clone()
    error = caught(dist.send, sent, 1) if me.rank == 0 else caught(dist.recv, out, 0)
    for turn in range(8):  # more than there would be buffers if refusals took them
        x, y = values(LARGE, turn), torch.zeros(LARGE)
        if me.rank == 0:
            caught(dist.send, x, 1)
        else:
            caught(dist.recv, y[1:] if turn < 6 else y, 0)
    return error, torch.equal(out, before) and (me.rank == 0 or torch.equal(y, x))


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(LARGE - 1),
        torch.zeros(LARGE + 1),
        torch.zeros(3),
        torch.zeros(LARGE, dtype=torch.int32),
    ],
    ids=["smaller", "larger", "much smaller", "dtype"],
)
def test_what_does_not_fit(pools, out):
    pool = pools(2, staged="late", beside=None)
    (sender, kept), (receiver, untouched) = pool.run(unlike, torch.ones(LARGE), out)
    assert (sender.kind, receiver.kind) == ("ValueError", "ValueError"), (sender, receiver)
    assert sender.text == receiver.text
    assert receiver.text.startswith(
        f"rank 0 sent {4 * LARGE} bytes of float32 with tag 0 to rank 1"
    )
    assert kept
    assert untouched


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
