"""send, recv, isend and irecv: messages match by peer and tag, and progress independently.

A rank may send to itself, except by torch's blocking calls.

No message waits for an unrelated one, of any size: a collective, a message with another tag, or a
message in the other direction. Messages that do not fit their receive raise, and write nothing.
"""

from __future__ import annotations

import datetime
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Caught, JobPool, RankContext, Spec, caught, check_side_by_side
from reference import DTYPES, MOVED, assert_same, bits, randoms, short
from sites import quick_on_hosts
from torch import Tensor

import pycollect as pc

COUNTS = (0, 1, 7, 1023, 70_001, 700_003)  # elements: eager, one buffer, several buffers
MIB_64 = 64 * 2**20 // 4
MANY = 3000  # messages
LARGEST = 2**31 - 1  # tag of torch


def of(rank: int, count: int, tag: int = 0) -> Tensor:
    return torch.arange(count, dtype=torch.float32) % 1009 + 2000 * rank + 17 * (tag % 1009)


def peers_of(me: RankContext) -> list[int]:
    return [r for r in range(me.world) if OURS or r != me.rank]


def start_receive(y: Tensor, source: int | None, tag: int = 0) -> dist.Work:
    if source is None:  # torch's blocking recv would raise if the message is the rank's own
        return dist.group.WORLD.recv_anysource([y], tag)
    return dist.irecv(y, source, tag=tag)


def ring(me: RankContext) -> None:
    """Send every size around a ring; even ranks send first. Once a small send has returned, its
    tensor may be overwritten, although nobody receives yet."""
    to, source = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    for count in COUNTS:
        x, y, is_small = of(me.rank, count), torch.full((count,), -1.0), count < 2000
        if is_small or me.rank % 2 == 0:
            dist.send(x, to)
            x.fill_(-9)
        if is_small:
            dist.barrier()
        assert dist.recv(y, source) == source
        if not is_small and me.rank % 2 == 1:
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
    sends, receives = [], []
    for other in peers_of(me):
        for tag in (LARGEST, 1):
            for n in range(3):
                sends.append(dist.isend(of(me.rank, 200_000 * n + 5, tag), other, tag=tag))
    for other in reversed(peers_of(me)):
        for tag in (1, LARGEST):
            for n in range(3):
                out = torch.zeros(200_000 * n + 5)
                work = dist.irecv(out, other, tag=tag)
                receives.append((work, out, of(other, 200_000 * n + 5, tag)))
    for work, out, wanted in reversed(receives):
        work.wait()
        assert_same([out], [wanted])
    for work in reversed(sends):
        work.wait()


def from_any_source(me: RankContext) -> None:
    """Of peers and of the rank itself, beside a receive that was posted long before, and whose
    message came before the others."""
    last = me.world - 1
    for count in (50, 300_001):
        sends = [dist.isend(of(last, 5), 0, tag=9)] if me.rank == last else []
        sends += [dist.isend(of(me.rank, count), 0, tag=LARGEST - count) for _ in range(10)]
        if me.rank == 0:
            work, sources = dist.irecv(special := torch.zeros(5), last, tag=9), []
            for _ in range(10 * me.world):
                (received := start_receive(x := torch.zeros(count), None, LARGEST - count)).wait()
                sources.append(received._source_rank())
                assert_same([x], [of(sources[-1], count)])
            assert sorted(sources) == sorted(10 * [*range(me.world)])
            work.wait()
            assert_same([special], [of(last, 5)])
        for send in sends:
            send.wait()


