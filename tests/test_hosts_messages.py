"""send and recv in groups over several hosts: any source, the end of a peer, and idle groups.

The tests of messages within a host run over hosts, too.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
import torch.distributed as dist
from devices import Emulated
from dist_pool import OURS, Caught, Outcome, RankContext, Spec, caught, check_side_by_side
from faults import NOTICE_SECONDS, publish, wait_published
from sites import PROCESSES, only_on

pytestmark = [
    pytest.mark.skipif(not OURS, reason="PYCOLLECT_HOST is pycollect's"),
    only_on(PROCESSES, "names its own hosts"),
]

ROUNDS = 20  # of each tag
SIZES = (2, 100_000, 200_000)  # elements, by tag: eager, eager, and past the rings


def send_all(me: RankContext) -> None:
    random_, works, counts = random.Random(me.rank), [], dict.fromkeys(range(len(SIZES)), 0)
    while counts:
        tag = random_.choice(list(counts))
        x = torch.full((SIZES[tag],), float(counts[tag]))
        works.append(dist.isend(x, 0, tag=tag))
        counts[tag] += 1
        if counts[tag] == 3 * ROUNDS:
            del counts[tag]
    for work in works:
        work.wait()


def receive_all(me: RankContext) -> list[str]:
    """In each round, a receive from any rank, one from each rank, and one from any rank. A tag's
    messages of one sender arrive once each, in the order in which their receives were posted."""
    senders = range(1, me.world)
    sources = [s for _ in range(ROUNDS) for s in (None, *senders, None)]
    sources += [None] * (3 * ROUNDS * len(senders) - len(sources))
    posted: list[tuple[int, int | None, Any, torch.Tensor]] = []
    for source, tag in itertools.product(sources, range(len(SIZES))):
        x = torch.full((SIZES[tag],), -1.0)
        if source is None:
            work = dist.group.WORLD.recv_anysource([x], tag)
        else:
            work = dist.irecv(x, source, tag=tag)
        posted.append((tag, source, work, x))
    expected = {(tag, source): 0 for tag in range(len(SIZES)) for source in senders}
    wrong = []
    for tag, source, work, x in posted:
        work.wait()
        sender = work._source_rank()
        number = expected[tag, sender]
        expected[tag, sender] += 1
        if source not in (None, sender) or not torch.equal(x, torch.full_like(x, number)):
            wrong.append(f"tag {tag} from {source}: {number} of {sender}: {x[:3]}")
    return wrong + [f"{key}: {n}" for key, n in expected.items() if n != 3 * ROUNDS]


def mixed_receives(me: RankContext) -> list[str]:
    if me.rank == 0:
        return receive_all(me)
    send_all(me)
    return []


@pytest.mark.parametrize("placement", ["aab", "abc", "abab"])
def test_messages_match_receives_in_the_order_of_posting(pools, placement):
    pool = pools(len(placement), placement=placement)
    assert pool.run(mixed_receives, seconds=60) == [[]] * len(placement)


def from_and_to(me: RankContext, on_host: list[bool], count: int) -> list[int]:
    """Both ranks send at the same time, from and to host memory or an emulated device's."""
    site = Emulated("eager")
    group = dist.new_group(pg_options=site.options)
    place = site.host if on_host[me.rank] else lambda x: x
    wrong = []
    for turn in range(3):
        mine = place(torch.arange(float(count)) + me.rank + turn)
        theirs = place(torch.zeros(count))
        sent = dist.isend(mine, 1 - me.rank, group)
        dist.recv(theirs, 1 - me.rank, group)
        sent.wait()
        site.synchronize()
        if not torch.equal(theirs, torch.arange(float(count)) + 1 - me.rank + turn):
            wrong.append(turn)
    dist.destroy_process_group(group)
    return wrong


@pytest.mark.parametrize("on_host", [[True, True], [True, False], [False, False]])
def test_large_messages_between_host_and_device_memory(pools, on_host):
    """Between host memories, the data does not go through the rings."""
    for count in (40_000, 3_000_000):
        assert pools(2, placement="ab").run(from_and_to, on_host, count) == [[], []]


def small_against_large(me: RankContext) -> list[int]:
    """Small messages one way and eager ones of 512 KiB the other way, at the same time."""
    wrong = []
    for turn in range(60):
        few, many = 4 << turn % 3, 50 << turn % 4
        is_first = me.rank == 0
        sizes = (131_072, 1) if is_first else (1, 131_072)
        counts = (few, many) if is_first else (many, few)
        found = [torch.zeros(sizes[0]) for _ in range(counts[0])]
        works = [dist.irecv(x, 1 - me.rank) for x in found]
        for n in range(counts[1]):
            works.append(dist.isend(torch.full((sizes[1],), float(n)), 1 - me.rank))
            works[0].is_completed()  # moves messages
        for work in works:
            work.wait()
        wrong += [turn for n, x in enumerate(found) if x[-1] != n]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("crowd", [0, 3])
