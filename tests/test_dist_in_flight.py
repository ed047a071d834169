"""Calls in flight when their group is destroyed or aborted: every Work raises, nothing leaks.

torch gives a future no timeout, so a future that never completes is a hang forever.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Pool, RankContext, backend_of, caught, fresh, started_jobs
from dist_resources import open_resources
from dist_waits import NOTICE_SECONDS, publish, wait_published

pytestmark = pytest.mark.skipif(not OURS, reason="messages have no futures, or hang")
GRACE = 5.0  # shutdown timeout: seconds that destroying a group waits for calls in flight
ENDED = GRACE + 2.0  # the same, with a margin for a loaded machine


def error_of_future(future: Any, seconds: float) -> Caught:
    """Wait for a future and return its exception; kind "hangs" if it does not complete in time."""
    limit = time.monotonic() + seconds
    while not future.done():
        if time.monotonic() > limit:
            return Caught(("hangs",), "", limit)
        time.sleep(0.01)
    return caught(future.wait)


def messages(group: dist.ProcessGroup, rank: int) -> list[tuple[str, dist.Work]]:
    """Start messages that the other rank never answers: it neither receives nor sends."""
    other = 1 - rank
    return [
        ("irecv", dist.irecv(torch.zeros(3), other, group=group)),
        ("large irecv", dist.irecv(torch.zeros(3_000_000), other, group=group, tag=1)),
        ("irecv from any source", group.recv_anysource([torch.zeros(3)], 2)),
        ("strided irecv", dist.irecv(torch.zeros(6)[::2], other, group=group, tag=3)),
        ("isend", dist.isend(torch.zeros(3_000_000), other, group=group, tag=4)),
    ]


def collectives(group: dist.ProcessGroup) -> list[tuple[str, dist.Work]]:
    """Start collectives that the other rank does not join."""
    return [
        ("all_reduce", dist.all_reduce(torch.zeros(3), group=group, async_op=True)),
        ("another", dist.all_reduce(torch.zeros(3), group=group, async_op=True)),
    ]


def futures_that_nobody_waits_for(me: RankContext) -> list[str]:
    """Of messages, also while the thread that completes them is idle, and of a call behind a
    synchronous call of another thread."""
    kinds = []
    for _ in range(2):
        dist.barrier()
        received = dist.irecv(torch.zeros(3), 1 - me.rank).get_future()
        time.sleep(0.3)
        sent = dist.isend(torch.ones(3), 1 - me.rank).get_future()
        kinds += [error_of_future(future, 10).kind for future in (received, sent)]
        time.sleep(0.3 + 0.3 * me.rank)
        other = threading.Thread(target=dist.all_reduce, args=(torch.ones(3),))
        other.start()
        time.sleep(0.1)
        called = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        kinds.append(error_of_future(called, 10).kind)
        other.join()
    return kinds


def test_futures_complete_without_a_wait():
    with fresh(2) as pool:
        assert pool.run(futures_that_nobody_waits_for) == [[""] * 6] * 2


Errors = dict[str, Caught]


def wrong_errors(found: Errors) -> Errors:
    """The ends that are wrong: a hang, no error, or an error of another type than CollectiveError
    (except from `then`, which loses the type)."""
    return {
        name: error
        for name, error in found.items()
        if error.kind in ("", "hangs")
        or ("CollectiveError" not in error.kinds and "then" not in name)
    }


def destroyed(me: RankContext, what: str) -> tuple[Errors, dict[str, int], dict[str, int]]:
    """Rank 0 destroys a group with many calls in flight; rank 1 keeps it."""
    before = open_resources()
    group = dist.new_group([0, 1])
    found: Errors = {}
    if me.rank == 0:
        works = messages(group, me.rank) if what != "collectives" else []
        works += collectives(group) if what != "messages" else []
        futures = [(name, work.get_future()) for name, work in works]
        futures += [(f"{name}, then", f.then(lambda f: f.value())) for name, f in futures]
        waiting = dict(messages(group, me.rank) + collectives(group)) if what == "awaited" else {}
        threads = [
            threading.Thread(target=lambda n=n, w=w: found.update({n: caught(w.wait)}))
            for n, w in waiting.items()
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        start = time.monotonic()
        dist.destroy_process_group(group)
        found |= {f"future of {name}": error_of_future(f, 1.0) for name, f in futures}
        for thread in threads:
            thread.join(max(0.1, start + ENDED - time.monotonic()))
        found |= {name: Caught(("hangs",), "", 0.0) for name in waiting.keys() - found.keys()}
        assert time.monotonic() - start < ENDED
        del works, futures, waiting, threads
    dist.barrier()
    if me.rank == 1:
        dist.destroy_process_group(group)
    del group
    return found, before, open_resources()


def peer_lost(me: RankContext, how: str) -> tuple[Errors, float]:
    """Rank 1 dies, leaves or aborts while calls are in flight and no thread waits for them."""
    dist.barrier()
    works = messages(dist.group.WORLD, me.rank)
    works += collectives(dist.group.WORLD) if me.rank == 0 else []
    futures = [(name, work.get_future()) for name, work in works]
    time.sleep(0.3)  # until the group's threads no longer spin
    if me.rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 1 and how == "leaves":
        dist.destroy_process_group()
    if me.rank == 1 and how == "aborts":
        backend_of().abort()
    start = time.monotonic()
    found = {name: error_of_future(future, ENDED) for name, future in futures}
    took = time.monotonic() - start
    if me.rank == 0 or how == "aborts":
        dist.destroy_process_group()
    return found, took


def set_short_timeout() -> None:
    """Set a short timeout, but only after a barrier: start-up may take longer than the timeout."""
    dist.barrier()
    backend_of().set_timeout(datetime.timedelta(seconds=1.5))


def unanswered_messages(me: RankContext) -> tuple[Errors, float]:
    """Futures of messages that the other, living rank never sends."""
    set_short_timeout()
    start = time.monotonic()
    futures = [(n, w.get_future()) for n, w in messages(dist.group.WORLD, me.rank)[me.rank :]]
    return {
        name: error_of_future(future, ENDED) for name, future in futures
    }, time.monotonic() - start


def test_a_future_times_out():
    """A future times out, like wait(), after the group's timeout."""
    with fresh(2) as pool:
        for found, took in pool.run(unanswered_messages):
            assert {error.kind for error in found.values()} == {"Timeout"}, found
            assert 1.0 < took < ENDED


