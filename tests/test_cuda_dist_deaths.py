"""Rank deaths with emulated GPU staging buffers: in any CUDA call, or after all hosts returned.

Every survivor gets its data or an error, and every error is reported.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Pool, RankContext, begun, caught, fresh
from dist_sites import LARGE, until
from test_cuda_dist_faults import KILLED_RANK, die, survivors

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")


def unopened(me: RankContext) -> Caught:
    """A rank dies after all ranks agreed on a call, and before its peers have mapped its tensor."""
    x, whole = me.site.make(LARGE).fill_(me.rank), me.site.make(me.world * LARGE)
    dist.all_reduce(torch.ones(1))
    if me.rank == KILLED_RANK:
        me.fake.gpu.kill("map")
    else:
        me.fake.gpu.delay("map", 0.3)
    return caught(dist.all_gather_into_tensor, whole, x)


def test_a_death_before_a_tensor_is_opened():
    """The error names the dead rank, not the ranks that could not map its memory."""
    with fresh(3, site="eager:cuda_ipc") as pool:
        for error in survivors(pool, unopened):
            assert error.kind == "PeerLost", error
            assert "rank 1 (pid " in error.text


def untold(me: RankContext, asks: bool) -> tuple[list[float], str, Caught]:
    """A rank dies after the call returned on all hosts; `asks`: survivors make another call."""
    dist.all_reduce(torch.ones(3))
    me.site.run_ahead()
    x = torch.full((5,), me.rank + 1.0)
    if me.rank == KILLED_RANK:
        me.site.stall()
    dist.all_reduce(x)
    if me.rank == KILLED_RANK:
        die(0.3)
    time.sleep(1.5)
    me.site.settle()
    asked = caught(dist.all_reduce, torch.ones(3)) if asks else None
    return x.tolist(), asked.kind if asked else "", caught(dist.destroy_process_group)


@pytest.mark.parametrize("asks", [False, True])
def test_results_that_were_not_written_are_no_secret(asks):
    """Without another call, destroying the group reports the missing results."""
    with fresh(3, site="late:cuda_ipc") as pool:
        for rank, (values, asked, error) in zip((0, 2), survivors(pool, untold, asks), strict=True):
            assert values == [rank + 1.0] * 5
            assert (asked, error.kind) == (("PeerLost", "") if asks else ("", "PeerLost")), error


def through(me: RankContext, call: str) -> tuple[str, list[float]]:
    """A rank that has completed its part dies while a peer's stream is slow: no call fails."""
    dist.all_reduce(torch.ones(3))
    me.site.run_ahead(0.0001 if me.rank == KILLED_RANK else 0.2)
    y = torch.full((20,), float(me.rank))[::2]  # strided: the result is copied back at the end
    work = {
        "broadcast": lambda: dist.broadcast(y, KILLED_RANK, async_op=True),
        "all_reduce": lambda: dist.all_reduce(y, async_op=True),
    }[call]()
    if me.rank == KILLED_RANK:
        assert until(work.is_completed)
        os.kill(os.getpid(), signal.SIGKILL)
    assert until(work.is_completed)
    error = caught(work.wait)
    me.fake.gpu.pace(0.0001)
    me.site.settle()
    return error.kind, y.unique().tolist()


@pytest.mark.parametrize(
    ("call", "value"), [("broadcast", float(KILLED_RANK)), ("all_reduce", 3.0)]
)
def test_a_death_of_a_rank_that_is_through_with_a_call(call, value):
    with fresh(3, site="late:cuda_ipc") as pool:
        assert survivors(pool, through, call) == [("", [value])] * 2


def holds_on(me: RankContext) -> tuple[str, float]:
    """Peers notice that a rank has left its group although it still holds a Work."""
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    if me.rank == KILLED_RANK:
        dist.destroy_process_group()
        assert work.is_completed()
        return "", 0.0
    time.sleep(0.5)
    begin = time.monotonic()
    return caught(dist.all_reduce, torch.ones(10)).kind, time.monotonic() - begin


def test_a_work_that_outlives_its_group():
    with fresh(2, site="eager:cuda_ipc") as pool:
        kind, took = pool.run(holds_on)[0]
        assert kind == "PeerLost"
        assert took < 3.0


def dies_in_a_call(me: RankContext, call: str, after: int) -> tuple[list[Caught], float, list[str]]:
    """The victim dies in a CUDA call: of bootstrap, of a collective, or of group destruction."""
    site = me.start(f"{call}_{after}")
    if me.rank == KILLED_RANK:
        site.fake.gpu.kill(call, after)
    begin = time.monotonic()
    errors = [caught(dist.all_reduce, torch.ones(1000)) for _ in range(3)]
    dist.destroy_process_group()
    return errors, time.monotonic() - begin, site.violations()


# CUDA call -> successful calls before the death: bootstrap, collectives, group destruction.
CALLS = dict.fromkeys(("identity", "allocate", "register_host", "export_memory", "map"), 0)
CALLS |= {"create_stream": 0, "fill": 1, "copy": 0, "launch": 7, "write_value": 2, "wait_value": 4}
CALLS |= {"record": 8, "wait": 1, "query": 12, "unmap": 0, "unregister_host": 0}


@pytest.fixture(scope="module")
def deaths() -> Iterator[dict[str, Pool]]:
    jobs = {call: (dies_in_a_call, call, CALLS[call]) for call in CALLS}
    yield from begun(jobs, 3, group=False, site="late:cuda_ipc")


@pytest.mark.slow  # starts three ranks for each call
@pytest.mark.parametrize("call", CALLS)
def test_a_death_in_a_call(deaths, call):
    """Survivors get data or an error in time, and free no memory that a peer has mapped."""
    for rank, outcome in enumerate(deaths[call].answers()):
        if rank == KILLED_RANK:
            assert outcome.died
            continue
        errors, took, violations = outcome.value
        assert all(not e.kind or "CollectiveError" in e.kinds for e in errors), errors
        assert took < 15.0
        assert violations == []
