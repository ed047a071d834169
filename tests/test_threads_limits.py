"""Time limits of ranks as threads: calls that run, and futures.

A call that ends with an exception does not write its tensor afterwards. A future ends at the
group's timeout, though nobody waits for its work.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycollect as pc
from pycollect import threads

LARGE = 40_000_000  # elements: a call takes longer than the limits below
SHORT = datetime.timedelta(milliseconds=20)


def reduced(rank: int, x: torch.Tensor, group: Any) -> None:
    dist.all_reduce(x, group=group)


def received(rank: int, x: torch.Tensor, group: Any) -> None:
    if rank == 1:
        dist.send(x, 0, group=group)
    else:
        dist.recv(x, 1, group=group)


@pytest.mark.parametrize("call", [reduced, received])
def test_a_call_that_raised_writes_nothing_later(
    call: Callable[[int, torch.Tensor, Any], None],
) -> None:
    def program(rank: int, world: int, late: float) -> tuple[bool, float, float]:
        x = torch.full((LARGE,), rank + 1.0)
        group = dist.new_group()
        group._get_backend(torch.device("cpu")).set_timeout(SHORT)
        dist.barrier()
        if rank == 1:
            time.sleep(late)
        raised = False
        try:
            call(rank, x, group)
        except pc.CollectiveError:
            raised = True
        at_the_end = x[-1].item()
        time.sleep(0.1)
        return raised, at_the_end, x[-1].item()

    for late in (0.002, 0.015, 0.1):
        outcomes = threads.launch(program, 2, late, parallel=True, timeout=60)
        for _, at_the_end, later in outcomes:
            assert at_the_end == later
        raised, at_the_end, _ = outcomes[0]
        assert (at_the_end == 1.0) == raised


def test_a_wait_with_a_limit_ends_without_harm() -> None:
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


def wait(work: Any) -> None:
    work.wait()


def wait_of_torch(work: Any) -> None:
    work.get_future().wait()


def callback(work: Any) -> None:
    work.get_future().then(lambda f: f.value()).wait()


@pytest.mark.parametrize(
    ("end", "message"), [(wait, False), (wait_of_torch, False), (callback, True)]
)
def test_a_work_ends_at_the_groups_timeout(end: Callable[[Any], None], message: bool) -> None:
    def program(rank: int, world: int) -> str:
        group = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
        if rank == 1:
            time.sleep(0.6)  # at work, so this is no deadlock
            return ""
        x = torch.ones(10)
        if message:
            work = dist.irecv(x, 1, group=group)
        else:
            work = dist.all_reduce(x, group=group, async_op=True)
        with pytest.raises(pc.Timeout if end is wait else RuntimeError) as raised:
            end(work)
        return str(raised.value)

    begin = time.monotonic()
    error = threads.launch(program, 2, parallel=True, timeout=30)[0]
    assert ("recv #0" if message else "all_reduce #0") in error
    assert "Timed out after 0.3 s; rank 1 did not arrive" in error
    assert time.monotonic() - begin < 3