def test_bursts_in_both_directions_end(pools, crowd):
    """With other processes on the cores, too, so that packets and answers are late."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(crowd)]
    try:
        for _ in range(3):
            assert pools(2, placement="ab").run(small_against_large, seconds=60) == [[], []]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def unexpected_before_expected(me: RankContext, count: int) -> None:
    """Rank 0 sends rank 1 more than a ring holds, and then what rank 1 depends on."""
    x = torch.ones(100_000)
    if me.rank == 0:
        for _ in range(count):
            dist.send(x, 1)
        dist.send(x, 2)
    elif me.rank == 2:
        dist.recv(x, 0)
        dist.send(x, 1)
    else:
        dist.recv(x, 2)
        for _ in range(count):
            dist.recv(x, 0)


def test_messages_of_a_rank_with_no_receive_are_kept(pools):
    pools(3, placement="abc").run(unexpected_before_expected, 14, seconds=20)


def receive_and_leave(me: RankContext) -> None:
    for _ in range(30):
        group = dist.new_group()
        x = torch.ones(200_000)
        if me.rank == 0:
            dist.send(x, 1, group)
        else:
            dist.recv(x.zero_(), 0, group)
            assert bool(x.all())
        dist.destroy_process_group(group)


def test_a_rank_that_leaves_with_its_message_fails_no_sender(pools):
    pools(2, placement="ab").run(receive_and_leave, seconds=60)


def last_messages(me: RankContext) -> list[float]:
    """Rank 1 leaves after eager sends, and then its peer begins to receive."""
    x, found = torch.zeros(2000), []
    dist.barrier()
    if me.rank == 1:
        for n in range(8):
            dist.send(x.fill_(n), 0)
    if me.rank == 0:
        wait_published(me, "left", range(1, me.world))
        for source in (1, None) * 4:
            dist.recv(x, source)
            found.append(x[-1].item())
    dist.destroy_process_group()
    publish(me, "left")
    return found


def last_messages_of_a_dead_rank(me: RankContext) -> list[float]:
    """Rank 1 is killed after its sends, and then its peer, whose group is aborted, receives."""
    x, large, found = torch.zeros(2000), torch.zeros(2_000_000), []
    works = [dist.irecv(torch.zeros_like(large), 1, tag=7) for _ in range(2)]
    dist.barrier()
    if me.rank == 1:
        for n in range(8):
            dist.send(large.fill_(n) if n < 2 else x.fill_(n), 0, tag=7 * (n < 2))
        wait_published(me, "arrived", [0])
        publish(me, "death")
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 0:
        time.sleep(0.5)  # longer than the first message of a pair takes
        publish(me, "arrived")
        wait_published(me, "death", [1])
        time.sleep(NOTICE_SECONDS)
        for work in works:
            work.wait()
            found.append(work.result()[0][-1].item())
        for source in (1, None) * 3:
            dist.recv(x, source)
            found.append(x[-1].item())
        assert caught(dist.recv, x, 1).kind == caught(dist.recv, x, None).kind == "PeerLost"
        assert caught(dist.barrier).kind == "PeerLost"
    return found


def last_packets_of_a_dead_rank(me: RankContext) -> list[float]:
    """Rank 0 is stopped while two packets of messages and the end of their sender arrive."""
    x, found, pids = torch.zeros(2000), [], [0] * 3
    dist.all_gather_object(pids, os.getpid())
    if me.rank == 1:
        dist.send(x, 0)
        wait_published(me, "ready", [0])
        time.sleep(0.1)
        for n in range(2):
            dist.send(x.fill_(n), 0)
        time.sleep(0.5)  # a dead rank's messages arrive if they have left its process
        publish(me, "sent")
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 2:
        wait_published(me, "sent", [1])
        time.sleep(0.3)
        os.kill(pids[0], signal.SIGCONT)
    if me.rank == 0:
        dist.recv(x, 1)
        publish(me, "ready")
        os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(2):
            dist.recv(x, 1)
            found.append(x[-1].item())
    return found


def from_a_leaver(me: RankContext, source: int | None) -> tuple[Caught, float]:
    x = torch.zeros(3)
    dist.barrier()
    if me.rank == 1:
        dist.send(x, 0)
        time.sleep(0.5)
        dist.destroy_process_group()
        return caught(print), 0.0
    dist.recv(x, source)
    begin = time.monotonic()
    error = caught(dist.recv, x, source)
    return error, error.when - begin


def from_those_that_remain(me: RankContext) -> int | None:
    """A receive from any rank waits for those that are there."""
    x = torch.zeros(3)
    dist.barrier()
    if me.rank == 1:
        time.sleep(1.5)
        dist.send(x, 0)
    return dist.recv(x, None) if me.rank == 0 else dist.destroy_process_group()


def unanswered(me: RankContext) -> Caught:
    return caught(time.sleep, 2.0) if me.rank else caught(dist.recv, torch.zeros(3), None)


def idle(me: RankContext) -> float:
    """Return the processor's seconds of one second without messages."""
    x = torch.zeros(100_000)
    for source in ((me.rank - 1) % me.world, None):
        work = dist.isend(x, (me.rank + 1) % me.world)
        dist.recv(torch.zeros_like(x), source)
        work.wait()
    dist.barrier()
    time.sleep(0.3)  # the threads of the group fall asleep
    begin = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1.0)
    end = resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


