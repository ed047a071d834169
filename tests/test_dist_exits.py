"""Calls in flight when their group or the program ends: every Work raises, nothing leaks or hangs.

torch gives a future no timeout, so a future that never completes is a hang forever.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import (
    OURS,
    Caught,
    RankContext,
    Spec,
    backend_of,
    caught,
    check_side_by_side,
    fresh,
    open_resources,
)
from faults import (
    DESTROYED,
    ENDED,
    Fault,
    error_of_future,
    in_flight,
    large,
    publish,
    wait_published,
)
from programs import run

pytestmark = pytest.mark.skipif(not OURS, reason="messages have no futures; hangs or crashes")

# --- programs that exit or fork -------------------------------------------------------------------

# Forks into two ranks. torch, which takes seconds to import, is imported before the fork.
PROGRAM = """
import gc, os, sys, time, torch, torch.distributed as dist
there, here = os.pipe()
rank = 0 if os.fork() else 1
import pycollect
dist.init_process_group("pycollect", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
groups = [dist.new_group([0, 1]) for _ in range(4)]
if rank == 1:
    os.close(here)
    os.read(there, 1)  # until rank 0 has ended
    os._exit(0)
"""

CALLS_IN_FLIGHT = """
works = [dist.irecv(torch.zeros(3), 1, group=group) for group in groups]
works += [dist.all_reduce(torch.zeros(3), group=group, async_op=True) for group in groups]
futures = [work.get_future() for work in works]
kept = [future.then(lambda f: print("over")) for future in futures]
print(time.monotonic(), flush=True)
"""

FORK_DURING_CALLS = """
import signal, threading
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
def poll():
    while True:
        backend.supports_tensor_alloc(torch.device("cpu"))
for _ in range(3):
    threading.Thread(target=poll, daemon=True).start()
hung = 0
for _ in range(60):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        os._exit(backend.supports_tensor_alloc(torch.device("cpu")))
    hung = hung or os.waitpid(child, 0)[1]
    if hung:
        break
print("hung", hung, flush=True)
os._exit(0)
"""

CALLBACK_HOLDS_A_GROUP = """
other = pycollect._C.make_backend(dist.HashStore(), 0, 1, pycollect.distributed.options())
work = dist.all_reduce(torch.zeros(3), group=groups[0], async_op=True)
future = work.get_future().then(lambda f, group=other: print("over"))
del other, work, future
print("end", flush=True)
"""

# Forks PROCESSES children in pairs, each pair a group; appended code runs in every child.
PAIRS = """
import fcntl, os, sys, threading, time, torch, torch.distributed as dist
children = []
while len(children) < PROCESSES:
    pair, rank = divmod(len(children), 2)
    child = os.fork()
    if child == 0:
        break
    children.append(child)
if len(children) == PROCESSES:
    print(*[os.waitpid(child, 0)[1] for child in children], flush=True)
    os._exit(0)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
import pycollect
store = f"file://{sys.argv[1]}{pair}"
dist.init_process_group("pycollect", init_method=store, rank=rank, world_size=2)
"""

THREADS_WAIT = """
for _ in range(30):  # enough that some are late
    threading.Thread(target=lambda: dist.recv(torch.ones(3), 1 - rank), daemon=True).start()
time.sleep(0.5)
"""

THREADS_END_GROUPS = """
mine = os.open(sys.argv[1] + str(pair) + str(rank), os.O_WRONLY | os.O_CREAT)
fcntl.flock(mine, fcntl.LOCK_EX)
dist.barrier()
if rank == 1:
    # Until rank 0 has ended.
    fcntl.flock(os.open(sys.argv[1] + str(pair) + "0", os.O_RDONLY), fcntl.LOCK_SH)
    os._exit(0)
work = dist.all_reduce(torch.ones(3), async_op=True)  # rank 1 does not join it
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
end = dist.destroy_process_group if pair % 2 else backend.shutdown
del backend
threading.Thread(target=end, daemon=True).start()
time.sleep(0.1)
"""

JOIN_AT_EXIT = """
import atexit, sys, threading, time
def join():
    thread.join(20)
    print("ended", not thread.is_alive(), flush=True)
atexit.register(join)  # before the backend's own handler, so it runs after that
import pycollect, torch, torch.distributed as dist
dist.init_process_group("pycollect", init_method="file://" + sys.argv[1], rank=0, world_size=1)
threading.excepthook = lambda error: None  # the receive raises
thread = threading.Thread(target=lambda: dist.recv(torch.ones(3), 0), daemon=True)
thread.start()
time.sleep(0.5)
"""

# Name -> the program, and its output.
PROGRAMS = {
    "calls in flight": (PROGRAM + CALLS_IN_FLIGHT, ["over"] * 8),
    # A forked child never waits for a lock that a thread of its parent holds.
    "forks beside threads": (PROGRAM + FORK_DURING_CALLS, ["hung", "0"]),
    # The held group is destroyed with the callback, while the exit ends all groups.
    "a callback holds another group": (PROGRAM + CALLBACK_HOLDS_A_GROUP, ["end", "over"]),
    # The threads wake when the groups end, when the interpreter no longer gives them the GIL.
    "daemon threads wait": (PAIRS.replace("PROCESSES", "2") + THREADS_WAIT, ["0"] * 2),
    "daemon threads end groups": (PAIRS.replace("PROCESSES", "8") + THREADS_END_GROUPS, ["0"] * 8),
    "a waiting thread is joined": (JOIN_AT_EXIT, ["ended", "True"]),
}


def run_to_its_end(text: str, store: str) -> tuple[list[str], float]:
    """Run a program; return the words of its output, and the time of its end."""
    ran = run([sys.executable, "-c", text, store], timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split(), time.monotonic()


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory) -> Iterator[dict[str, Future]]:
    """Start all programs at once, because most wait for the shutdown timeout; each has a test."""
    folder = tmp_path_factory.mktemp("stores")
    with ThreadPoolExecutor(len(PROGRAMS)) as side_by_side:
        yield {
            name: side_by_side.submit(run_to_its_end, text, f"{folder}/{name}")
            for name, (text, _) in PROGRAMS.items()
        }


def test_exit_with_many_calls_in_flight(programs):
    """At exit all groups share one shutdown timeout."""
    (end, *output), when = programs["calls in flight"].result()
    assert output == PROGRAMS["calls in flight"][1]
    assert when - float(end) < 2 * DESTROYED + 4


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "calls in flight"])
def test_exit(programs, name):
    assert programs[name].result()[0] == PROGRAMS[name][1]


def shut_down_concurrently(me: RankContext, groups: int, threads: int) -> int:
    """Several threads shut down the same groups at once, while calls are in flight."""
    made = [dist.new_group([0, 1]) for _ in range(groups)]
    works = []
    if me.rank == 0:
        works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in made]
        together = threading.Barrier(groups * threads)

        def shut_down(group: dist.ProcessGroup) -> None:
            together.wait()
            backend_of(group).shutdown()

        with ThreadPoolExecutor(groups * threads) as closing:
            list(closing.map(shut_down, made * threads))
    failed = sum("CollectiveError" in caught(work.wait).kinds for work in works)
    dist.barrier()
    for group in made:
        dist.destroy_process_group(group)
    return failed


def test_concurrent_shutdowns_of_one_group():
    with fresh(2) as pool:
        assert pool.run(shut_down_concurrently, 60, 3, seconds=60)[0] == 60


def named_memory(me: RankContext) -> list[str]:
    """Shared memory with a name, which would outlive a killed job, and its sockets' names."""
    dist.all_reduce(torch.ones(1 << 18))
    dist.all_to_all_single(torch.ones(me.world), torch.ones(me.world))
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    shared = [words[5] for words in maps if words[1].startswith("rw-s") and len(words) == 6]
    assert any("pycollect" in name for name in shared), shared
    return [name for name in shared if not name.endswith("(deleted)")]


def test_a_killed_job_leaves_no_shared_memory():
    """The kernel frees memory without a name when its last process ends, whatever ends it."""
    with fresh(3) as pool:
        assert pool.run(named_memory) == [[]] * 3


# --- groups that end ------------------------------------------------------------------------------


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
        futures = [
            (name, work.get_future()) for name, work in in_flight(me, calls, large(), 0 * large())
        ]
        futures += [(f"{name}, then", f.then(lambda f: f.value())) for name, f in futures]
        waiting = dict(in_flight(me, calls, large(), 0 * large()))
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


# Jobs that wait for the shutdown timeout.


def destroying_failed_all(outcomes: list[tuple[Errors, dict[str, int], dict[str, int]]]) -> None:
    """Futures, chained futures and waiting threads all end with an error, and nothing leaks."""
    for found, before, after in outcomes:
        assert not wrong_errors(found)
        assert {**after, "threads": 0} == {**before, "threads": 0}
    assert len(outcomes[0][0]) == 21


def callbacks_raised_or_destroyed_the_group(outcomes: list[list[Caught]]) -> None:
    (raises, destroying, message, pending), _ = outcomes
    assert "made up" in raises.text
    assert not destroying.kind, destroying
    assert not message.kind, message
    assert "CollectiveError" in pending.kinds, pending


def test_a_group_that_ends_ends_its_calls_in_flight():
    check_side_by_side(
        (
            (destroying_failed_all, Spec(2, group=False), destroyed, ()),
            (callbacks_raised_or_destroyed_the_group, Spec(2), called_back, ()),
        ),
        lambda check, pool: check(pool.results(2 * ENDED)),
    )
