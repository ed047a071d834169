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
    KILLED_RANK,
    NOTICED,
    WAITS,
    after,
    begin,
    heard,
    large,
    others,
    say,
)

pytestmark = pytest.mark.skipif(
    not OURS, reason=f"{BACKEND} has no exception type for it, hangs, or does not name the rank"
)

ANOTHER_PROGRAM = ("/bin/sleep", ["sleep", "5"])  # runs until every rank must have noticed

# Sequence number before the failure, error of the wait, time of the death, result of `after`.
Found = tuple[int, Caught, float, tuple]


def bereaved(me: RankContext, wait: str, how: str) -> Found:
    """The victim dies while its peers wait for it in the given call."""
    called = begin(me)
    say(me, "waits")
    if me.rank == KILLED_RANK:
        heard(me, "waits", others(me))
        time.sleep(ASLEEP)
        say(me, "dies")
        if how == "exit":
            os._exit(0)
        if how == "exec":
            os.execv(*ANOTHER_PROGRAM)
        os.kill(os.getpid(), signal.SIGSEGV if how == "crash" else signal.SIGKILL)
    error = caught(WAITS[wait][1])
    return called, error, heard(me, "dies", [KILLED_RANK]), after(me)


def check_loss(found: Found, operation: str) -> None:
    called, error, when, (refusal, refused, destroyed) = found
    assert error.kinds[:2] == ("PeerLost", "CollectiveError"), error
    assert "RuntimeError" in error.kinds, error
    assert error.when - when < NOTICED, f"{error.when - when:.2f} s: {error}"
    assert operation in error.text, error
    assert f"rank {KILLED_RANK}" in error.text, error
    collective = operation not in ("send", "recv")
    assert not collective or any(str(n) in error.text for n in (called, called + 1)), error
    assert "CollectiveError" in refusal.kinds, refusal
    assert f"rank {KILLED_RANK}" in refusal.text, refusal
    assert refused < AT_ONCE
    assert destroyed < DESTROYED


def lose(wait: str, how: str = "kill") -> None:
    with fresh(3) as pool:
        outcomes = pool.outcomes(bereaved, wait, how, seconds=15)
    for rank, outcome in enumerate(outcomes):
        if rank == KILLED_RANK:
            assert outcome.died
        else:
            assert not outcome.error, outcome.error
            check_loss(outcome.value, WAITS[wait][0])


@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_is_killed(wait):
    lose(wait)


@pytest.mark.parametrize("how", ["exit", "crash"])
def test_a_rank_exits_or_crashes(how):
    lose("all_reduce", how)


def test_a_rank_becomes_another_program():
    """After exec the process lives on with the same pid, but the rank counts as dead."""
    lose("all_reduce", "exec")


def becoming_another(me: RankContext, when: float) -> tuple[int, Caught, tuple]:
    """An endless series of calls, while another thread of the victim calls exec."""
    called = begin(me)
    if me.rank == KILLED_RANK:
        threading.Timer(when - time.monotonic(), os.execv, ANOTHER_PROGRAM).start()
    x = large(0.0)

    def forever() -> None:
        while True:
            dist.all_reduce(x)

    return called, caught(forever), after(me)


def test_a_rank_becomes_another_program_in_the_middle_of_a_call():
    with fresh(2) as pool:
        when = time.monotonic() + 0.7
        outcomes = pool.outcomes(becoming_another, when, seconds=15)
    assert outcomes[KILLED_RANK].died
    assert not outcomes[0].error, outcomes[0].error
    _, error, (refusal, refused, destroyed) = outcomes[0].value
    assert error.kind == "PeerLost", error
    assert f"rank {KILLED_RANK}" in error.text, error
    assert error.when - when < NOTICED
    assert "CollectiveError" in refusal.kinds, refusal
    assert refused < AT_ONCE
    assert destroyed < DESTROYED


def with_children(me: RankContext) -> float:
    """The victim starts child programs in several ways: its peers must not take that for exec."""
    begin(me)
    if me.rank == KILLED_RANK:
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
def test_a_rank_that_begins_other_programs_is_alive():
    with fresh(2) as pool:
        assert pool.run(with_children) == [2.0, 2.0]


def in_the_middle(me: RankContext, pid_file: str) -> tuple[int, Caught, tuple]:
    """An endless series of calls, so that a death at any time hits a call in flight."""
    called = begin(me)
    x = large(0.0)
    out = torch.zeros(3 * x.numel())

    def forever() -> None:
        while True:
            dist.all_reduce(x)
            dist.all_gather_into_tensor(out, x)

    error = caught(forever)
    return called, error, after(me)


def test_death_in_the_middle_of_large_calls():
    with fresh(3) as pool:
        killer = threading.Timer(0.7, os.kill, (pool.pids()[KILLED_RANK], signal.SIGKILL))
        when = time.monotonic() + 0.7
        killer.start()
        outcomes = pool.outcomes(in_the_middle, "", seconds=15)
    assert outcomes[KILLED_RANK].died
    for outcome in outcomes[:KILLED_RANK] + outcomes[KILLED_RANK + 1 :]:
        _, error, (refusal, refused, destroyed) = outcome.value
        assert error.kind == "PeerLost", error
        assert error.when - when < NOTICED + 0.2
        assert "CollectiveError" in refusal.kinds, refusal
        assert refused < AT_ONCE
        assert destroyed < DESTROYED


def outlived(me: RankContext) -> Found:
    """The victim dies, but its forked child lives on with all its descriptors."""
    called = begin(me)
    say(me, "waits")
    if me.rank == KILLED_RANK:
        if os.fork() == 0:
            heard(me, "noticed", others(me))
            os._exit(0)
        heard(me, "waits", others(me))
        time.sleep(ASLEEP)
        say(me, "dies")
        os.kill(os.getpid(), signal.SIGKILL)
    error = caught(dist.all_reduce, torch.ones(3))
    end = after(me)
    say(me, "noticed")
    return called, error, heard(me, "dies", [KILLED_RANK]), end


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_outlives_its_rank():
    with fresh(2) as pool:
        found = pool.outcomes(outlived, seconds=15)[0]
    assert not found.error, found.error
    check_loss(found.value, "all_reduce")