def batch(me: RankContext) -> None:
    for count, peers in itertools.product((4, 200_000), [peers_of(me), *[[me.rank]] * OURS]):
        outs = {peer: torch.zeros(count) for peer in peers}
        ops = [dist.P2POp(dist.isend, of(me.rank, count, peer), peer) for peer in peers]
        ops += [dist.P2POp(dist.irecv, y, peer) for peer, y in outs.items()]
        for work in dist.batch_isend_irecv(ops[::-1] if me.rank % 2 else ops):
            work.wait()
        for peer, y in outs.items():
            assert_same([y], [of(peer, count, me.rank)], (count, peer))
    dist.barrier()  # runs at once, because the batch has ended its coalescing


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
    """Messages complete without any call of wait(): is_completed() becomes true, and futures do.

    A wait that ends before names its message.
    """
    late = dist.irecv(torch.zeros(4), me.rank, tag=9)
    words = rf"recv #\d+ from rank {me.rank}.* with tag 9 on \[4\] float32 has not finished within"
    with pytest.raises(pc.Timeout, match=words):
        late.wait(datetime.timedelta(milliseconds=20))
    dist.isend(torch.ones(4), me.rank, tag=9).wait()
    late.wait()
    count, outs, works = 300_000, {peer: torch.zeros(300_000) for peer in peers_of(me)}, []
    for peer, out in outs.items():
        works += [dist.isend(of(me.rank, count), peer), dist.irecv(out, peer)]
    limit = time.monotonic() + 10
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < limit, [work.is_completed() for work in works]
        time.sleep(0.001)
    for peer, out in outs.items():
        assert_same([out], [of(peer, count)])
        received, sent = dist.irecv(out, peer), dist.isend(of(me.rank, count, 1), peer)
        assert_same(received.get_future().wait(), [of(peer, count, 1)])
        sent.get_future().wait()


def to_itself(me: RankContext) -> None:
    """Send or receive first, strided at either end, from the rank or any source."""
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


def message_flood(me: RankContext) -> None:
    """Send far more messages than any queue holds before the first receive; no Work is kept."""
    if me.rank == 0:
        for n in range(MANY):
            dist.isend(torch.full((n % 300,), float(n)), 1, tag=n % 7)
    elif me.rank == 1:
        me.be_late(0.2)
        for tag in range(7):
            for n in range(tag, MANY, 7):
                x = torch.zeros(n % 300)
                dist.recv(x, 0, tag=tag)
                assert x.eq(n).all(), n
    dist.barrier()


ALSO_ALONE = (all_pairs, batch, polled, to_itself)
JOBS = (ring, from_any_source, dtypes, in_a_subgroup)
JOBS += (messages_past_collectives, collectives_past_messages)
GLOO_LACKS = {
    dtypes: "has no int16 among its dtypes",
    **dict.fromkeys((ring, message_flood), "sends when the other rank receives"),
    polled: "makes no progress unless a thread waits",
    **dict.fromkeys((to_itself, from_any_source), "does not connect a rank to itself"),
}
IN_WORLDS = [(1, job) for job in ALSO_ALONE]
IN_WORLDS += [(world, job) for world in (2, 4) for job in (*ALSO_ALONE, *JOBS)]


@pytest.mark.parametrize(("world", "job"), IN_WORLDS)
def test_messages(pools, world, job):
    if not OURS and (world == 1 or job in GLOO_LACKS):
        pytest.skip(f"{BACKEND} {GLOO_LACKS.get(job, GLOO_LACKS[to_itself])}")
    pools(world).run(job, seconds=40)


@pytest.mark.parametrize("job", [both_ways, pytest.param(message_flood, marks=quick_on_hosts)])
def test_messages_between_two_ranks(pools, job):
    if not OURS and job in GLOO_LACKS:
        pytest.skip(f"{BACKEND} {GLOO_LACKS[job]}")
    pools(2).run(job)


# --- errors ---------------------------------------------------------------------------------------


