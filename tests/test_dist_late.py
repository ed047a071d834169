"""A rank that is late, leaves, or never comes: waiting ranks raise after the group's timeout.

The error names the missing rank. Then the group refuses further work, also that of the late rank.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Caught, RankContext, backend_of, caught, fresh
from dist_waits import (
    ASLEEP,
    AT_ONCE,
    DESTROYED,
    FAULTY_RANK,
    NOTICE_SECONDS,
    PLACEMENTS,
    WAITS,
    after_failure,
    calls_before_failure,
    others,
    publish,
    wait_published,
)

pytestmark = pytest.mark.skipif(not OURS, reason=f"{BACKEND} has no type for this error, or hangs")
TIMEOUT = 0.5  # timeout of the group, in seconds


def peers_time_out(me: RankContext, wait: str) -> tuple[Caught, float, tuple]:
    """The faulty rank makes its call after all its peers have timed out."""
    calls_before_failure(me)
    backend_of().set_timeout(datetime.timedelta(seconds=TIMEOUT))
    dist.barrier()
    start = time.monotonic()
    if me.rank == FAULTY_RANK:
        wait_published(me, "raised", others(me))
    error = (
        caught(WAITS[wait][1]) if me.rank != FAULTY_RANK else caught(dist.all_reduce, torch.ones(3))
    )
    publish(me, "raised")
    return error, error.when - start, after_failure(me)


LATE_CALLS = [
    "all_reduce",
    "large all_reduce",
    "async all_reduce",
    "broadcast",
    "barrier",
    "recv",
    "send",
]


@pytest.mark.parametrize("wait", LATE_CALLS)
@pytest.mark.parametrize("placement", ["", *PLACEMENTS])
def test_a_late_rank_times_out(wait, placement):
    with fresh(3, placement=placement) as pool:
        found = pool.run(peers_time_out, wait)
    for rank, (error, seconds, (refusal, _, destroyed)) in enumerate(found):
        assert "CollectiveError" in error.kinds, error
        assert "CollectiveError" in refusal.kinds, refusal
        assert destroyed < DESTROYED
        if rank == FAULTY_RANK:
            continue  # raises at once, because the group is aborted
        assert error.kind in ("Timeout", "PeerLost"), error
        assert seconds < TIMEOUT + NOTICE_SECONDS, error
        assert f"rank {FAULTY_RANK}" in error.text, error
    waited = [(e, s) for e, s, _ in found if e.kind == "Timeout"]
    assert waited, found
    assert all(s > 0.8 * TIMEOUT for e, s in waited[:1])
    assert any(WAITS[wait][0] in e.text for e, _ in waited), waited


def peer_destroys_its_group(me: RankContext) -> Caught | None:
    calls_before_failure(me)
    if me.rank == FAULTY_RANK:
        time.sleep(0.3)
        dist.destroy_process_group()
        return None
    error = caught(dist.all_reduce, torch.ones(3))
    dist.destroy_process_group()
    return error


def test_a_rank_destroys_its_group():
    with fresh(3) as pool:
        start = time.monotonic()
        errors = pool.run(peer_destroys_its_group)
    for error in errors[:FAULTY_RANK] + errors[FAULTY_RANK + 1 :]:
        assert error.kind == "PeerLost", error
        assert f"rank {FAULTY_RANK}" in error.text, error
        assert error.when - start < 0.3 + NOTICE_SECONDS + 1


def aborted(me: RankContext) -> tuple[Caught, float]:
    """A second thread of rank 0 aborts the group."""
    calls_before_failure(me)
    start = time.monotonic()
    if me.rank == 0:
        threading.Timer(0.4, dist.group.WORLD.abort).start()
    if me.rank == FAULTY_RANK:
        time.sleep(1.2)
    error = caught(dist.all_reduce, torch.ones(3))
    caught(dist.destroy_process_group)
    return error, error.when - start


def test_abort():
    with fresh(3) as pool:
        found = pool.run(aborted)
    for error, seconds in found:
        assert "CollectiveError" in error.kinds, error
        assert seconds < 1.2 + AT_ONCE


def init_alone(me: RankContext) -> tuple[Caught, float]:
    """Rank 0 initialises alone: no peer joins the bootstrap."""
    start = time.monotonic()
    options = {"timeout": datetime.timedelta(seconds=1)}
    error = caught(me.init, "alone", **options) if me.rank == 0 else caught(time.sleep, 0)
    return error, error.when - start


def test_missing_ranks_in_the_bootstrap():
    with fresh(3, group=False) as pool:
        (error, seconds), *_ = pool.run(init_alone)
    assert error.kind, "nothing was raised"
    assert seconds < 6, error


def callback_does_not_return(me: RankContext) -> tuple[Caught, float]:
    """The next call of the faulty rank waits for its callback; the others' wait for that rank."""
    calls_before_failure(me)
    seconds = TIMEOUT if me.rank == FAULTY_RANK else 10 * TIMEOUT
    backend_of().set_timeout(datetime.timedelta(seconds=seconds))
    release = threading.Event()
    if me.rank != FAULTY_RANK:
        wait_published(me, "callback", [FAULTY_RANK])
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    if me.rank == FAULTY_RANK:
        future = future.then(lambda f: release.wait(20) and None)
        publish(me, "callback")
    future_of_next = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    start = time.monotonic()
    error = caught(future_of_next.wait)
    release.set()
    future.wait()
    dist.destroy_process_group()
    return error, error.when - start