def arrived(count: int, outcomes: list[Outcome]) -> None:
    """Messages that have arrived outlive their sender."""
    assert outcomes[0].value == [*range(count)], outcomes[0].error


def raised_at_once(outcomes: list[Outcome]) -> None:
    error, seconds = outcomes[0].value
    assert error.kinds[0] == "PeerLost", error
    assert "rank 1 on host b" in error.text, error
    assert seconds < 0.5 + NOTICE_SECONDS


def received_from_rank_1(outcomes: list[Outcome]) -> None:
    assert outcomes[0].value == 1, outcomes


def timed_out_with_all_ranks(outcomes: list[Outcome]) -> None:
    assert "Timeout" in outcomes[0].value.kinds, outcomes
    assert "ranks 1-3 did not arrive" in outcomes[0].value.text, outcomes


def used_no_processor(outcomes: list[Outcome]) -> None:
    assert max(outcome.value for outcome in outcomes) < 0.1, outcomes


two, eight = functools.partial(arrived, 2), functools.partial(arrived, 8)
# Jobs that mostly wait: the job, its other arguments, the placement, and the check of its outcomes.
WAITING: list[tuple[Callable[..., object], tuple[Any, ...], str, Callable[..., None]]] = [
    (idle, (), "abc", used_no_processor),
    (unanswered, (), "aabc", timed_out_with_all_ranks),
    (last_packets_of_a_dead_rank, (), "abc", two),
    *((last_messages, (), p, eight) for p in ("ab", "abb")),
    *((last_messages_of_a_dead_rank, (), p, eight) for p in ("aa", "ab", "abb")),
    *((from_a_leaver, (source,), "ab", raised_at_once) for source in (1, None)),
    *((from_those_that_remain, (), p, received_from_rank_1) for p in ("abc", "aab", "aba")),
]


def test_receives_when_a_rank_ends_or_sends_nothing():
    check_side_by_side(
        (
            (
                run,
                Spec(len(run[2]), placement=run[2], timeout=1.0 if run[0] is unanswered else 60.0),
                *run[:2],
            )
            for run in WAITING
        ),
        lambda run, pool: run[3](pool.collect_outcomes()),
    )


# The ranks are children of multiprocessing. Rank 1 ends right after its send, and then rank 0
# begins to receive.
CHILDREN = """
import multiprocessing, os, sys, time, torch, torch.distributed as dist

def run(rank, store, ended):
    os.environ["PYCOLLECT_HOST"] = "ab"[rank]
    import pycollect
    dist.init_process_group("pycollect", init_method="file://" + store, rank=rank, world_size=2)
    x = torch.full((100,), 7.0)
    dist.barrier()
    if rank == 1:
        return dist.send(x, 0)
    ended.wait()
    time.sleep(0.3)
    dist.recv(x.zero_(), 1)
    print("received", x[0].item(), flush=True)

context = multiprocessing.get_context(sys.argv[2])
if __name__ == "__main__":
    ended = context.Event()
    ranks = [context.Process(target=run, args=(r, sys.argv[1], ended)) for r in range(2)]
    for rank in ranks:
        rank.start()
    ranks[1].join()
    ended.set()
    ranks[0].join()
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_message_of_a_child_that_ends_arrives(tmp_path, start):
    program = tmp_path / "program.py"
    program.write_text(CHILDREN)
    ran = programs.run([sys.executable, program, tmp_path / "store", start], timeout=60)
    assert ran.stdout == "received 7.0\n", ran.stderr
