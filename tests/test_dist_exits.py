"""Programs that end or fork, and threads that end a group, while groups have work under way."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Me, backend_of, caught, fresh, own_process
from dist_waits import DESTROYED

pytestmark = pytest.mark.skipif(not OURS, reason="never ends, or by a crash")

PROGRAM = """
import gc, os, sys, time
there, here = os.pipe()
rank = 0 if os.fork() else 1
import pycollect, torch, torch.distributed as dist
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


def test_a_program_that_ends_with_much_under_way(tmp_path):
    """One time of grace, however many groups there are."""
    end, *said = own_process(["-c", PROGRAM + MUCH, f"{tmp_path}/store"], 100).split()
    assert said == ["over"] * 8
    assert time.monotonic() - float(end) < 2 * DESTROYED + 4


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


def test_a_fork_while_another_thread_asks(tmp_path):
    """No lock that a thread of the parent's holds is waited for."""
    said = own_process(["-W", "ignore", "-c", PROGRAM + FORKS, f"{tmp_path}/store"], 100)
    assert said.split() == ["hung", "0"]


HOLDS = """
other = pycollect._C.make_backend(dist.HashStore(), 0, 1, pycollect.distributed.options())
work = dist.all_reduce(torch.zeros(3), group=groups[0], async_op=True)
future = work.get_future().then(lambda f, group=other: print("over"))
del other, work, future
print("end", flush=True)
"""


def test_a_callback_that_holds_another_group(tmp_path):
    """Which ends with it, while the interpreter ends all groups."""
    said = own_process(["-c", PROGRAM + HOLDS, f"{tmp_path}/store"], 60)
    assert said.split() == ["end", "over"]


WAITS = """
import subprocess, sys
RANK = '''
import sys, threading, time, torch, torch.distributed as dist, pycollect
rank = int(sys.argv[1])
dist.init_process_group("pycollect", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
for _ in range(30):  # so many that some come late
    threading.Thread(target=lambda: dist.recv(torch.ones(3), 1 - rank), daemon=True).start()
time.sleep(0.5)
'''
for run in range(3):
    ranks = [[sys.executable, "-c", RANK, str(rank), sys.argv[1] + str(run)] for rank in range(2)]
    pair = [subprocess.Popen(rank, stderr=subprocess.DEVNULL) for rank in ranks]
    print(*[rank.wait() for rank in pair])
"""


def test_programs_that_end_while_daemon_threads_wait(tmp_path):
    """The threads wake when the groups end, and the interpreter has no lock for them any more."""
    said = own_process(["-c", WAITS, f"{tmp_path}/store"], 200)
    assert said.split() == ["0"] * 6


ENDS = """
import subprocess, sys
RANKS = '''
import os, sys, threading, time
reader, writer = os.pipe()
rank = 1 if os.fork() == 0 else 0
import pycollect, torch, torch.distributed as dist
dist.init_process_group("pycollect", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    os.close(writer)
    os.read(reader, 1)  # until rank 0 has ended
    os._exit(0)
work = dist.all_reduce(torch.ones(3), async_op=True)  # which rank 1 does not come to
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
end = dist.destroy_process_group if sys.argv[2] == "destroy" else backend.shutdown
del backend
threading.Thread(target=end, daemon=True).start()
time.sleep(0.1)
'''
for run in range(4):
    ways = ["destroy", "shutdown"]
    ranks = [[sys.executable, "-c", RANKS, sys.argv[1] + way + str(run), way] for way in ways]
    pair = [subprocess.Popen(rank, stderr=subprocess.DEVNULL) for rank in ranks]
    print(*[rank.wait() for rank in pair])
"""


def test_programs_that_end_while_daemon_threads_end_groups(tmp_path):
    said = own_process(["-c", ENDS, f"{tmp_path}/store"], 200)
    assert said.split() == ["0"] * 8


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


def test_a_thread_that_waits_is_joined_at_the_end(tmp_path):
    assert "ended True" in own_process(["-c", JOINS, f"{tmp_path}/store"], 100)


def closed_at_once(me: Me, groups: int, threads: int) -> int:
    """Several threads shut the same group down while a call is under way, and so many groups."""
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
