"""Programs that exit or fork, and threads that shut a group down, with calls in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, RankContext, backend_of, caught, fresh
from dist_process import own_process
from dist_waits import DESTROYED

pytestmark = pytest.mark.skipif(not OURS, reason="never ends, or by a crash")

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
    os.read(there, 1)  # until the other one has ended
    os._exit(0)
"""

MUCH = """
works = [dist.irecv(torch.zeros(3), 1, group=group) for group in groups]
works += [dist.all_reduce(torch.zeros(3), group=group, async_op=True) for group in groups]
futures = [work.get_future() for work in works]
said = [future.then(lambda f: print("over")) for future in futures]
print(time.monotonic(), flush=True)
"""

FORKS = """
import signal, threading
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
def ask():
    while True:
        backend.supports_tensor_alloc(torch.device("cpu"))
for _ in range(3):
    threading.Thread(target=ask, daemon=True).start()
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

HOLDS = """
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

WAITS = """
for _ in range(30):  # so many that some come late
    threading.Thread(target=lambda: dist.recv(torch.ones(3), 1 - rank), daemon=True).start()
time.sleep(0.5)
"""

ENDS = """
mine = os.open(sys.argv[1] + str(pair) + str(rank), os.O_WRONLY | os.O_CREAT)
fcntl.flock(mine, fcntl.LOCK_EX)
dist.barrier()
if rank == 1:
    fcntl.flock(os.open(sys.argv[1] + str(pair) + "0", os.O_RDONLY), fcntl.LOCK_SH)  # it has ended
    os._exit(0)
work = dist.all_reduce(torch.ones(3), async_op=True)  # which rank 1 does not come to
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
end = dist.destroy_process_group if pair % 2 else backend.shutdown
del backend
threading.Thread(target=end, daemon=True).start()
time.sleep(0.1)
"""

JOINS = """
import atexit, sys, threading, time
def join():
    thread.join(20)
    print("ended", not thread.is_alive(), flush=True)
atexit.register(join)  # before the backend registers what ends its groups, so it comes later
import pycollect, torch, torch.distributed as dist
dist.init_process_group("pycollect", init_method="file://" + sys.argv[1], rank=0, world_size=1)
thread = threading.Thread(target=lambda: dist.recv(torch.ones(3), 0), daemon=True)
thread.start()
time.sleep(0.5)
"""

PROGRAMS = {
    "much": PROGRAM + MUCH,
    "forks": PROGRAM + FORKS,
    "holds": PROGRAM + HOLDS,
    "waits": PAIRS.replace("PROCESSES", "4") + WAITS,
    "ends": PAIRS.replace("PROCESSES", "8") + ENDS,
    "joins": JOINS,
}


def ended(text: str, store: str) -> tuple[list[str], float]:
    """Run a program; return the words of its output, and the time of its end."""
    said = own_process(["-W", "ignore", "-c", text, store], 100)
    return said.split(), time.monotonic()


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory) -> Iterator[dict[str, Future]]:
    """Start all programs at once, because most wait for the shutdown timeout; each has a test."""
    folder = tmp_path_factory.mktemp("stores")
    with ThreadPoolExecutor(len(PROGRAMS)) as side_by_side:
        yield {
            name: side_by_side.submit(ended, text, f"{folder}/{name}")
            for name, text in PROGRAMS.items()
        }


def test_a_fork_while_another_thread_asks(programs):
    """A forked child never waits for a lock that a thread of its parent holds."""
    assert programs["forks"].result()[0] == ["hung", "0"]


def test_programs_that_end_while_daemon_threads_wait(programs):
    """The threads wake when the groups end, when the interpreter no longer gives them the GIL."""
    assert programs["waits"].result()[0] == ["0"] * 4


def test_a_program_that_ends_with_much_under_way(programs):
    """At exit all groups share one shutdown timeout."""
    (end, *said), when = programs["much"].result()
    assert said == ["over"] * 8
    assert when - float(end) < 2 * DESTROYED + 4


def test_a_callback_that_holds_another_group(programs):
    """The held group is destroyed with the callback, while the interpreter exit ends all groups."""
    assert programs["holds"].result()[0] == ["end", "over"]


def test_programs_that_end_while_daemon_threads_end_groups(programs):
    assert programs["ends"].result()[0] == ["0"] * 8


@pytest.mark.slow
def test_more_programs_that_end_while_daemon_threads_do(tmp_path):
    """WAITS and ENDS again with more processes, because their timing varies between runs."""
    for n, rest in enumerate((WAITS, ENDS)):
        text = PAIRS.replace("PROCESSES", "6") + rest
        assert ended(text, f"{tmp_path}/{n}")[0] == ["0"] * 6


def test_a_thread_that_waits_is_joined_at_the_end(programs):
    assert programs["joins"].result()[0][-2:] == ["ended", "True"]


def closed_at_once(me: RankContext, groups: int, threads: int) -> int:
    """Several threads shut down the same groups at once, while calls are in flight."""
    made = [dist.new_group([0, 1]) for _ in range(groups)]
    works = []
    if me.rank == 0:
        works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in made]
        together = threading.Barrier(groups * threads)

        def shut_down(backend: Any) -> None:
            together.wait()
            backend.shutdown()

        closing = [
            threading.Thread(target=shut_down, args=(backend_of(group),))
            for group in made
            for _ in range(threads)
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
    failed = sum("CollectiveError" in caught(work.wait).kinds for work in works)
    dist.barrier()
    for group in made:
        dist.destroy_process_group(group)
    return failed


def test_threads_that_shut_a_group_down_at_once():
    with fresh(2) as pool:
        assert pool.run(closed_at_once, 60, 3, seconds=60)[0] == 60