def receive_times_out(me: RankContext, how: str) -> list[Caught]:
    """A receive times out; return its error, and that of the next collective on each rank."""
    set_short_timeout() if how != "limited" else dist.barrier()
    x, raised = torch.zeros(3), Caught((), "", 0.0)
    if me.rank == 0:
        work = dist.irecv(x, 1)
        if how == "future":
            raised = error_of_future(work.get_future(), ENDED)
        else:
            raised = caught(work.wait, *([datetime.timedelta(seconds=0.3)] * (how == "limited")))
    else:
        backend_of().set_timeout(datetime.timedelta(seconds=60))  # only rank 0 times out
    after = caught(dist.all_reduce, torch.ones(3))
    if not after.kind:  # the group is healthy, and the receive is still posted
        work.wait() if me.rank == 0 else dist.send(torch.ones(3), 0)
        assert x.tolist() == [1.0 - me.rank] * 3
    return [raised, after]


@pytest.mark.parametrize("how", ["wait", "future", "limited"])
def test_the_timeout_of_a_message_is_that_of_its_group(how):
    """The group's timeout aborts the group, in wait() or a future; that of one wait does not."""
    with fresh(2) as pool:
        (raised, after), (_, others) = pool.run(receive_times_out, how)
        assert raised.kind == "Timeout", raised
        assert "rank 1" in raised.text or how == "future", raised
        for error in (after, others):
            assert ("CollectiveError" in error.kinds) == (how != "limited"), error


def stalled_send(me: RankContext, how: str) -> tuple[Errors, float]:
    """A message that is still on its device does not hide failures of other messages."""
    found, took = Errors(), 0.0
    set_short_timeout()
    if me.rank == 0:
        me.fake.stall(me.site.stream)
        works = [("isend", dist.isend(torch.ones(3), 2)), ("irecv", dist.irecv(torch.ones(3), 1))]
        futures = [(name, work.get_future()) for name, work in works]
        start = time.monotonic()
        if how == "late":
            found["wait"] = caught(works[0][1].wait)
        found |= {name: error_of_future(future, ENDED) for name, future in futures}
        took = time.monotonic() - start
    elif me.rank == 1 and how == "dies":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return found, took


