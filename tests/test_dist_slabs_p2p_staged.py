"""Large messages of tensors on devices, without a device, that one end cannot take from the other's
memory: what is in the way costs a copy through pinned memory, and is found out once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, Pools, caught, fresh, pools_of_a_module
from test_dist_slabs_p2p import LEAST, PART, STAMPS, WAYS, values

pytestmark = pytest.mark.skipif(not OURS, reason="has memory of its own for messages")


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    yield from pools_of_a_module()


def mixed(me: Me) -> list[bool]:
    """One end is in host memory, by turns; then both are on devices again."""
    good = []
    for turn in range(6):
        x, y = values(100_000, turn), torch.zeros(100_000)
        if turn % 3 == me.rank:
            me.fake.put_on_host(x if me.rank == 0 else y)
        before = me.fake.pinned()
        if me.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(y, 0)
            good.append(torch.equal(y, x))
        if turn in (2, 5):
            good.append(me.fake.pinned() - before <= STAMPS)
    return good


@pytest.mark.parametrize("staged", WAYS)
def test_one_end_on_the_host(pools, staged):
    assert pools(2, staged=staged, beside=None).run(mixed) == [[True] * 2, [True] * 8]


def refused(me: Me, call: str, lost: bool, count: int) -> tuple[list[bool], list[int], int]:
    """The receiver cannot open the sender's memory, or does not find there what was written."""
    if me.rank == 1 and lost:
        me.fake.gpu.drop(call)
    elif me.rank == 1:
        me.fake.gpu.fail(call)
    good, from_blocks = [], []
    for turn in range(3):
        x, y = values(count, turn), torch.zeros(count)
        before = me.fake.trace().count("copy_back")
        if me.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(y, 0)
        good.append(me.rank == 0 or torch.equal(y, x))
        from_blocks.append(me.fake.trace().count("copy_back") - before)
    opened = me.fake.gpu.books().get("open", 0)
    return good, from_blocks if me.rank == 0 else [], opened


@pytest.mark.parametrize("count", [100_000, 2 * PART + 1])
@pytest.mark.parametrize(("call", "lost"), [("open", False), ("read", True)])
def test_memory_that_the_receiver_cannot_use(call, lost, count):
    with fresh(2, staged="late:stream") as pool:
        (good, from_blocks, _), (right, _, opened) = pool.run(refused, call, lost, count)
        assert all(good)
        assert all(right)
        assert from_blocks == [1, 0, 0]  # the pair knows from then on
        assert opened == 1


def not_sent(me: Me) -> tuple[list[bool], list[int], int]:
    """The sender's memory cannot be handed over."""
    if me.rank == 0:
        me.fake.gpu.fail("handle_of")
    good, asked = [], []
    for turn in range(3):
        x, y = values(100_000, turn), torch.zeros(100_000)
        if me.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(y, 0)
            good.append(torch.equal(y, x))
        asked.append(me.fake.gpu.books().get("allocate", 0))
    return good, asked, me.fake.gpu.books().get("allocated", 0)


def test_memory_that_cannot_be_handed_over():
    with fresh(2, staged="late:stream") as pool:
        (_, asked, kept), (good, *_) = pool.run(not_sent)
        assert good == [True] * 3
        assert asked[0] > 0
        assert asked == [asked[0]] * 3  # it is found out once
        assert kept == 0


def unlike(me: Me, sent: torch.Tensor, out: torch.Tensor) -> tuple[Caught, bool]:
    before = out.clone()
    error = caught(dist.send, sent, 1) if me.rank == 0 else caught(dist.recv, out, 0)
    for turn in range(12):  # more than would find room if refusals took it
        x, y = values(300_000, turn), torch.zeros(300_000)
        if me.rank == 0:
            caught(dist.send, x, 1)
        else:
            caught(dist.recv, y[1:] if turn < 10 else y, 0)
    return error, torch.equal(out, before) and (me.rank == 0 or torch.equal(y, x))


@pytest.mark.parametrize(
    "out",
    [torch.zeros(LEAST - 1), torch.zeros(3), torch.zeros(LEAST, dtype=torch.int32)],
    ids=["smaller", "much smaller", "dtype"],
)
def test_what_does_not_fit(pools, out):
    pool = pools(2, staged="late:stream", beside=None)
    before = pool.run(room)
    (sender, kept), (receiver, untouched) = pool.run(unlike, torch.ones(LEAST), out)
    assert (sender.kind, receiver.kind) == ("ValueError", "ValueError"), (sender, receiver)
    assert sender.text == receiver.text
    assert receiver.text.startswith(
        f"rank 0 sent {4 * LEAST} bytes of float32 with tag 0 to rank 1"
    )
    assert kept
    assert untouched
    assert pool.run(room) <= [max(n, 1) for n in before]


def room(me: Me) -> int:
    return me.fake.gpu.books().get("allocated", 0)


def on_host_rung(me: Me) -> tuple[bool, int]:
    x, y = values(100_000, me.rank), torch.zeros(100_000)
    works = [dist.isend(x, 1 - me.rank), dist.irecv(y, 1 - me.rank)]
    for work in works:
        work.wait()
    return torch.equal(y, values(100_000, 1 - me.rank)), me.fake.gpu.books().get("allocate", 0)


def test_the_host_rung_takes_no_memory(pools):
    assert pools(2, staged="late:host", beside=None).run(on_host_rung) == [(True, 0)] * 2
