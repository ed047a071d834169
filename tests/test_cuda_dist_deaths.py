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
from dist_pool import OURS, Caught, Pool, RankContext, caught, fresh, started_jobs
from dist_sites import LARGE, until
from test_cuda_dist_faults import FAULTY_RANK, NOTICE_SECONDS, die, survivors, warm

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")


def lost_rank_before_mapping(me: RankContext) -> Caught:
    """A rank dies after all ranks agreed on a call, and before its peers have mapped its tensor."""
    x, whole = me.site.symmetric(LARGE).fill_(me.rank), me.site.symmetric(me.world * LARGE)
    dist.all_reduce(torch.ones(1))
    if me.rank == FAULTY_RANK:
        me.fake.gpu.kill("map")
    else:
        me.fake.gpu.delay("map", 0.3)
    return caught(dist.all_gather_into_tensor, whole, x)


def test_a_death_before_a_tensor_is_mapped():
    """The error names the dead rank, not the ranks that could not map its memory."""
    with fresh(3, site="eager:cuda_ipc") as pool:
        for error in survivors(pool, lost_rank_before_mapping):
            assert error.kind == "PeerLost", error
            assert "rank 1 (pid " in error.text


def lost_rank_after_return(
    me: RankContext, calls_again: bool, refused_before: bool
) -> tuple[list[float], str, Caught]:
    """A rank dies after a call returned on all hosts; with `calls_again` survivors make another."""
    dist.all_reduce(torch.ones(3))
    if refused_before:
        assert caught(dist.all_reduce, torch.ones(3 + me.rank)).kind == "ValueError"
    me.site.run_ahead()
    x = torch.full((5,), me.rank + 1.0)
    if me.rank == FAULTY_RANK:
        me.site.stall()
    dist.all_reduce(x)
    if me.rank == FAULTY_RANK:
        die(0.3)
    time.sleep(1.5)
    me.site.synchronize()
    later_kind = caught(dist.all_reduce, torch.ones(3)) if calls_again else None
    return x.tolist(), later_kind.kind if later_kind else "", caught(dist.destroy_process_group)


@pytest.mark.parametrize(
    ("calls_again", "refused_before"), [(False, False), (False, True), (True, False)]
)
def test_missing_results_are_reported(calls_again, refused_before):
    """Without another call, destroying the group reports the missing results."""
    with fresh(3, site="late:cuda_ipc") as pool:
        for rank, (values, later_kind, error) in zip(
            (0, 2),
            survivors(pool, lost_rank_after_return, calls_again, refused_before),
            strict=True,
        ):
            assert values == [rank + 1.0] * 5
            assert (later_kind, error.kind) == (
                ("PeerLost", "") if calls_again else ("", "PeerLost")
            ), error


def lost_rank_while_hosts_are_blocked(
    me: RankContext, call: str
) -> tuple[bool, float, str, list[float], list[str]]:
    """A rank dies after it enqueued its part; its peers' hosts are blocked in this CUDA call."""
    x = warm(me)
    me.site.run_ahead()
    if me.rank == FAULTY_RANK:
        me.site.stall()
    else:
        me.fake.gpu.block(call)
    begin = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    if me.rank == FAULTY_RANK:
        die(0.3)
    over = until(work.is_completed)
    took, message = time.monotonic() - begin, str(work.exception())
    me.fake.gpu.block(call, False)
    me.site.synchronize()
    return over, took, message, x.unique().tolist(), me.site.violations()


@pytest.mark.parametrize("call", ["launch", "wait_value", "query"])
def test_a_death_releases_hosts_that_cuda_blocks(call):
    """The queue of a stream may be full, and a call may need a lock that a blocked call holds."""
    with fresh(3, site="eager:cuda_ipc") as pool:
        for over, took, message, values, violations in survivors(
            pool, lost_rank_while_hosts_are_blocked, call
        ):
            assert over
            assert took < 0.3 + NOTICE_SECONDS
            assert f"rank {FAULTY_RANK} (pid" in message
            assert values == [3.0]
            assert violations == []


def lost_rank_after_its_part(me: RankContext, call: str) -> tuple[str, list[float]]:
    """A rank that has completed its part dies while a peer's stream is slow: no call fails."""
    dist.all_reduce(torch.ones(3))
    me.site.run_ahead(0.0001 if me.rank == FAULTY_RANK else 0.2)
    y = torch.full((20,), float(me.rank))[::2]  # strided: the result is copied back at the end
    work = {
        "broadcast": lambda: dist.broadcast(y, FAULTY_RANK, async_op=True),
        "all_reduce": lambda: dist.all_reduce(y, async_op=True),
    }[call]()
    if me.rank == FAULTY_RANK:
        assert until(work.is_completed)
        os.kill(os.getpid(), signal.SIGKILL)
    assert until(work.is_completed)
    error = caught(work.wait)
    me.fake.gpu.set_pause(0.0001)
    me.site.synchronize()
    return error.kind, y.unique().tolist()


@pytest.mark.parametrize(
    ("call", "value"), [("broadcast", float(FAULTY_RANK)), ("all_reduce", 3.0)]
)
def test_a_death_after_the_ranks_part_fails_no_call(call, value):
    with fresh(3, site="late:cuda_ipc") as pool:
        assert survivors(pool, lost_rank_after_its_part, call) == [("", [value])] * 2


def work_outlives_group(me: RankContext) -> tuple[str, float]:
    """Peers notice that a rank has left its group although it still holds a Work."""
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    if me.rank == FAULTY_RANK:
        dist.destroy_process_group()
        assert work.is_completed()
        return "", 0.0
    time.sleep(0.5)
    begin = time.monotonic()
    return caught(dist.all_reduce, torch.ones(10)).kind, time.monotonic() - begin


def test_peers_notice_a_destroyed_group_whose_work_lives():
    with fresh(2, site="eager:cuda_ipc") as pool:
        kind, took = pool.run(work_outlives_group)[0]
        assert kind == "PeerLost"
        assert took < 3.0


def lost_rank_in_a_cuda_call(
    me: RankContext, call: str, after: int
) -> tuple[list[Caught], float, list[str]]:
    """The faulty rank dies in a CUDA call of bootstrap, of a collective or of group destruction."""
    site = me.start(f"{call}_{after}")
    if me.rank == FAULTY_RANK:
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
    jobs = {call: (lost_rank_in_a_cuda_call, call, CALLS[call]) for call in CALLS}
    yield from started_jobs(jobs, 3, group=False, site="late:cuda_ipc")


@pytest.mark.slow  # starts three ranks for each call
@pytest.mark.parametrize("call", CALLS)
def test_a_death_in_a_cuda_call(deaths, call):
    """Survivors get data or an error in time, and free no memory that a peer has mapped."""
    for rank, outcome in enumerate(deaths[call].collect_outcomes()):
        if rank == FAULTY_RANK:
            assert outcome.died
            continue
        errors, took, violations = outcome.value
        assert all(not e.kind or "CollectiveError" in e.kinds for e in errors), errors
        assert took < 15.0
        assert violations == []
