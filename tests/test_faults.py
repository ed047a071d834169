"""Faults of one rank: every peer raises in time an error that names it, and the group ends.

The cases are those of faults.py. Each has its own ranks, which it breaks; several run at a time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import (
    BACKEND,
    OURS,
    Caught,
    Outcome,
    RankContext,
    Spec,
    backend_of,
    caught,
    check_side_by_side,
)
from faults import (
    ASLEEP,
    AT_ONCE,
    FAULTY_RANK,
    NOTICE_SECONDS,
    PLACEMENTS,
    TIMEOUT,
    WAITS,
    WHO,
    WORLD,
    Fault,
    calls_before_failure,
    check,
    destroyed,
    meet,
    ones,
    publish,
    seconds,
    wait_published,
)

pytestmark = pytest.mark.skipif(
    not OURS, reason=f"{BACKEND} has no exception type for it, hangs, or does not name the rank"
)


# --- the table ------------------------------------------------------------------------------------

EVERY = tuple(what for what in WAITS if what != "behind a stalled send")
OF_THREADS = tuple(
    what for what in EVERY if what != "recv from any"
)  # a deadlock, if a rank leaves
FEW = (
    "all_reduce",
    "large all_reduce",
    "async all_reduce",
    "sparse all_reduce",
    "broadcast",
    "barrier",
    "recv",
    "send",
)
QUICK = ("all_reduce", "async all_reduce", "large all_reduce", "irecv", "send")
ON_DEVICES = ("all_reduce", "async all_reduce", "future", "block", "recv", "send")


def waiting(who: str, whats: Iterable[str]) -> list[Fault]:
    return [Fault(who, what) for what in whats]


def stalled(who: str) -> list[Fault]:
    return [Fault(who, what, "on its device") for what in ("all_reduce", "recv")]


def on_device(who: str) -> list[Fault]:
    return waiting(who, (*ON_DEVICES, "behind a stalled send")) + stalled(who)


IN_FLIGHT = [
    *(Fault(who, when="in flight") for who in ("leaves", "killed", "aborts", "late")),
    Fault("late", when="messages in flight"),
]
HOST = [
    *IN_FLIGHT,
    *waiting("killed", EVERY),
    *(Fault(who) for who in WHO if who != "killed"),
    *(Fault(who, when="in calls") for who in ("killed", "execs", "aborts")),
    *waiting("late", (*FEW[1:], "future beside a wait")),
    *waiting("leaves", FEW[1:]),
]


def on_hosts(n: int) -> list[Fault]:
    """Each call meets each fault in one of the placements."""
    return [
        *IN_FLIGHT,
        *waiting("killed", dict.fromkeys(["all_reduce", *EVERY[n :: len(PLACEMENTS)]])),
        *waiting("late", FEW[n :: len(PLACEMENTS)]),
        *waiting("aborts", QUICK[n :: len(PLACEMENTS)]),
        Fault("leaves"),
    ]


ON_CPU: list[tuple[Spec, list[Fault]]] = [
    (Spec(WORLD), HOST),
    *((Spec(WORLD, placement=p), on_hosts(n)) for n, p in enumerate(PLACEMENTS)),
    (Spec(WORLD, ranks_as="threads"), waiting("leaves", OF_THREADS) + waiting("aborts", EVERY)),
    (
        Spec(WORLD, ranks_as="threads", parallel=True),
        [
            *(f for who in ("late", "aborts") for f in waiting(who, OF_THREADS)),
            *waiting("leaves", [w for w in OF_THREADS if w != "future beside a wait"]),
        ],
    ),
    (
        Spec(WORLD, site="late"),
        [*IN_FLIGHT, *on_device("killed"), *on_device("late"), *on_device("aborts")],
    ),
    (
        Spec(WORLD, site="late", placement="abb"),
        [*waiting("killed", QUICK), *waiting("late", QUICK), *stalled("killed"), *stalled("late")],
    ),
    (Spec(WORLD, site="eager"), waiting("late", QUICK) + stalled("late")),
]
FAULTS = [f for w in ("killed", "late") for f in waiting(w, ON_DEVICES) + stalled(w)]
ON_GPU, ON = [(Spec(WORLD, site="cuda"), FAULTS)], ("cpu", "cuda")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("table", [ON_CPU, pytest.param(ON_GPU, marks=pytest.mark.cuda)], ids=ON)
def test_faults_are_met_in_time(table):
    check_side_by_side(
        (((spec, fault), spec, meet, (fault,)) for spec, faults in table for fault in faults),
        lambda key, pool: check(key[1], pool.collect_outcomes(), key[0]),
    )


# --- Ctrl-C ---------------------------------------------------------------------------------------

INTERRUPTED_SECONDS = 0.3 + 0.7  # as promised, and for machine load
# Calls in which Python waits for a rank that does not make them.
INTERRUPTED: dict[str, Callable[[RankContext], object]] = {
    **{
        name: lambda me, call=call: call(me, ones())
        for name, (_, call) in WAITS.items()
        if name in EVERY and "future" not in name
    },
    "wait with a limit": lambda me: dist.all_reduce(ones(), async_op=True).wait(seconds(15)),
    "new_group": lambda me: dist.new_group(backend="pycollect"),
    "new_group without rank 0": lambda me: dist.new_group(backend="pycollect"),
}
# Those in which only the interrupted rank waits.
ALONE = ("recv", "irecv", "send", "new_group", "new_group without rank 0", "batch_isend_irecv")

# Seconds until the wait ended, handled signals, the next call's error, seconds of the group's end.
Interrupted = tuple[float, list[str], Caught, float]


def interrupt(me: RankContext, wait: str, interrupted: int) -> Interrupted:
    """One rank gets a signal whose handler returns, and then Ctrl-C."""
    calls_before_failure(me)
    if me.rank == FAULTY_RANK or (me.rank != interrupted and wait in ALONE):
        wait_published(me, "interrupted", [interrupted])
        return 0.0, [], caught(dist.all_reduce, ones()), destroyed()
    if me.rank != interrupted:
        return 0.0, [], caught(INTERRUPTED[wait], me), destroyed()
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
        INTERRUPTED[wait](me)
    except KeyboardInterrupt:
        handled.append("SIGINT")
    took = time.monotonic() - sent[-1]
    sender.join()
    publish(me, "interrupted")
    return took, handled, caught(dist.all_reduce, ones()), destroyed()


def check_interrupted(wait: str, interrupted: int, found: list[Interrupted]) -> None:
    took, handled, _, _ = found[interrupted]
    assert handled == ["SIGUSR2", "SIGINT"]
    assert took < INTERRUPTED_SECONDS
    for rank, (_, _, error, end) in enumerate(found):
        # The faulty rank's call may be found to differ before the abort is.
        broken = ("PeerLost",) if rank == interrupted else ("PeerLost", "ValueError")
        assert error.kind in (("",) if "new_group" in wait else broken), found
        assert end < AT_ONCE, found


@pytest.mark.parametrize("placement", ["", "abb"])
def test_ctrl_c_ends_a_wait(placement):
    """The group of the wait is aborted."""
    spec = Spec(WORLD, placement=placement)
    ranks = {wait: 2 if "without rank 0" in wait else 0 for wait in INTERRUPTED}
    check_side_by_side(
        ((wait, spec, interrupt, (wait, rank)) for wait, rank in ranks.items()),
        lambda wait, pool: check_interrupted(wait, ranks[wait], pool.results(40)),
    )


# --- signal handlers, callbacks, bootstraps -------------------------------------------------------

Handled = tuple[list[Caught], Caught]


def handle(me: RankContext, use: Callable[[], object]) -> Handled:
    """A signal's handler uses the group whose call it has interrupted."""
    calls_before_failure(me)
    called: list[Caught] = []

    def handler(*_: object) -> None:
        called.append(caught(use))
        publish(me, "handled")

    if me.rank == FAULTY_RANK:
        wait_published(me, "handled", [0])
    elif me.rank == 0:
        signal.signal(signal.SIGUSR2, handler)
        threading.Timer(2 * ASLEEP, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    error = caught(dist.all_reduce, ones())
    destroyed()
    return called, error


def handler_destroyed(found: list[Handled]) -> None:
    (called,), error = found[0]
    assert not called.kind, called
    assert error.kind == "PeerLost", error


def handler_was_refused(found: list[Handled]) -> None:
    (called,), _ = found[0]
    assert "called by a signal handler in a call of the same group" in called.text
    assert all(not error.kind for _, error in found), found


def interrupted_refusal(me: RankContext) -> tuple[bool, Caught]:
    """Ctrl-C while a rank publishes that it refuses its own argument."""
    calls_before_failure(me)
    raised = False
    if me.rank == FAULTY_RANK:
        wait_published(me, "interrupted", [0])
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
        caught(dist.all_reduce, ones())
        caught(dist.all_reduce, ones())
    return raised, caught(dist.all_reduce, ones())


def refusal_was_interrupted(found: list[tuple[bool, Caught]]) -> None:
    assert found[0][0]
    assert all(error.kind == "PeerLost" for _, error in found), found


Timed = tuple[Caught, float]  # an error, and the seconds until it


def behind_a_callback(
    me: RankContext, call: Callable[[], object], limit: float, callback: float, pause: float
) -> Timed:
    """A call behind a callback of the faulty rank, whose timeout is `limit`."""
    calls_before_failure(me)
    backend_of().set_timeout(seconds(limit if me.rank == FAULTY_RANK else 10 * TIMEOUT))
    begun, release = threading.Event(), threading.Event()
    if me.rank != FAULTY_RANK:
        wait_published(me, "callback", [FAULTY_RANK])
    future = dist.all_reduce(ones(), async_op=True).get_future()
    if me.rank == FAULTY_RANK:
        future = future.then(lambda f: begun.set() or (release.wait(callback) and None))
        publish(me, "callback")
        begun.wait()
        time.sleep(pause)
    start = time.monotonic()
    error = caught(call)
    release.set()
    future.wait()
    destroyed()
    return error, error.when - start


def wait_for_a_future() -> None:
    dist.all_reduce(ones(), async_op=True).get_future().wait()


def call() -> None:
    dist.all_reduce(ones())


def callback_timed_out(found: list[Timed]) -> None:
    for error, took in found:
        assert "rank 1 timed out: a callback of all_reduce #" in error.text, error
        assert took < TIMEOUT + NOTICE_SECONDS, error


def nothing_raised(found: list[Timed]) -> None:
    assert not any(error.kind for error, _ in found), found


def init_alone(me: RankContext) -> Timed:
    """Rank 0 initialises alone: no peer joins the bootstrap."""
    start = time.monotonic()
    error = caught(me.init, "alone", timeout=seconds(1)) if me.rank == 0 else caught(time.sleep, 0)
    return error, error.when - start


def bootstrap_timed_out(found: list[Timed]) -> None:
    error, took = found[0]
    assert error.kind == "Timeout", error
    assert took < 6, error


def die_during_bootstrap(me: RankContext, delay: float) -> Timed:
    if me.rank == FAULTY_RANK:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    error = caught(me.init, "bootstrap", timeout=seconds(1))
    while not error.kind:
        error = caught(dist.barrier)
    if me.rank == FAULTY_RANK:
        time.sleep(5)
    return error, error.when - start


def death_was_noticed(outcomes: list[Outcome]) -> None:
    for outcome in (outcomes[0], outcomes[2]):
        assert not outcome.error, outcome
        error, took = outcome.value
        assert "CollectiveError" in error.kinds, error
        assert took < 1 + 2 * NOTICE_SECONDS, error


def with_children(me: RankContext) -> float:
    """The faulty rank starts child programs in several ways; peers must not take that for exec."""
    calls_before_failure(me)
    if me.rank == FAULTY_RANK:
        pending = dist.irecv(torch.zeros(1), me.rank)
        os.environ.clear()
        os.environ["MUCH"] = "x" * 100_000
        subprocess.run(["/bin/sleep", "0.1"], check=True)
        os.waitpid(os.posix_spawn("/bin/sleep", ["sleep", "0.1"], os.environ), 0)
        child = os.fork()
        if child == 0:  # a thread of the parent may hold the lock of the work
            forked = "was forked" in caught(pending.get_future).text
            os.execv("/bin/sleep", ["sleep", "0.1" if forked else "not forked"])
        assert os.waitpid(child, 0)[1] == 0
        dist.isend(torch.zeros(1), me.rank)
    x = ones()
    dist.all_reduce(x)
    return x[0].item()


def stopped(me: RankContext) -> float:
    """The faulty rank is stopped in a series of calls, as by a debugger or a suspended machine."""
    calls_before_failure(me)
    x, go_on, gap = torch.ones(300_000), torch.ones(1), 0.0
    if me.rank == FAULTY_RANK:
        signals = f"sleep 0.3; kill -STOP {os.getpid()}; sleep 2; kill -CONT {os.getpid()}"
        stopping = subprocess.Popen(["/bin/sh", "-c", signals])
    now = time.monotonic()
    when = now + 3.0
    while go_on.item():  # rank 0 decides for all, because ranks read the clock at different times
        gap, now = max(gap, time.monotonic() - now), time.monotonic()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        go_on.fill_(float(time.monotonic() < when))
        dist.broadcast(go_on, 0)
        time.sleep(0.001)
    if me.rank == FAULTY_RANK:
        stopping.wait()
    assert gap > 1.5, "the rank was never stopped"
    dist.all_reduce(x)
    return x.unique().item()


def summed(found: list[float]) -> None:
    assert found == [WORLD] * WORLD


def subgroup_timeout(me: RankContext) -> tuple[Caught, Caught, float]:
    """A subgroup has its own timeout; when it expires, only the subgroup is aborted."""
    group = dist.new_group(list(range(WORLD)), timeout=seconds(TIMEOUT))
    start = time.monotonic()
    if me.rank == FAULTY_RANK:
        time.sleep(3 * TIMEOUT)
    error = caught(dist.all_reduce, ones(), group=group)
    x = ones()
    whole = caught(dist.all_reduce, x)
    assert whole.kind or x.eq(me.world).all()
    return error, whole, error.when - start


def subgroup_timed_out(found: list[tuple[Caught, Caught, float]]) -> None:
    for rank, (error, whole, took) in enumerate(found):
        assert "CollectiveError" in error.kinds, error
        assert not whole.kind, whole
        assert rank == FAULTY_RANK or took < TIMEOUT + NOTICE_SECONDS


# Name -> (job, its arguments, check of the ranks' results, options of the pool).
MORE_FAULTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Callable[..., None], dict]] = {
    "stopped": (stopped, (), summed, {}),
    "callback": (behind_a_callback, (wait_for_a_future, TIMEOUT, 20, 0), callback_timed_out, {}),
    # The timeout of a call counts from the call, not from the beginning of the callback.
    "call in a callback": (
        behind_a_callback,
        (call, 2 * TIMEOUT, 4 * TIMEOUT, 3 * TIMEOUT),
        nothing_raised,
        {},
    ),
    "subgroup": (subgroup_timeout, (), subgroup_timed_out, {}),
    "alone": (init_alone, (), bootstrap_timed_out, {"group": False}),
    "children": (with_children, (), summed, {}),
    "refused, interrupted": (interrupted_refusal, (), refusal_was_interrupted, {}),
    **{
        f"{name} in a handler {where}": (handle, (use,), checked, {"placement": where})
        for where in ("", "abb")
        for name, use, checked in (
            ("destroys", dist.destroy_process_group, handler_destroyed),
            ("calls", dist.barrier, handler_was_refused),
        )
    },
}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_more_faults():
    check_side_by_side(
        (
            (name, Spec(WORLD, **spec), job, args)
            for name, (job, args, _, spec) in MORE_FAULTS.items()
        ),
        lambda name, pool: MORE_FAULTS[name][2](pool.results()),
    )


def test_a_rank_dies_during_the_bootstrap():
    delays = (0.0, 0.002, 0.004, 0.01, 0.02, 0.1)
    spec = Spec(WORLD, group=False)
    check_side_by_side(
        ((delay, spec, die_during_bootstrap, (delay,)) for delay in delays),
        lambda _, pool: death_was_noticed(pool.collect_outcomes()),
    )
