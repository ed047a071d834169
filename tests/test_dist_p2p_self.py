"""Messages of a rank to itself: isend and irecv, alone, in batches and among other messages.

torch's blocking send and recv refuse the rank's own number.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import (
    OURS,
    Caught,
    Pool,
    RankContext,
    caught,
    started_jobs,
)
from dist_ranks import staged
from reference import assert_same
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="does not connect a rank to itself")
COUNTS = (0, 1, 7, 1023, 70_001, 1_000_003)  # elements: eager, one buffer, several buffers
DEVICES = ("late", "eager")


def of(rank: int, count: int, tag: int = 0) -> Tensor:
    return torch.arange(count, dtype=torch.float32) % 1009 + 1000 * rank + 17 * tag


def start_receive(y: Tensor, source: int | None, tag: int = 0) -> dist.Work:
    if source is None:  # torch's blocking recv would raise if the message is the rank's own
        return dist.group.WORLD.recv_anysource([y], tag)
    return dist.irecv(y, source, tag=tag)


def sizes(me: RankContext) -> None:
    """Self-messages: send or receive first, strided at either end, from self or any source."""
    for count, (out, into), sends, source in itertools.product(
        COUNTS, [(1, 1), (2, 1), (1, 3)], [True, False], [me.rank, None]
    ):
        x = of(me.rank, out * count)[::out]
        y = torch.full((into * count,), -1.0)[::into]
        works = [dist.isend(x, me.rank)] if sends else [start_receive(y, source)]
        works += [start_receive(y, source)] if sends else [dist.isend(x, me.rank)]
        for work in works:
            work.wait()
        assert works[sends]._source_rank() == me.rank
        assert_same([y], [x], (count, out, into, sends, source))


def in_order(me: RankContext) -> None:
    """Self-messages match by tag, and within a tag in order of issue; waits in any order."""
    outs = [(tag, n, torch.zeros(30_000 * n + 5)) for n in range(3) for tag in (3, 1)]
    sends = [dist.isend(of(n, len(y), tag), me.rank, tag=tag) for tag, n, y in outs]
    receives = [dist.irecv(y, me.rank, tag=tag) for tag, _, y in sorted(outs, key=lambda o: o[0])]
    for work in reversed(sends + receives):
        work.wait()
    for tag, n, y in outs:
        assert_same([y], [of(n, len(y), tag)], (tag, n))


def batches(me: RankContext) -> None:
    """Batched messages to all ranks including self, and to self alone."""
    for count in (5, 400_000):
        for peers in (range(me.world), [me.rank]):
            outs = {peer: torch.zeros(count) for peer in peers}
            ops = [dist.P2POp(dist.isend, of(me.rank, count, peer), peer) for peer in peers]
            ops += [dist.P2POp(dist.irecv, y, peer) for peer, y in outs.items()]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            for peer, y in outs.items():
                assert_same([y], [of(peer, count, me.rank)], (count, peer))
    dist.barrier()  # runs at once, because the batch has ended its coalescing


def futures(me: RankContext) -> None:
    """Self-messages complete through a future, and through polling, without wait()."""
    y, z = torch.zeros(400_000), torch.zeros(400_000)
    works = [dist.irecv(y, me.rank), dist.isend(of(me.rank, 400_000), me.rank)]
    assert_same(works[0].get_future().wait(), [of(me.rank, 400_000)])
    works += [dist.isend(y, me.rank), dist.irecv(z, me.rank)]
    limit = time.monotonic() + 10
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < limit
        time.sleep(0.001)
    assert_same([z], [y])


JOBS = (sizes, in_order, batches, futures)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("world", [1, 3])
def test_messages_to_self(pools, world, job):
    pools(world).run(job, seconds=40)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("site", staged(*DEVICES))
def test_device_messages_to_self(pools, site, job):
    pools(2, site=site).run(job, seconds=60)


def beside_others(me: RankContext) -> list[int]:
    """Receives from any source match messages of the rank itself and of its peers."""
    dist.send(of(me.rank, 9), (me.rank + 1) % me.world)
    sent = dist.isend(of(me.rank, 9), me.rank)
    sources = []
    for _ in range(2):
        y = torch.zeros(9)
        work = start_receive(y, None)
        work.wait()
        assert_same([y], [of(work._source_rank(), 9)])
        sources.append(work._source_rank())
    sent.wait()
    return sorted(sources)


def test_receives_from_any_source(pools):
    assert pools(3).run(beside_others) == [[0, 2], [0, 1], [1, 2]]


def unmatched(me: RankContext, how: str) -> Caught:
    if me.rank != 0:
        time.sleep(1.5)  # so that the timeout of rank 0 expires first
        return caught(dist.barrier)
    if how == "irecv":
        return caught(dist.irecv(torch.zeros(3), 0).wait)
    if how == "irecv from any source":
        return caught(start_receive(torch.zeros(3), None).wait)
    return caught(dist.isend(torch.zeros(3_000_000), 0).wait)


UNMATCHED = ("irecv", "irecv from any source", "isend")


@pytest.fixture(scope="module")
def unmatched_jobs() -> Iterator[dict[int, dict[str, Pool]]]:
    jobs = {how: (unmatched, how) for how in UNMATCHED}
    for alone in started_jobs(jobs, 1, timeout=1.0):
        for pairs in started_jobs(jobs, 2, timeout=1.0):
            yield {1: alone, 2: pairs}


@pytest.mark.parametrize("how", UNMATCHED)
@pytest.mark.parametrize("world", [1, 2])
def test_unmatched_messages_time_out(unmatched_jobs, how, world):
    absent = 1 if world == 2 and how == "irecv from any source" else 0
    for error in unmatched_jobs[world][how].results():
        assert error.kind == "Timeout", error
        assert f"rank {absent} did not arrive" in error.text
