"""A process that can start no more threads: calls that need one raise on every rank; none hangs.

Thread stacks take address space. With stacks of 1 GiB, a limit of 0.5 GiB above the current size
prevents only new threads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dist_pool import OURS
from programs import run

pytestmark = pytest.mark.skipif(not OURS, reason="starts its threads with the group")

PROGRAM = """
import os, resource, sys, threading, time
GIB = 1 << 30
if resource.getrlimit(resource.RLIMIT_STACK)[0] != GIB:  # read when a program starts
    resource.setrlimit(resource.RLIMIT_STACK, (GIB, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
import torch, torch.distributed as dist
folder, *jobs = sys.argv[1:]
for job in jobs:  # two processes for each, all in parallel
    if os.fork() == 0:
        break
else:
    while jobs:
        os.wait()
        jobs.pop()
    os._exit(0)
output = os.open(folder + "/" + job + ".output", os.O_WRONLY | os.O_CREAT)
os.dup2(output, 1)
os.dup2(output, 2)
child = os.fork()
rank = 1 if child == 0 else 0
import pycollect
torch.set_num_threads(1)
where = "file://" + folder + "/" + job
dist.init_process_group("pycollect", init_method=where, rank=rank, world_size=2)
dist.all_reduce(torch.ones(3))

def limit(on):
    if rank == 0:
        pages = int(open("/proc/self/statm").read().split()[0])
        most = pages * resource.getpagesize() + GIB // 2 if on else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    return on

def caught(call, *args, **options):
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

def soon(ready):
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.001)

exec(open(folder + "/" + job + ".py").read())

if rank == 1:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("good", flush=True)
"""

ASYNCHRONOUS = """
x = torch.ones(3)
limit(True)
error = caught(lambda: dist.all_reduce(x, async_op=True).wait())
limit(False)
assert "thread" in error and ("rank 0 refused" in error or rank == 0), error
assert x.tolist() == [1, 1, 1]
x = torch.full((3,), 1.0 + rank)
future = dist.all_reduce(x, async_op=True).get_future()  # no thread waits for the work
soon(future.done)
assert future.wait()[0].tolist() == [3, 3, 3]
"""

BEHIND_ANOTHER = """
x, y, got = torch.ones(3), torch.ones(3), []
go, over = threading.Event(), threading.Event()
def second():  # calls while the first call runs
    go.wait()
    time.sleep(0.3)
    got.append(dist.all_reduce(y, async_op=True).get_future())
    limit(True)
    over.wait()  # its stack must not be reused
thread = threading.Thread(target=second)
thread.start()
if rank == 1:
    time.sleep(1.0)
go.set()
if rank == 1:
    time.sleep(1.0)
error = caught(dist.all_reduce, x)
soon(lambda: got and got[0].done())
limit(False)
over.set()
thread.join()
assert error == "nothing", error
assert (x.tolist(), y.tolist()) == ([2, 2, 2], [2, 2, 2])
"""

MESSAGES = """
y = torch.zeros(3)
if rank == 0:
    limit(True)
    errors = [caught(dist.isend, torch.full((3,), 1.0), 1), caught(dist.irecv, y, 1)]
    limit(False)
    assert all("thread" in error for error in errors), errors
    dist.send(torch.full((3,), 2.0), 1)
    work = dist.irecv(y, 1)
    soon(work.get_future().done)
    assert y.tolist() == [3, 3, 3]
else:
    dist.recv(y, 0)
    assert y.tolist() == [2, 2, 2]
    time.sleep(0.2)
    dist.send(torch.full((3,), 3.0), 0)
"""

# Every rank raises at the first of the coalesced calls, and no rank runs the other calls.
COALESCED = """
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
tensors = [torch.full((n,), 1.0 + rank) for n in (3, 4, 5)]
def batch():
    backend._start_coalescing()
    for i, x in enumerate(tensors):
        dist.broadcast(x, 1, async_op=True) if i == 1 else dist.all_reduce(x, async_op=True)
    backend._end_coalescing().wait()
limit(True)
error = caught(batch)
limit(False)
assert "thread" in error and ("rank 0 refused all_reduce" in error or rank == 0), error
assert [x.tolist() for x in tensors] == [[1.0 + rank] * n for n in (3, 4, 5)]
for n in (6, 7):  # a mismatch of size if a rank had run the other calls
    x = torch.ones(n)
    dist.all_reduce(x)
    assert x.tolist() == [2] * n
batch()
assert [x.tolist() for x in tensors] == [[3.0] * 3, [2.0] * 4, [3.0] * 5]
"""

JOBS = {
    "asynchronous": ASYNCHRONOUS,
    "behind_another": BEHIND_ANOTHER,
    "messages": MESSAGES,
    "coalesced": COALESCED,
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """Folder with the output of each job: "good", or the failure."""
    folder = tmp_path_factory.mktemp("jobs")
    for name, job in JOBS.items():
        (folder / f"{name}.py").write_text(job)
    ran = run([sys.executable, "-c", PROGRAM, str(folder), *JOBS], timeout=60)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.parametrize("job", JOBS)
def test_no_more_threads(outputs, job):
    assert (outputs / f"{job}.output").read_text() == "good\n"
