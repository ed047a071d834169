"""send and recv of CUDA tensors: all sizes, dtypes and layouts, by tag and in batches.

Messages go through pinned memory.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, RankContext, caught, pools_of_ranks
from dist_sites import EMULATED, REAL, site_worlds, sites, until
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
pools = pytest.fixture(pools_of_ranks, scope="module")
MIB = (1 << 20) // 4  # float32 elements
LARGE = 3 * MIB + 3  # elements; more than the buffers between two ranks


def values(count: int, seed: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32) % 1009 + seed


def finish(works: list[Any]) -> None:
    for work in works:
        work.wait()


# --- sizes ----------------------------------------------------------------------------------------

SIZES = (0, 1, 1000, 4097, MIB - 1, MIB, MIB + 1, 400_000, LARGE)


def around_a_ring(me: RankContext) -> list[str]:
    """Send to the right, receive from the left or any source; strided or not, filled late."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    wrong = []
    for count in (*SIZES, *[64 * MIB] * me.site.real):
        for stride in (1, 2):
            y = torch.full((count * stride,), -1.0)[::stride]
            me.site.fill_later(y, -2.0)
            x = values(count * stride, me.rank)[::stride]
            sent = dist.isend(x, right)
            source = dist.recv(y, None if count in (1000, MIB) else left)
            sent.wait()
            x.fill_(-3.0)  # the sender may reuse its tensor after wait()
            if source != left or not torch.equal(y, values(count * stride, left)[::stride]):
                wrong.append(f"{count} elements, stride {stride}, from {source}: {y[:3]}")
    return wrong


@pytest.mark.parametrize(("site", "world"), site_worlds(*EMULATED, *REAL))
def test_around_a_ring(pools, site, world):
    assert pools(world, site=site).run(around_a_ring) == [[]] * world


