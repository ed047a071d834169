"""send and recv of CUDA tensors: all sizes, ends in different memory, the jobs of host memory, and
their order relative to streams and other messages.

Messages go through pinned memory.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import test_dist_p2p as on_host
import torch
import torch.distributed as dist
from devices import until
from dist_pool import OURS, RankContext
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


JOBS_OF_HOSTS = (*on_host.ALSO_ALONE, on_host.from_any_source)
JOBS_OF_HOSTS += (on_host.collectives_past_messages, on_host.messages_past_collectives)


@pytest.mark.parametrize("site", sites(*EMULATED, *REAL))
@pytest.mark.parametrize(
    "job",
    [
        *(pytest.param(j, id=j.__name__) for j in (ends_in_different_memory, *JOBS_OF_HOSTS)),
        pytest.param(
            on_host.dtypes,
            id="dtypes",
            marks=not_on(THREADS, "torch copies between layouts where the emulator does not see"),
        ),
    ],
)
def test_messages(pools, site, job):
    assert not any(pools(2, site=site).run(job))


@pytest.mark.parametrize("kind", on_host.MISMATCHES)
def test_mismatched_messages_raise(pools, kind):
    sent, out = on_host.MISMATCHES[kind]
    for _ in range(8):  # a refused message keeps no buffer
        (sender,), (receiver,) = pools(2, site="late").run(on_host.mismatched, sent, out, False)
        assert receiver.kind == "ValueError"
        assert receiver.text.startswith(f"rank 0 sent {sent.nbytes} bytes of "), receiver
        assert sender.kind == "ValueError" or (not sender.kind and sent.numel() <= 1000), sender


# --- order relative to streams and other messages -------------------------------------------------


def messages_in_order(me: RankContext) -> list[float]:
    """No message to the same rank, from GPU or host, overtakes one whose stream is late."""
    found = []
    if me.rank == 0:  # allocate pinned memory, for which CUDA may wait for all streams
        finish([dist.isend(torch.full((4,), 0.0), 1), dist.isend(torch.full((4,), 0.0), 1)])
    elif me.rank == 1:
        for _ in range(2):
            dist.recv(torch.zeros(4), 0)
    for _ in range(3):
        x, on_host = torch.zeros(4), me.site.host(torch.full((4,), 3.0))
        if me.rank == 0:
            with me.site.stalled():
                works = [dist.isend(torch.full((4,), n), 1) for n in (1.0, 2.0)]
                works.append(dist.isend(on_host, 1))
                assert not any(w.is_completed() for w in works)  # the calls did not block
                dist.send(on_host, 2)  # messages to another rank are not delayed
            finish(works)
        for _ in range((0, 3, 1)[me.rank]):
            dist.recv(x, 0)
            found.append(x[0].item())
    return found


@not_on(THREADS, "the emulator takes a small message from the host for one from a device")
@pytest.mark.parametrize("site", sites(*EMULATED, *REAL, stands_in=False))
def test_messages_do_not_overtake(pools, site):
    assert pools(3, site=site).run(messages_in_order) == [[], [1.0, 2.0, 3.0] * 3, [3.0] * 3]


def behind_the_stream(me: RankContext) -> None:
    """A send reads the tensor behind earlier work of its stream, and later work of the stream may
    overwrite it; a receive writes the tensor behind earlier work of its stream."""
    x, y = torch.zeros(LARGE), torch.full((LARGE,), -1.0)
    if me.rank == 0:
        with me.site.stalled():
            me.site.fill_later(x, 5.0)
            work = dist.isend(x, 1)
            me.site.fill_later(x, 6.0)
            time.sleep(0.1)
            early = work.is_completed()
        work.wait()
        me.site.synchronize()
        assert not early
        assert x.eq(6).all()
        return
    with me.site.stalled():
        me.site.fill_later(y, -2.0)
        work = dist.irecv(y, 0)
        time.sleep(0.2)
    work.wait()
    assert y.eq(5).all()


def behind_the_current_stream(me: RankContext) -> None:
    """Messages are ordered behind the current stream of the calling thread, not the default one."""
    x, y = torch.zeros(LARGE), torch.full((LARGE,), -1.0)
    me.site.synchronize()
    me.site.stall()  # the first stream
    if me.fake:
        me.fake.cuda.drain_waits(True)
    with me.site.second_stream():
        if me.rank == 0:
            me.site.fill_later(x, 5.0)
            dist.send(x, 1)
        else:
            me.site.fill_later(y, -2.0)
            dist.recv(y, 0)
    me.site.resume()
    me.site.synchronize()
    assert me.rank == 0 or y.eq(5).all()


def completed(me: RankContext) -> None:
    """A work is complete when its tensor has the message or the result, not when the copy is
    enqueued."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    for count in (10, LARGE):
        x, y, z = values(count, me.rank), torch.zeros(count), torch.ones(count)
        me.site.synchronize()
        sent, received = dist.isend(x, right), dist.irecv(y, left)
        for work, tensor, wanted in (
            (received, y, values(count, left)),
            (dist.all_reduce(z, async_op=True), z, torch.full((count,), float(me.world))),
        ):
            assert until(work.is_completed)
            with torch._C.DisableTorchFunction():  # which would finish the stream's work
                assert tensor.tolist() == wanted.tolist()
        sent.wait()


def reused_on_another_stream(me: RankContext) -> None:
    """A stream that waits for a send may overwrite the tensor, which was sent on another one."""
    x, y = torch.full((4,), 5.0), torch.zeros(4)
    me.site.synchronize()
    me.site.run_ahead()
    if me.rank == 0:
        with me.site.second_stream():
            work = dist.isend(x, 1)  # small, so that it is sent before it is received
        work.wait()
        me.site.fill_later(x, 9.0)
        me.site.synchronize()
    me.site.resume()
    dist.barrier()
    if me.rank == 1:
        dist.recv(y, 0)
    assert me.rank == 0 or y.eq(5).all()


LATE = (*sites("late", *REAL, stands_in=False),
        pytest.param("eager", marks=not_on(THREADS, "late streams expose more")))  # fmt: skip


def late_receiving_stream(me: RankContext) -> None:
    """A receiver whose stream is late blocks neither its own host nor the sender."""
    x, y = values(LARGE, 3), torch.zeros(LARGE)
    if me.rank == 0:
        return dist.send(x, 1)
    with me.site.stalled():
        me.site.fill_later(y, -2.0)
        work = dist.irecv(y, 0)
        work.wait()
        early = work.is_completed() or bool(me.fake and torch.equal(y, x))
    assert until(work.is_completed)
    assert not early
    assert torch.equal(y, x)


JOBS = (behind_the_stream, behind_the_current_stream, completed, reused_on_another_stream)


@pytest.mark.parametrize(
    "job",
    [
        *(pytest.param(job, id=job.__name__) for job in JOBS),
        pytest.param(
            late_receiving_stream,
            id="late_receiving_stream",
            marks=not_on(THREADS, "the stream of one rank is stalled"),
        ),
    ],
)
@pytest.mark.parametrize("site", LATE)
def test_works_of_messages_follow_their_streams(pools, site, job):
    pools(2, site=site).run(job)