@pytest.mark.parametrize("how", ["dies", "late"])
def test_a_stalled_send_hides_no_other_failure(how):
    with fresh(3, site="late") as pool:
        found, took = pool.outcomes(stalled_send, how, seconds=40)[0].value
        assert not wrong_errors(found)
        assert took < 1.5 + NOTICE_SECONDS + 1.0


def future_beside_a_wait(me: RankContext, how: str) -> Caught | None:
    """A future of one message, while a thread waits for another."""
    if me.rank == 0:
        set_short_timeout()
        future = dist.irecv(torch.zeros(3), 1).get_future()
        backend_of().set_timeout(datetime.timedelta(seconds=60))
        waits = threading.Thread(target=caught, args=(dist.recv, torch.zeros(3), 2))
        waits.start()
        error = error_of_future(future, 1.5 + NOTICE_SECONDS)
        publish(me, "done")
        backend_of().abort()
        waits.join()
        return error
    dist.barrier()
    if me.rank == 1 and how == "dies":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return wait_published(me, "done", [0]) and None  # the other ranks see no error


@pytest.mark.parametrize(("how", "kind"), [("dies", "PeerLost"), ("late", "Timeout")])
def test_a_future_while_a_thread_waits_for_another_message(how, kind):
    with fresh(3) as pool:
        error = pool.outcomes(future_beside_a_wait, how, seconds=40)[0].value
    assert error.kind == kind, error


def raised(future: Any) -> None:
    raise RuntimeError("made up, in a callback")


def called_back(me: RankContext) -> list[Caught]:
    """Callbacks that raise, and one that destroys the group from the group's own thread."""
    group = dist.new_group([0, 1])
    found = []
    if me.rank == 0:
        ended = threading.Event()
        works = [dist.irecv(torch.zeros(3), 1, group=group, tag=n) for n in range(3)]
        futures = [work.get_future() for work in works]
        futures[0].add_done_callback(raised)
        found = [futures[0].then(raised)]
        found += [futures[1].then(lambda f: dist.destroy_process_group(group) or ended.set())]
        found += [futures[1], futures[2]]
    dist.barrier()
    if me.rank == 1:
        for n in range(2):
            dist.send(torch.ones(3), 0, group=group, tag=n)
    outcomes = [error_of_future(future, ENDED) for future in found]
    assert me.rank == 1 or ended.is_set()
    dist.barrier()
    if me.rank == 1:
        dist.destroy_process_group(group)
    return outcomes


# --- jobs that wait for the shutdown timeout: started with the first test, checked here -----------

LONG = {
    **{what: (destroyed, what) for what in ("messages", "collectives", "both", "awaited")},
    **{how: (peer_lost, how) for how in ("dies", "leaves", "aborts")},
    "callbacks": (called_back,),
}


@pytest.fixture(scope="module", autouse=True)
def slow_jobs() -> Iterator[dict[str, Pool]]:
    yield from started_jobs(LONG, 2)


@pytest.mark.parametrize(
    ("what", "ended"), [("messages", 10), ("collectives", 4), ("both", 14), ("awaited", 21)]
)
def test_destroy_fails_all_calls_in_flight(slow_jobs, what, ended):
    """Futures, chained futures and waiting threads all end with an error, and nothing leaks."""
    outcomes = slow_jobs[what].results(2 * ENDED)
    for found, before, after in outcomes:
        assert not wrong_errors(found)
        assert {**after, "threads": 0} == {**before, "threads": 0}
    assert len(outcomes[0][0]) == ended


@pytest.mark.parametrize("how", ["dies", "leaves", "aborts"])
def test_calls_in_flight_fail_when_their_group_breaks(slow_jobs, how):
    for rank, outcome in enumerate(slow_jobs[how].collect_outcomes(40)):
        if outcome.died:
            continue
        found, took = outcome.value
        assert not wrong_errors(found)
        assert took < (NOTICE_SECONDS + 1.0 if how != "leaves" else ENDED), (rank, took)


def test_callbacks_that_raise_or_destroy_the_group(slow_jobs):
    (raises, destroying, message, pending), _ = slow_jobs["callbacks"].results(2 * ENDED)
    assert "made up" in raises.text
    assert not destroying.kind, destroying
    assert not message.kind, message
    assert "CollectiveError" in pending.kinds, pending