def test_a_callback_that_does_not_return_times_out():
    with fresh(3) as pool:
        found = pool.run(callback_does_not_return)
    for error, seconds in found:
        assert "rank 1 timed out: a callback of all_reduce #" in error.text, error
        assert seconds < TIMEOUT + NOTICE_SECONDS, error


# --- Ctrl-C ---------------------------------------------------------------------------------------

INTERRUPTED_SECONDS = 0.3 + 0.7  # as promised, and for machine load
# Calls in which Python waits for a rank that does not make them.
INTERRUPTED = {name: call for name, (_, call) in WAITS.items() if name != "future"}
INTERRUPTED["wait with a limit"] = lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(
    datetime.timedelta(seconds=15)
)
INTERRUPTED["new_group"] = lambda: dist.new_group(backend="pycollect")
INTERRUPTED["new_group without rank 0"] = INTERRUPTED["new_group"]
INTERRUPTED["batch_isend_irecv"] = lambda: batch()
# Those in which only the interrupted rank waits.
ALONE = ("recv", "irecv", "send", "new_group", "new_group without rank 0", "batch_isend_irecv")


def batch() -> None:
    receives = [dist.P2POp(dist.irecv, torch.ones(3), FAULTY_RANK) for _ in range(2)]
    for work in dist.batch_isend_irecv(receives):
        work.wait()


def interrupt(
    me: RankContext, wait: str, interrupted: int
) -> tuple[float, list[str], Caught, float]:
    """One rank gets a signal whose handler returns, and then Ctrl-C."""
    calls_before_failure(me)
    if me.rank == FAULTY_RANK or (me.rank != interrupted and wait in ALONE):
        wait_published(me, "interrupted", [interrupted])
        return 0.0, [], caught(dist.all_reduce, torch.ones(3)), destroyed()
    if me.rank != interrupted:
        return 0.0, [], caught(INTERRUPTED[wait]), destroyed()
    handled, sent = [], []
    signal.signal(signal.SIGUSR2, lambda *_: handled.append("SIGUSR2"))
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def send() -> None:
        for number in (signal.SIGUSR2, signal.SIGINT):
            time.sleep(2 * ASLEEP)
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        INTERRUPTED[wait]()
    except KeyboardInterrupt:
        handled.append("SIGINT")
    seconds = time.monotonic() - sent[-1]
    sender.join()
    publish(me, "interrupted")
    return seconds, handled, caught(dist.all_reduce, torch.ones(3)), destroyed()


def destroyed() -> float:
    start = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - start


