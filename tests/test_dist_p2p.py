"""send, recv, isend and irecv: messages match by peer and tag, and progress independently.

No message waits for an unrelated one, of any size: a collective, a message with another tag, or a
message in the other direction.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Pools, RankContext, pools_of_a_module
from reference import DTYPES, MOVED, assert_same, bits, randoms
from torch import Tensor

COUNTS = (0, 1, 7, 1023, 70_001, 700_003)  # elements: eager, one buffer, several buffers
MIB_64 = 64 * 2**20 // 4


@pytest.fixture(scope="module")
def pools(ranks_as: str) -> Iterator[Pools]:
    yield from pools_of_a_module(ranks_as=ranks_as)


def of(rank: int, count: int, tag: int = 0) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * rank + 17 * tag


def ring(me: RankContext) -> None:
    """Send every size around a ring; even ranks send first."""
    to, source = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    for count in COUNTS:
        x, y = of(me.rank, count), torch.full((count,), -1.0)
        if me.rank % 2 == 0:
            dist.send(x, to)
            assert dist.recv(y, source) == source
        else:
            assert dist.recv(y, source) == source
            dist.send(x, to)
        assert_same([y], [of(source, count)], count)


def both_ways(me: RankContext) -> None:
    """Both ranks send 64 MiB before they post a receive."""
    other = 1 - me.rank
    x, y = of(me.rank, MIB_64), torch.zeros(MIB_64)
    sent = dist.isend(x, other)
    received = dist.irecv(y, other)
    received.wait()
    sent.wait()
    assert torch.equal(y, of(other, MIB_64))


def all_pairs(me: RankContext) -> None:
    """All pairs of ranks exchange three messages on each of two tags, ordered within each tag."""
    others = [r for r in range(me.world) if r != me.rank]
    sends, receives = [], []
    for other in others:
        for tag in (3, 1):
            for n in range(3):
                sends.append(dist.isend(of(me.rank, 40_000 * n + 5, tag), other, tag=tag))
    for other in reversed(others):
        for tag in (1, 3):
            for n in range(3):
                out = torch.zeros(40_000 * n + 5)
                work = dist.irecv(out, other, tag=tag)
                receives.append((work, out, of(other, 40_000 * n + 5, tag)))
    for work, out, wanted in receives:
        work.wait()
        assert_same([out], [wanted])
    for work in sends:
        work.wait()


def tags_out_of_order(me: RankContext) -> None:
    """Receive tags in reverse order of sending; small messages, and larger than any queue."""
    for count in (3, 400_000):
        if me.rank == 0:
            sends = [dist.isend(of(0, count, tag), 1, tag=tag) for tag in range(6)]
            for work in sends:
                work.wait()
        else:
            for tag in reversed(range(6)):
                out = torch.zeros(count)
                dist.recv(out, 0, tag=tag)
                assert_same([out], [of(0, count, tag)], f"tag {tag}")


def from_any_source(me: RankContext) -> None:
    for count in (5, 300_001):
        if me.rank == 0:
            seen = set()
            for _ in range(1, me.world):
                out = torch.zeros(count)
                source = dist.recv(out, None, tag=count)
                assert_same([out], [of(source, count)])
                seen.add(source)
            assert seen == set(range(1, me.world))
        else:
            dist.send(of(me.rank, count), 0, tag=count)


def any_source_asynchronously(me: RankContext) -> None:
    if me.rank == 0:
        out = torch.zeros(9)
        work = dist.group.WORLD.recv_anysource([out], 5)
        work.wait()
        assert work._source_rank() == me.world - 1
        assert_same([out], [of(me.world - 1, 9)])
    elif me.rank == me.world - 1:
        dist.send(of(me.rank, 9), 0, tag=5)


def batch(me: RankContext) -> None:
    to, source = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    for count in (4, 200_000):
        out = [torch.zeros(count), torch.zeros(count)]
        ops = [
            dist.P2POp(dist.irecv, out[0], source),
            dist.P2POp(dist.isend, of(me.rank, count), to),
        ]
        ops += [dist.P2POp(dist.isend, of(me.rank, count, 1), source)]
        ops += [dist.P2POp(dist.irecv, out[1], to)]
        if me.world == 2:  # between two ranks, messages match by their order in each direction
            ops = [ops[0], ops[1], ops[3], ops[2]]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert_same(out, [of(source, count), of(to, count, 1)])


def dtypes(me: RankContext) -> None:
    every = (*DTYPES, *MOVED, torch.uint4)  # the last cannot be copied by torch
    for dtype, count in itertools.product(every, (0, 3, 33)):
        x = randoms(1, (count, 1023), dtype)[0]
        if me.rank == 0:
            dist.send(x, 1)
            dist.send(x.t(), 1, tag=1)
            dist.send(x.t(), 1, tag=2)
        elif me.rank == 1:
            y, z = (torch.zeros_like(x.view(torch.uint8)).view(dtype) for _ in range(2))
            work = dist.irecv(z.t(), None, tag=1)
            dist.recv(y, 0)
            work.wait()
            assert_same([y, z], [x, x], dtype)
            dist.recv(y.view(-1), 0, tag=2)
            assert_same([bits(y).view(-1)], [bits(x.t()).reshape(-1)], dtype)


def messages_past_collectives(me: RankContext) -> None:
    """Messages overtake an unfinished collective: rank 1 joins it after its reply."""
    if me.rank == 0:
        x = torch.ones(5)
        work = dist.all_reduce(x, async_op=True)
        dist.send(of(0, 100_000), 1)
        out = torch.zeros(100_000)
        dist.recv(out, 1)
        assert_same([out], [of(1, 100_000)])
        work.wait()
    else:
        x = torch.ones(5)
        if me.rank == 1:
            out = torch.zeros(100_000)
            dist.recv(out, 0)
            assert_same([out], [of(0, 100_000)])
            dist.send(of(1, 100_000), 0)
        dist.all_reduce(x)
    assert x.tolist() == [me.world] * 5


def collectives_past_messages(me: RankContext) -> None:
    """Collectives overtake a receive without its send, and a large send without its receive."""
    out = torch.zeros(300_000)
    if me.rank == 0:
        work = dist.irecv(out, 1, tag=2)
        sent = dist.isend(of(0, 300_000), 1, tag=3)
    for _ in range(5):
        x = torch.ones(70_000)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((70_000,), float(me.world)))
    if me.rank == 0:
        work.wait()
        sent.wait()
        assert_same([out], [of(1, 300_000)])
    elif me.rank == 1:
        dist.send(of(1, 300_000), 0, tag=2)
        dist.recv(out, 0, tag=3)
        assert_same([out], [of(0, 300_000)])


def polled(me: RankContext) -> None:
    """is_completed() becomes true without any call of wait()."""
    out = torch.zeros(300_000)
    if me.rank > 1:
        return
    works = [dist.isend(of(me.rank, 300_000), 1 - me.rank), dist.irecv(out, 1 - me.rank)]
    limit = time.monotonic() + 10
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < limit, [work.is_completed() for work in works]
        time.sleep(0.001)
    assert_same([out], [of(1 - me.rank, 300_000)])


def in_a_subgroup(me: RankContext) -> None:
    """Messages in a subgroup, addressed by global rank or by group rank."""
    group = dist.new_group([me.world - 1, 0])
    if me.rank in (0, me.world - 1):
        out = torch.zeros(6)
        other = me.world - 1 - me.rank
        work = dist.isend(of(me.rank, 6), other, group=group)
        assert dist.recv(out, other, group=group) == other
        work.wait()
        assert_same([out], [of(other, 6)])
        work = dist.isend(of(me.rank, 6), group=group, group_dst=1 - dist.get_rank(group))
        dist.recv(out, group=group, group_src=1 - dist.get_rank(group))
        work.wait()
    dist.destroy_process_group(group)


def overwritten(me: RankContext) -> None:
    """Once a send has returned, its tensor may be overwritten, although nobody receives yet."""
    to, source = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    for count in (1, 1000):
        x, y = of(me.rank, count), torch.full((count,), -1.0)
        dist.send(x, to)
        x.fill_(-9)
        dist.barrier()
        dist.recv(y, source)
        assert_same([y], [of(source, count)], count)


JOBS = (overwritten, ring, all_pairs, from_any_source, any_source_asynchronously, batch, dtypes)
JOBS += (messages_past_collectives, collectives_past_messages, polled, in_a_subgroup)
GLOO_LACKS = {
    dtypes: "has no int16 among its dtypes",
    polled: "makes no progress unless a thread waits",
}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("world", [2, 4])
def test_messages(pools, world, job):
    if not OURS and job in GLOO_LACKS:
        pytest.skip(f"{BACKEND} {GLOO_LACKS[job]}")
    pools(world).run(job)


@pytest.mark.parametrize("job", [both_ways, tags_out_of_order], ids=lambda job: job.__name__)
def test_messages_between_two_ranks(pools, job):
    pools(2).run(job)