def mismatched(me: RankContext, sent: Tensor, out: Tensor, to_itself: bool) -> list[Caught]:
    """A message of rank 0 to rank 1, or of each rank to itself; the next one arrives."""
    to, source = (me.rank, me.rank) if to_itself else (1, 0)
    before, good = out.clone(), torch.zeros(4)

    def exchange(x: Tensor, y: Tensor) -> list[Caught]:
        works = [dist.isend(x, to, tag=7)] if me.rank == source else []
        works += [dist.irecv(y, source, tag=7)] if me.rank == to else []
        return [caught(work.wait) for work in works]

    errors = exchange(sent, out)
    assert torch.equal(out, before)
    dist.all_reduce(torch.ones(3))
    assert not any(error.kind for error in exchange(torch.arange(4.0), good))
    assert good.tolist() == [0, 1, 2, 3] or me.rank != to
    return errors


MISMATCHES = {
    "smaller": (torch.ones(8), torch.zeros(7)),
    "much smaller": (torch.ones(400_000), torch.zeros(3)),
    "dtype": (torch.ones(8), torch.zeros(8, dtype=torch.int32)),
    "moved dtype": (torch.ones(8, dtype=torch.uint16), torch.zeros(8, dtype=torch.bfloat16)),
    "moved dtypes": (
        torch.ones(600_000, dtype=torch.float8_e8m0fnu),
        torch.zeros(600_000, dtype=torch.float8_e4m3fnuz),
    ),
    "empty": (torch.ones(8), torch.zeros(0)),
    "larger": (torch.ones(8), torch.zeros(9)),
    "from empty": (torch.ones(0), torch.zeros(3)),
}


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} breaks the connection, or ignores the dtypes")
@pytest.mark.parametrize("to_itself", [False, True])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_messages_raise(pools, kind, to_itself):
    sent, out = MISMATCHES[kind]
    found = pools(2).run(mismatched, sent, out, to_itself)
    (sender, *_), (*_, receiver) = found[0], found[0 if to_itself else 1]
    assert receiver.kind == "ValueError", receiver
    assert "rank 0 " in receiver.text, receiver
    large = sent.numel() > 1000
    assert sender.kind == "ValueError" or (not sender.kind and not large), sender
    for x in (sent, out):
        word = short(x.dtype) if "dtype" in kind else f"{x.numel() * x.element_size()} bytes"
        assert word in receiver.text, receiver


def wrong_peers(me: RankContext) -> list[Caught]:
    return [
        caught(dist.send, torch.ones(2), me.world),
        caught(dist.recv, torch.ones(2), me.world),
        caught(dist.send, torch.ones(2), me.rank),
        caught(dist.recv, torch.zeros(1).expand(3), (me.rank + 1) % me.world),
        caught(dist.recv, torch.ones(2), (me.rank + 1) % me.world, tag=-1),
        caught(dist.isend, torch.ones(2), me.rank, tag=-1),
        caught(dist.irecv, torch.zeros(1).expand(3), me.rank),
    ]


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} accepts some of them")
def test_invalid_messages_raise(pools):
    for errors in pools(2).run(wrong_peers):
        assert all("ValueError" in e.kinds for e in errors), errors


def unmatched(me: RankContext, how: str) -> Caught:
    if me.rank != 0:
        time.sleep(1.5)  # so that the timeout of rank 0 expires first
        return caught(dist.barrier)
    if how == "irecv":
        return caught(dist.irecv(torch.zeros(3), 0).wait)
    if how == "irecv from any source":
        return caught(start_receive(torch.zeros(3), None).wait)
    return caught(dist.isend(torch.zeros(3_000_000), 0).wait)


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} {GLOO_LACKS[to_itself]}")
def test_unmatched_messages_to_itself_time_out():
    def check(key: tuple[str, int], pool: JobPool) -> None:
        absent = 1 if key == ("irecv from any source", 2) else 0
        for error in pool.results():
            assert error.kind == "Timeout", error
            assert f"rank {absent} did not arrive" in error.text

    hows = ("irecv", "irecv from any source", "isend")
    check_side_by_side(
        (((h, w), Spec(w, timeout=1.0), unmatched, (h,)) for h in hows for w in (1, 2)), check
    )
