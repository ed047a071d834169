"""send and recv of CUDA tensors: all sizes, ends in different memory, and the jobs of host memory.

Messages go through pinned memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_dist_p2p as on_host
import torch
import torch.distributed as dist
from devices import until
from dist_pool import OURS, Caught, RankContext, caught
from sites import EMULATED, REAL, THREADS, not_on, site_worlds, sites
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
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


JOBS = (ends_in_different_memory, futures, without_waiting_threads)
JOBS_OF_HOSTS = (*on_host.ALSO_ALONE, on_host.from_any_source, on_host.collectives_past_messages)


@pytest.mark.parametrize("site", sites(*EMULATED, *REAL))
@pytest.mark.parametrize(
    "job",
    [
        *(pytest.param(job, id=job.__name__) for job in JOBS + JOBS_OF_HOSTS),
        pytest.param(
            on_host.dtypes,
            id="dtypes",
            marks=not_on(THREADS, "torch copies between layouts where the emulator does not see"),
        ),
    ],
)
def test_messages(pools, site, job):
    assert pools(2, site=site).run(job) == [[] if job in JOBS else None] * 2


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
