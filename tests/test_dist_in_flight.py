"""Calls in flight when their group is destroyed or aborted: every Work raises, nothing leaks.

torch gives a future no timeout, so a future that never completes is a hang forever.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Pool, RankContext, caught, fresh, started_jobs
from dist_resources import open_resources
from faults import ENDED, Fault, error_of_future, in_flight, publish, wait_published

pytestmark = pytest.mark.skipif(not OURS, reason="messages have no futures, or hang")


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


def destroyed(me: RankContext) -> tuple[Errors, dict[str, int], dict[str, int]]:
    """Rank 0 destroys the group with many calls in flight; rank 1 keeps it."""
    me.init("first")  # makes what a process makes once
    dist.barrier()
    dist.destroy_process_group()
    before, found = open_resources(), Errors()
    me.init("second")
    if me.rank == 0:
        calls = Fault("leaves", when="in flight")
        futures = [(name, work.get_future()) for name, work in in_flight(me, calls)]
        futures += [(f"{name}, then", f.then(lambda f: f.value())) for name, f in futures]
        waiting = dict(in_flight(me, calls))
        threads = [
            threading.Thread(target=lambda n=n, w=w: found.update({n: caught(w.wait)}))
            for n, w in waiting.items()
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        start = time.monotonic()
        dist.destroy_process_group()
        found |= {f"future of {name}": error_of_future(f, 1.0) for name, f in futures}
        for thread in threads:
            thread.join(max(0.1, start + ENDED - time.monotonic()))
        found |= {name: Caught(("hangs",), "", 0.0) for name in waiting.keys() - found.keys()}
        assert time.monotonic() - start < ENDED
        del futures, waiting, threads
        publish(me, "destroyed")
    else:
        wait_published(me, "destroyed", [0])
        dist.destroy_process_group()
    return found, before, open_resources()


def one_wait_times_out(me: RankContext) -> Caught:
    """A wait for a message ends at its own limit; the receive stays posted, and ends later."""
    dist.barrier()
    x, raised = torch.zeros(3), Caught((), "", 0.0)
    if me.rank == 0:
        work = dist.irecv(x, 1)
        raised = caught(work.wait, datetime.timedelta(seconds=0.3))
    dist.all_reduce(torch.ones(3))  # the group is healthy
    work.wait() if me.rank == 0 else dist.send(torch.ones(3), 0)
    assert x.tolist() == [1.0 - me.rank] * 3
    return raised


def test_the_timeout_of_one_wait_does_not_abort_the_group():
    """That of the group does (faults.py)."""
    with fresh(2) as pool:
        raised, _ = pool.run(one_wait_times_out)
        assert raised.kind == "Timeout", raised
        assert "rank 1" in raised.text, raised


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

LONG = {"calls": (destroyed,), "callbacks": (called_back,)}


@pytest.fixture(scope="module", autouse=True)
def slow_jobs() -> Iterator[dict[str, Pool]]:
    yield from started_jobs(LONG, 2, {"calls": {"group": False}})


def test_destroy_fails_all_calls_in_flight(slow_jobs):
    """Futures, chained futures and waiting threads all end with an error, and nothing leaks."""
    outcomes = slow_jobs["calls"].results(2 * ENDED)
    for found, before, after in outcomes:
        assert not wrong_errors(found)
        assert {**after, "threads": 0} == {**before, "threads": 0}
    assert len(outcomes[0][0]) == 21


def test_callbacks_that_raise_or_destroy_the_group(slow_jobs):
    (raises, destroying, message, pending), _ = slow_jobs["callbacks"].results(2 * ENDED)
    assert "made up" in raises.text
    assert not destroying.kind, destroying
    assert not message.kind, message
    assert "CollectiveError" in pending.kinds, pending