@pytest.mark.parametrize("wait", INTERRUPTED)
@pytest.mark.parametrize("placement", ["", "abb"])
def test_ctrl_c_ends_a_wait(wait, placement):
    """The group of the wait is aborted."""
    interrupted = 2 if "without rank 0" in wait else 0
    with fresh(3, placement=placement) as pool:
        found = pool.run(interrupt, wait, interrupted, seconds=40)
    seconds, handled, _, _ = found[interrupted]
    assert handled == ["SIGUSR2", "SIGINT"]
    assert seconds < INTERRUPTED_SECONDS
    for rank, (_, _, error, took) in enumerate(found):
        # The faulty rank's call may be found to differ before the abort is.
        broken = ("PeerLost",) if rank == interrupted else ("PeerLost", "ValueError")
        assert error.kind in (("",) if "new_group" in wait else broken), found
        assert took < AT_ONCE, found


def destroys(call: list[Caught]) -> None:
    call.append(caught(dist.destroy_process_group))


def calls(call: list[Caught]) -> None:
    call.append(caught(dist.barrier))


def handle(me: RankContext, handler: Callable[[list[Caught]], None]) -> tuple[list[Caught], Caught]:
    """A handler uses the group whose call it has interrupted."""
    calls_before_failure(me)
    called: list[Caught] = []
    if me.rank == FAULTY_RANK:
        wait_published(me, "handled", [0])
    elif me.rank == 0:
        signal.signal(signal.SIGUSR2, lambda *_: handler(called) or publish(me, "handled"))
        threading.Timer(2 * ASLEEP, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    error = caught(dist.all_reduce, torch.ones(3))
    if dist.is_initialized():
        dist.destroy_process_group()
    return called, error


@pytest.mark.parametrize("placement", ["", "abb"])
@pytest.mark.parametrize("handler", [destroys, calls], ids=lambda handler: handler.__name__)
def test_a_handler_uses_the_group_of_the_call_that_it_interrupts(handler, placement):
    with fresh(3, placement=placement) as pool:
        found = pool.run(handle, handler, seconds=40)
    (called,), error = found[0]
    if handler is destroys:
        assert not called.kind, called
        assert error.kind == "PeerLost", error
    else:
        assert "called by a signal handler in a call of the same group" in called.text
        assert all(not error.kind for _, error in found), found


def interrupted_refusal(me: RankContext) -> tuple[bool, Caught]:
    """Ctrl-C while a rank publishes that it refuses its own argument."""
    calls_before_failure(me)
    if me.rank == FAULTY_RANK:
        wait_published(me, "interrupted", [0])
    raised = False
    if me.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(2 * ASLEEP, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            for _ in range(2):  # the second one waits until all have seen the first
                caught(dist.all_reduce, torch.ones(3, dtype=torch.uint16))
            time.sleep(5)
        except KeyboardInterrupt:
            raised = True
        publish(me, "interrupted")
    else:
        caught(dist.all_reduce, torch.ones(3))
        caught(dist.all_reduce, torch.ones(3))
    return raised, caught(dist.all_reduce, torch.ones(3))


def test_ctrl_c_in_a_refused_call():
    with fresh(3) as pool:
        found = pool.run(interrupted_refusal, seconds=40)
    assert found[0][0]
    assert all(error.kind == "PeerLost" for _, error in found), found


def call_behind_a_callback(me: RankContext) -> Caught:
    """The timeout of a call counts from the call, not from the beginning of the callback."""
    calls_before_failure(me)
    backend_of().set_timeout(datetime.timedelta(seconds=6 * TIMEOUT))
    if me.rank == FAULTY_RANK:
        backend_of().set_timeout(datetime.timedelta(seconds=2 * TIMEOUT))
    if me.rank != FAULTY_RANK:
        wait_published(me, "callback", [FAULTY_RANK])
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    if me.rank == FAULTY_RANK:
        future.then(lambda f: time.sleep(4 * TIMEOUT))
        publish(me, "callback")
        time.sleep(3 * TIMEOUT)
    return caught(dist.all_reduce, torch.ones(3))


def test_a_call_behind_a_callback_has_its_own_timeout():
    with fresh(3) as pool:
        errors = pool.run(call_behind_a_callback, seconds=40)
    assert not any(error.kind for error in errors), errors
