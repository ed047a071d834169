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


def pieces(me: Me) -> int:
    """Copies off the device until now."""
    return me.fake.calls().count("copy_ caller")


def comes(me: Me, before: int) -> bool:
    """Has more been copied to the device since than `before`? Waits for it, but not for ever."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if me.fake.calls().count("copy_ group") > before:
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
    before = me.fake.calls().count("copy_ group")
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
