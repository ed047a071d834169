"""A rank that dies: every rank that waits for it raises in time, and the error names it.

Afterwards the group refuses further work at once, and destroying it returns. Every test has its own
processes, because it breaks them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Caught, RankContext, caught, fresh
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
    large,
    others,
    publish,
    wait_published,
)

pytestmark = pytest.mark.skipif(
    not OURS, reason=f"{BACKEND} has no exception type for it, hangs, or does not name the rank"
)

ANOTHER_PROGRAM = ("/bin/sleep", ["sleep", "5"])  # runs until every rank must have noticed

# Sequence number before the failure, error of the wait, time of the death, and the result of
# `after_failure`.
LossResult = tuple[int, Caught, float, tuple]


def lost_rank_in_wait(me: RankContext, wait: str, how: str) -> LossResult:
    """The faulty rank dies while its peers wait for it in the given call."""
    called = calls_before_failure(me)
    publish(me, "waiting")
    if me.rank == FAULTY_RANK:
        wait_published(me, "waiting", others(me))
        time.sleep(ASLEEP)
        publish(me, "death")
        if how == "exit":
            os._exit(0)
        if how == "exec":
            os.execv(*ANOTHER_PROGRAM)
        os.kill(os.getpid(), signal.SIGSEGV if how == "crash" else signal.SIGKILL)
    error = caught(WAITS[wait][1])
    return called, error, wait_published(me, "death", [FAULTY_RANK]), after_failure(me)


def check_loss(found: LossResult, operation: str) -> None:
    called, error, when, (refusal, refused, destroyed) = found
    assert error.kinds[:2] == ("PeerLost", "CollectiveError"), error
    assert "RuntimeError" in error.kinds, error
    assert error.when - when < NOTICE_SECONDS, f"{error.when - when:.2f} s: {error}"
    assert operation in error.text, error
    assert f"rank {FAULTY_RANK}" in error.text, error
    collective = operation not in ("send", "recv")
    assert not collective or any(str(n) in error.text for n in (called, called + 1)), error
    assert "CollectiveError" in refusal.kinds, refusal
    assert f"rank {FAULTY_RANK}" in refusal.text, refusal
    assert refused < AT_ONCE
    assert destroyed < DESTROYED


def run_with_lost_rank(wait: str, how: str = "kill", placement: str = "") -> None:
    with fresh(3, placement=placement) as pool:
        outcomes = pool.outcomes(lost_rank_in_wait, wait, how, seconds=15)
    for rank, outcome in enumerate(outcomes):
        if rank == FAULTY_RANK:
            assert outcome.died
        else:
            assert not outcome.error, outcome.error
            check_loss(outcome.value, WAITS[wait][0])


@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_is_killed(wait):
    run_with_lost_rank(wait)


QUICK_WAITS = ("all_reduce", "large all_reduce", "irecv")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "wait", [pytest.param(w, marks=[] if w in QUICK_WAITS else [pytest.mark.slow]) for w in WAITS]
)
def test_a_rank_of_several_hosts_is_killed(wait, placement):
    run_with_lost_rank(wait, placement=placement)


@pytest.mark.parametrize("how", ["exit", "crash"])
def test_a_rank_exits_or_crashes(how):
    run_with_lost_rank("all_reduce", how)


def test_a_rank_that_calls_exec_counts_as_dead():
    """After exec the process lives on with the same pid, but the rank counts as dead."""
    run_with_lost_rank("all_reduce", "exec")


def exec_during_calls(me: RankContext, when: float) -> tuple[int, Caught, tuple]:
    """An endless series of calls, while another thread of the faulty rank calls exec."""
    called = calls_before_failure(me)
    if me.rank == FAULTY_RANK:
        threading.Timer(when - time.monotonic(), os.execv, ANOTHER_PROGRAM).start()
    x = large(0.0)

    def forever() -> None:
        while True:
            dist.all_reduce(x)

    return called, caught(forever), after_failure(me)


def test_exec_in_the_middle_of_a_call():
    with fresh(2) as pool:
        when = time.monotonic() + 0.7
        outcomes = pool.outcomes(exec_during_calls, when, seconds=15)
    assert outcomes[FAULTY_RANK].died
    assert not outcomes[0].error, outcomes[0].error
    _, error, (refusal, refused, destroyed) = outcomes[0].value
    assert error.kind == "PeerLost", error
    assert f"rank {FAULTY_RANK}" in error.text, error
    assert error.when - when < NOTICE_SECONDS
    assert "CollectiveError" in refusal.kinds, refusal
    assert refused < AT_ONCE
    assert destroyed < DESTROYED


def with_children(me: RankContext) -> float:
    """The faulty rank starts child programs in several ways; peers must not take that for exec."""
    calls_before_failure(me)
    if me.rank == FAULTY_RANK:
        os.environ.clear()
        os.environ["MUCH"] = "x" * 100_000
        subprocess.run(["/bin/sleep", "0.1"], check=True)
        os.waitpid(os.posix_spawn("/bin/sleep", ["sleep", "0.1"], os.environ), 0)
        child = os.fork()
        if child == 0:
            os.execv("/bin/sleep", ["sleep", "0.1"])
        os.waitpid(child, 0)
    x = torch.ones(3)
    dist.all_reduce(x)
    return x[0].item()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_starting_child_programs_is_not_taken_for_exec():
    with fresh(2) as pool:
        assert pool.run(with_children) == [2.0, 2.0]


def endless_calls(me: RankContext) -> tuple[int, Caught, tuple]:
    """An endless series of calls, so that a death at any time hits a call in flight."""
    called = calls_before_failure(me)
    x = large(0.0)
    out = torch.zeros(3 * x.numel())

    def forever() -> None:
        while True:
            dist.all_reduce(x)
            dist.all_gather_into_tensor(out, x)

    error = caught(forever)
    return called, error, after_failure(me)


def test_death_in_the_middle_of_large_calls():
    with fresh(3) as pool:
        killer = threading.Timer(0.7, os.kill, (pool.pids()[FAULTY_RANK], signal.SIGKILL))
        when = time.monotonic() + 0.7
        killer.start()
        outcomes = pool.outcomes(endless_calls, seconds=15)
    assert outcomes[FAULTY_RANK].died
    for outcome in outcomes[:FAULTY_RANK] + outcomes[FAULTY_RANK + 1 :]:
        _, error, (refusal, refused, destroyed) = outcome.value
        assert error.kind == "PeerLost", error
        assert error.when - when < NOTICE_SECONDS + 0.2
        assert "CollectiveError" in refusal.kinds, refusal
        assert refused < AT_ONCE
        assert destroyed < DESTROYED


def child_outlives_rank(me: RankContext) -> LossResult:
    """The faulty rank dies, but its forked child lives on with all its descriptors."""
    called = calls_before_failure(me)
    publish(me, "waiting")
    if me.rank == FAULTY_RANK:
        if os.fork() == 0:
            wait_published(me, "noticed", others(me))
            os._exit(0)
        wait_published(me, "waiting", others(me))
        time.sleep(ASLEEP)
        publish(me, "death")
        os.kill(os.getpid(), signal.SIGKILL)
    error = caught(dist.all_reduce, torch.ones(3))
    end = after_failure(me)
    publish(me, "noticed")
    return called, error, wait_published(me, "death", [FAULTY_RANK]), end


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_outlives_its_rank():
    with fresh(2) as pool:
        found = pool.outcomes(child_outlives_rank, seconds=15)[0]
    assert not found.error, found.error
    check_loss(found.value, "all_reduce")
