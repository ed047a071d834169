"""Waits on ranks as threads: futures, time limits, and process groups of other ranks."""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import (
    PARALLEL,
    diagnose,
    ends_within,
    total,
)

import pycollect as pc
from pycollect import threads

# --- futures --------------------------------------------------------------------------------------


NEVER_POSTED = """
import sys, time, torch, torch.distributed as dist, pycollect as pc
from pycollect import threads

def program(rank, world):
    if rank == 1:
        dist.recv(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()

begin = time.monotonic()
try:
    threads.launch(program, 3, timeout=20, parallel=sys.argv[1] == "True")
except pc.Deadlock:
    print("deadlock", time.monotonic() - begin < 5)
"""


@PARALLEL
def test_a_future_of_a_work_that_a_peer_never_posts(parallel):
    """In a process of its own: a thread of another test could be the one that is awaited."""
    command = [sys.executable, "-W", "ignore", "-c", NEVER_POSTED, str(parallel)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout == "deadlock True\n", found.stdout + found.stderr


@PARALLEL
def test_a_future_of_a_work_of_which_a_peer_has_ended(parallel):
    def program(rank: int, world: int) -> None:
        if rank != 1:
            dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()

    with ends_within(5), pytest.raises(pc.CollectiveError) as caught:
        threads.launch(program, 3, timeout=20, parallel=parallel)
    assert not isinstance(caught.value, pc.Timeout), caught.value


@PARALLEL
def test_a_rank_that_makes_no_backward_pass_of_ddp(parallel):
    import torch._dynamo

    def program(rank: int, world: int) -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        if rank != 0:
            model(torch.ones(2, 3)).sum().backward()

    with ends_within(5), pytest.raises(RuntimeError) as caught:
        threads.launch(program, 3, timeout=20, parallel=parallel)
    assert not isinstance(caught.value, pc.Timeout), caught.value


# --- time -----------------------------------------------------------------------------------------


def test_a_late_rank_exceeds_the_timeout_of_a_group():
    def program(rank: int, world: int) -> None:
        group = dist.new_group(timeout=datetime.timedelta(seconds=0.2))
        if rank == 1:
            time.sleep(0.6)
        dist.all_reduce(torch.ones(2), group=group)

    found = diagnose(program, parallel=True)
    assert isinstance(found.error, pc.Timeout), repr(found.error)
    assert "all_reduce #0" in str(found.error)
    assert "Timed out after 0.2 s" in str(found.error)
    assert "rank 1 did not arrive" in str(found.error)


def test_a_wait_with_a_limit_ends_without_harm():
    def program(rank: int, world: int) -> float:
        x = torch.ones(2)
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            with pytest.raises(Exception, match="all_reduce #0"):
                work.wait(datetime.timedelta(milliseconds=50))
            dist.send(torch.ones(1), 1)
            work.wait()
        else:
            if rank == 1:
                dist.recv(torch.ones(1), 0)
            dist.all_reduce(x)
        return x[0].item()

    assert threads.launch(program, 3, timeout=10) == [3.0] * 3


# --- objects of other ranks -----------------------------------------------------------------------


def test_a_group_of_another_rank_is_refused():
    shared: dict[str, Any] = {}

    def program(rank: int, world: int) -> None:
        group = shared.setdefault("group", dist.group.WORLD)
        dist.all_reduce(torch.ones(2), group=group)

    found = diagnose(program)
    assert isinstance(found.error, (ValueError, pc.CollectiveError))
    assert found.by != 2


def test_a_group_object_used_without_torch_names_its_rank():
    shared: dict[str, Any] = {}

    def program(rank: int, world: int) -> None:
        group = shared.setdefault("group", dist.group.WORLD)
        group.allreduce([torch.ones(2)]).wait()

    found = diagnose(program)
    owner = str(({0, 1, 2} - {found.by} - set(found.others) or {2}).pop())
    texts = [str(found.error), *found.others.values()]
    assert any("each rank has process groups of its own" in text for text in texts), texts
    assert owner


@pytest.mark.parametrize("end", ["wait", "is_completed"])
def test_a_work_of_another_rank_is_refused(end):
    shared: list[dist.Work] = []

    def program(rank: int, world: int) -> None:
        if rank == 0:
            shared.append(dist.all_reduce(torch.ones(2), async_op=True))
            dist.barrier()
        elif rank == 1:
            while end == "is_completed" and not shared[0].is_completed():
                pass
            shared[0].wait()

    found = diagnose(program)
    assert isinstance(found.error, pc.CollectiveError)
    assert found.by == 1
    assert "rank 1 of the launch used group" in str(found.error)


def test_monitored_barrier_with_an_absent_rank():
    def program(rank: int, world: int) -> None:
        if rank != 2:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))

    found = diagnose(program)
    assert isinstance(found.error, (ValueError, RuntimeError))


def test_launches_work_after_all_of_these():
    assert threads.launch(total, 4) == [6.0] * 4
