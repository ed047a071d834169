"""CUDA tensors and ranks that die, come late, or ask for something else: an error, in time.

Every test has processes of its own, because it breaks them.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from dist_pool import Caught, Me, caught, fresh
from dist_rungs import RUNGS, on_rung
from homes import GPU

pytestmark = pytest.mark.cuda
COUNT = 1_000_000
VICTIM = 1
# Seconds after a death in which everybody has raised: the kernel tells of it when the driver has
# taken the dead process's context apart, which takes a second or two with several on one GPU.
NOTICED = 4.0
# Of a call, where a rank is late. The first one also meets: slabs, handles, a kernel to load.
LIMIT = 3.0
SECONDS = 120.0


def warm(me: Me) -> torch.Tensor:
    x = torch.ones(COUNT, device=GPU)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    return x


CALLS = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "async all_reduce": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "future": lambda x: dist.all_reduce(x, async_op=True).get_future().wait(),
    "recv": lambda x: dist.recv(x, VICTIM),
}


def bereaved(me: Me, call: str) -> tuple[float, Caught, Caught, float]:
    x = warm(me)
    dist.barrier()
    if me.rank == VICTIM:
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    error = caught(CALLS[call], x)
    again = caught(dist.all_reduce, x)
    torch.cuda.synchronize()  # no stream is left blocked
    return begin, error, again, x.sum().item()


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_is_killed(call, rung):
    with fresh(3, environ=on_rung(rung)) as pool:
        for rank, outcome in enumerate(pool.outcomes(bereaved, call, seconds=SECONDS)):
            assert outcome.died == (rank == VICTIM)
            if rank == VICTIM:
                continue
            assert not outcome.error, outcome.error
            begin, error, again, _ = outcome.value
            assert call == "future" or error.kind == "PeerLost", error
            assert f"rank {VICTIM}" in error.text
            assert error.when - begin < 0.4 + NOTICED
            assert "CollectiveError" in again.kinds, again


def late(me: Me, asleep: bool) -> tuple[float, Caught]:
    """The victim comes too late: its process, or its stream."""
    x = warm(me)
    dist.barrier()
    begin = time.monotonic()
    if me.rank == VICTIM and asleep:
        for _ in range(300):  # 7 seconds or more
            torch.cuda._sleep(50_000_000)
    elif me.rank == VICTIM:
        time.sleep(2 * LIMIT)
    error = caught(dist.all_reduce, x)
    if not error.kind:  # the host has waited for no stream, and hears of it in the next call
        torch.cuda.synchronize()
        error = caught(dist.all_reduce, x)
    return begin, error


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("asleep", [False, True], ids=["process", "stream"])
def test_a_rank_is_late(asleep, rung):
    with fresh(3, timeout=LIMIT, environ=on_rung(rung)) as pool:
        pool.outcomes(warm_only, seconds=SECONDS)
        for rank, outcome in enumerate(pool.outcomes(late, asleep, seconds=SECONDS)):
            assert not outcome.error, outcome.error
            begin, error = outcome.value
            assert "Timeout" in error.kinds, error
            assert f"rank {VICTIM}" in error.text
            if rank != VICTIM:
                assert error.when - begin < LIMIT + NOTICED


def warm_only(me: Me) -> None:
    """A context and pinned memory, which may take longer than the time limit of a call."""
    torch.ones(COUNT, device=GPU).cpu()
    torch.ones(COUNT).pin_memory()


def disagreeing(me: Me) -> tuple[Caught, float]:
    x = warm(me)
    error = caught(dist.all_reduce, x[: COUNT - (me.rank == VICTIM)])
    y = torch.ones(3, device=GPU)
    dist.all_reduce(y)
    return error, y.sum().item()


@pytest.mark.parametrize("rung", RUNGS)
def test_ranks_disagree(rung):
    with fresh(3, environ=on_rung(rung)) as pool:
        for error, total in pool.run(disagreeing, seconds=SECONDS):
            assert error.kind == "ValueError", error
            assert total == 9.0


def cycles(me: Me, count: int) -> int:
    """Bytes of the GPU that this process has lost to groups that are gone."""
    before = 0
    for i in range(count):
        me.init(f"cycle_{i}")
        x = torch.ones(1000, device=GPU)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.destroy_process_group()
        del x, work
        if i == 1:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("rung", RUNGS)
def test_groups_come_and_go(rung):
    count = int(os.environ.get("PYCOLLECT_TEST_CYCLES", "20"))
    with fresh(2, group=False, environ=on_rung(rung)) as pool:
        assert pool.run(cycles, count, seconds=SECONDS) == [0, 0]
