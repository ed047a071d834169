"""send and recv of tensors on devices whose memory processes reach, without a device.

Large messages go through blocks of that memory. What a rank cannot open goes through pinned memory:
test_dist_slabs_p2p_staged.py; faults are test_dist_slabs_p2p_faults.py's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Me, Pools, fresh, pools_of_a_module
from test_dist_slabs_placed import make
from test_dist_staging_p2p import batched, in_order, nobody_waits

pytestmark = pytest.mark.skipif(not OURS, reason="has memory of its own for messages")
WAYS = ("late:stream", "eager:wait", "late:best")
LEAST = (64 << 10) // 4  # elements of float32: smaller messages go through pinned memory
PART = ((2 << 20) - 256) // 4  # elements: larger messages go in parts
STAMPS = 1  # of pinned memory, for the first message of a peer's


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    for all_pools in pools_of_a_module():
        yield all_pools
        for spec, pool in all_pools.made.items():
            assert not pool.whole or pool.run(fouls) == [[]] * spec.world


def fouls(me: Me) -> list[str]:
    return me.fake.gpu.fouls()


def values(count: int, seed: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 1009 + seed


def around(me: Me) -> list[str]:
    """To the right neighbour, from the left one or from anybody, strided and not."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    edges = [n + d for n in (LEAST, PART, 2 * PART) for d in (-1, 0, 1)]
    wrong = []
    for count in (0, 1, 1000, *edges, 100_000, 3 * PART + 3):
        for stride in (1, 2):
            x = values(count * stride, me.rank)[::stride]
            y = torch.full((count * stride,), -1.0)[::stride]
            me.fake.fill_later(y, -2.0)
            before = me.fake.pinned()
            sent = dist.isend(x, right)
            source = dist.recv(y, None if count == 1000 else left)
            sent.wait()
            took = me.fake.pinned() - before
            if source != left or not torch.equal(y, values(count * stride, left)[::stride]):
                wrong.append(f"{count} elements, stride {stride}, from {source}: {y[:3]}")
            if took > STAMPS if count >= LEAST else took != 2 * (count > 0):
                wrong.append(f"{count} elements took pinned memory {took} times")
    return wrong


@pytest.mark.parametrize("staged", WAYS)
def test_around_a_ring(pools, staged):
    assert pools(3, staged=staged, beside=None).run(around) == [[]] * 3


@pytest.mark.parametrize("staged", WAYS)
def test_small_ones_as_on_other_rungs(pools, staged):
    found = pools(3, staged=staged, beside=None).run(in_order)
    assert found == [[], [1.0, 2.0, 3.0] * 5, [3.0] * 5]
    pool = pools(2, staged=staged, beside=None)
    assert pool.run(nobody_waits) == [2.0, 1.0]
    assert pool.run(batched) == [[1.0, 1.0], [0.0, 0.0]]


def without_pinned_memory(me: Me) -> tuple[int, int]:
    """Once the pair knows each other. The sender's tensor is its own again after wait()."""
    x, y, before, wrong = torch.empty(100_000), torch.empty(100_000), 0, 0
    for turn in range(100):  # more than would find room if none came free
        if turn == 1:
            before = me.fake.pinned()
        if me.rank == turn % 2:
            x.fill_(float(turn))
            dist.send(x, 1 - me.rank)
            x.fill_(-1.0)
        else:
            dist.recv(y, 1 - me.rank)
            wrong += not bool((y == turn).all())
    return wrong, me.fake.pinned() - before


@pytest.mark.parametrize("staged", WAYS)
def test_no_pinned_memory(pools, staged):
    for wrong, pinned in pools(2, staged=staged, beside=None).run(without_pinned_memory):
        assert wrong == 0
        assert pinned <= STAMPS


def by_tag(me: Me) -> list[str]:
    """Ten at a time, large and small, received in another order, some before they are sent."""
    counts = [LEAST + 7 * tag if tag % 3 else 11 for tag in range(10)]
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
    """More at a time than there is room for: what finds none goes through pinned memory."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    good = []
    for count in (LEAST, 300_000, 2 * PART):
        xs = [values(count, 10 * me.rank + i) for i in range(8)]
        ys = [torch.zeros(count) for _ in xs]
        ops = [dist.P2POp(dist.irecv, y, left) for y in ys]
        ops += [dist.P2POp(dist.isend, x, right) for x in xs]
        works = dist.batch_isend_irecv(ops)
        for work in reversed(works):
            work.wait()
        good += [torch.equal(y, values(count, 10 * left + i)) for i, y in enumerate(ys)]
    return good


@pytest.mark.parametrize("staged", WAYS)
def test_batches_around_a_ring(pools, staged):
    assert pools(3, staged=staged, beside=None).run(ring_of_batches) == [[True] * 24] * 3


def nobody_looks(me: Me) -> tuple[bool, int]:
    """The group's thread moves large messages while nobody waits for them."""
    x, y = values(LEAST, me.rank), torch.zeros(LEAST)
    before = me.fake.trace().count("copy_back")
    if me.rank == 0:
        work = dist.irecv(y, 1)
    else:
        time.sleep(0.1)
        work = dist.isend(x, 0)
    time.sleep(0.4)
    copied = me.fake.trace().count("copy_back") - before
    work.wait()
    return me.rank == 1 or torch.equal(y, values(LEAST, 1)), copied


@pytest.mark.parametrize("staged", WAYS)
def test_messages_that_nobody_waits_for(pools, staged):
    found = pools(2, staged=staged, beside=None).run(nobody_looks)
    assert found == [(True, 1), (True, 0)]


def futures(me: Me) -> float:
    x, y = torch.full((LEAST,), float(me.rank)), torch.zeros(LEAST)
    works = [dist.irecv(y, 1 - me.rank), dist.isend(x, 1 - me.rank)]
    future = works[0].get_future()
    future.wait()
    works[1].wait()
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    return future.value()[0].sum().item() / LEAST


@pytest.mark.parametrize("staged", WAYS)
def test_futures(pools, staged):
    assert pools(2, staged=staged, beside=None).run(futures) == [1.0, 0.0]


def lent(me: Me) -> tuple[list[bool], list[int]]:
    """Tensors that the receiver reaches are not copied before, once it has shown that it does."""
    xs = [make(2 * PART), make(2 * PART)[1000:], make(2 * PART)[::2]]
    y, good, copied = torch.zeros(2 * PART), [], []
    for turn, x in enumerate([*xs, *xs]):
        x.copy_(values(x.numel(), turn))
        y.fill_(-1.0)
        before = me.fake.trace().count("copy_out")
        if me.rank == 0:
            dist.send(x, 1)
            x.fill_(-2.0)
            copied.append(me.fake.trace().count("copy_out") - before)
        else:
            dist.recv(y[: x.numel()], 0)
            good.append(torch.equal(y[: x.numel()], values(x.numel(), turn)))
    return good, copied


@pytest.mark.parametrize("staged", ["late:stream", "eager:wait"])
def test_tensors_that_the_receiver_reaches(staged):
    with fresh(2, staged=staged) as pool:
        (_, copied), (good, _) = pool.run(lent)
        assert good == [True] * 6
        assert copied == [1, 0, 1, 0, 0, 1]  # the first, and those that are not contiguous
        assert pool.run(fouls) == [[], []]


def beside_a_collective(me: Me) -> bool:
    """The group's streams wait for the last rank's, whose caller has something else to do."""
    x, y = values(100_000, 3), torch.zeros(100_000)
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
    if me.rank == 0:
        dist.send(x, 1)
    elif me.rank == 1:
        dist.recv(y, 0)
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