DTYPES = (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


def of_dtypes(me: RankContext) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        x = values(LARGE, me.rank).to(dtype).reshape(3, -1)[:, 5:]  # nonzero storage offset
        y = torch.zeros(3, LARGE // 3, dtype=dtype)[1:].expand(2, -1)
        finish([dist.isend(x[1:], 1 - me.rank), dist.irecv(y[:, 5:], 1 - me.rank)])
        theirs = values(LARGE, 1 - me.rank).to(dtype).reshape(3, -1)[1:]
        if not torch.equal(y[:, 5:], theirs[:, 5:]) or y[:, :5].any():
            wrong.append(str(dtype))
    return wrong


def ends_in_different_memory(me: RankContext) -> list[int]:
    """Messages between host memory and GPU."""
    wrong = []
    for turn in range(6):
        x = values(LARGE - 1000 * turn, turn)
        y = torch.zeros_like(x)
        if turn % 3 == me.rank:
            x, y = me.site.host(x), me.site.host(y)
        if me.rank == 0:
            dist.send(x, 1)
            x.fill_(-1.0)  # the sender may reuse its tensor after send()
        else:
            dist.recv(y, 0)
            wrong += [] if torch.equal(y.cpu(), values(y.numel(), turn).cpu()) else [turn]
    return wrong


# --- several at a time ----------------------------------------------------------------------------


def by_tag(me: RankContext) -> list[str]:
    """Ten concurrent messages, large and small, received in another order, early or late."""
    counts = [MIB + 7 * tag if tag % 3 else 11 for tag in range(10)]
    wrong = []
    for early in (True, False):
        ys = [torch.zeros(n) for n in counts]
        time.sleep(0.05 * (early == (me.rank == 0)))
        if me.rank == 0:
            finish([dist.isend(values(n, tag), 1, tag=tag) for tag, n in enumerate(counts)])
            continue
        tags = sorted(range(10), key=lambda tag: (tag * 7 + 3) % 10)
        finish([dist.irecv(ys[tag], None if tag % 2 else 0, tag=tag) for tag in tags])
        wrong += [
            f"tag {tag}" for tag, n in enumerate(counts) if not torch.equal(ys[tag], values(n, tag))
        ]
    return wrong


def batches(me: RankContext) -> list[str]:
    """Batches of more messages than a receiver has buffers, to the right neighbour and to self."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    wrong = []
    for count in (50, MIB + 1, LARGE):
        xs = [values(count, 10 * me.rank + i) for i in range(6)]
        ys = [torch.zeros(count) for _ in xs]
        own, mine = values(count, 99), torch.zeros(count)
        ops = [dist.P2POp(dist.irecv, y, left) for y in ys]
        ops += [dist.P2POp(dist.irecv, mine, me.rank), dist.P2POp(dist.isend, own, me.rank)]
        ops += [dist.P2POp(dist.isend, x, right) for x in xs]
        finish(list(reversed(dist.batch_isend_irecv(ops))))
        good = [torch.equal(y, values(count, 10 * left + i)) for i, y in enumerate(ys)]
        wrong += [] if all(good) and torch.equal(own, mine) else [f"{count}: {good}"]
    return wrong


def futures(me: RankContext) -> list[int]:
    wrong = []
    for count in (50, LARGE):
        x, y = values(count, me.rank), torch.zeros(count)
        works = [dist.irecv(y, 1 - me.rank), dist.isend(x, 1 - me.rank)]
        future = works[0].get_future()
        future.wait()
        works[1].wait()
        assert all(until(work.is_completed) for work in works)
        wrong += [] if torch.equal(future.value()[0], values(count, 1 - me.rank)) else [count]
    return wrong


def without_waiting_threads(me: RankContext) -> list[int]:
    """The group's thread sends a message after its device copy, without any waiting thread."""
    wrong = []
    for count in (100, LARGE):
        x, y = values(count, me.rank), torch.zeros(count)
        if me.rank == 0:
            work = dist.isend(x, 1)
            dist.recv(y, 1)  # rank 1 sends it only after the message from rank 0 has arrived
            work.wait()
        else:
            dist.recv(y, 0)
            dist.send(x, 0)
        wrong += [] if torch.equal(y, values(count, 1 - me.rank)) else [count]
    return wrong


JOBS = (of_dtypes, ends_in_different_memory, by_tag, batches, futures, without_waiting_threads)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("site", sites(*EMULATED, *REAL))
def test_messages(pools, site, job):
    world = 3 if job is batches else 2
    assert pools(world, site=site).run(job) == [[]] * world


# --- messages that do not match -------------------------------------------------------------------


def mismatched_message(me: RankContext, size: int, dtype: torch.dtype) -> tuple[Caught, bool]:
    x, out = torch.ones(LARGE), torch.zeros(size, dtype=dtype)
    error = caught(dist.send, x, 1) if me.rank == 0 else caught(dist.recv, out, 0)
    for turn in range(8):  # more than the buffers, in case refused messages leaked them
        x, y = values(LARGE, turn), torch.zeros(LARGE)
        if me.rank == 0:
            caught(dist.send, x, 1)
        else:
            caught(dist.recv, y[1:] if turn < 6 else y, 0)
    return error, not out.any() and (me.rank == 0 or torch.equal(y, x))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (LARGE - 1, torch.float32),
        (LARGE + 1, torch.float32),
        (3, torch.float32),
        (LARGE, torch.int32),
    ],
)
def test_mismatched_messages_raise(pools, size, dtype):
    (sender, kept), (receiver, untouched) = pools(2, site="late").run(
        mismatched_message, size, dtype
    )
    assert (sender.kind, receiver.kind) == ("ValueError", "ValueError"), (sender, receiver)
    assert sender.text == receiver.text
    start = f"rank 0 sent {4 * LARGE} bytes of float32 with tag 0 to rank 1"
    assert receiver.text.startswith(start)
    assert kept
    assert untouched
