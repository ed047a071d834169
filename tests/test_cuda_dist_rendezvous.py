"""Bootstrap of the CUDA IPC transport on emulated devices: each CUDA call fails on one rank, and
all ranks select the same transport. Memory is passed to the peers as file descriptors.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import re
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Pool, RankContext, caught, fresh, started_jobs
from test_cuda_dist_faults import FAULTY_RANK
from test_cuda_dist_lifecycle import connect, memory_of_groups

pytestmark = pytest.mark.skipif(not OURS, reason="tests the staging buffers of pycollect")


def allow_threads(on: bool) -> None:
    """Set the default thread stack size; with `on` False so large that no thread can start."""
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    assert libc.pthread_attr_init(attributes) == 0
    size = ctypes.c_size_t(1 << (23 if on else 46))
    assert libc.pthread_attr_setstacksize(attributes, size) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0


def bootstrap_with_fault(
    me: RankContext, call: str, after: int, dropped: bool = False, turn: int = 0
) -> tuple[Any, ...]:
    """Bootstrap while, on one rank, a CUDA call fails, does nothing, or no thread can start."""
    site = me.start(f"{call}_{turn}")
    if call == "thread":
        dist.barrier(async_op=True).wait()  # starts the work queue's thread
        time.sleep(0.2)  # until it is idle: while it completes a future, a call needs another one
        allow_threads(me.rank != FAULTY_RANK)
    elif me.rank == FAULTY_RANK and dropped:
        site.fake.gpu.drop(call)
    elif me.rank == FAULTY_RANK:
        site.fake.gpu.fail(call, after)
    x = torch.ones(100)
    first = caught(dist.all_reduce, x)
    allow_threads(True)
    site.fake.gpu.fail(call, -1)
    site.fake.gpu.drop(call, False)
    second = caught(dist.all_reduce, x)
    staged, mapped = "copy_ caller" in site.calls(), site.fake.gpu.counters().get("mapped", 0)
    dist.destroy_process_group()
    return first, second, x.sum().item(), staged, mapped, site.alive(), site.violations()


MEMORY = ("register_host", "allocate", "create_stream", "fill", "export_memory", "map", "launch")
STEPS = [(call, 0) for call in (*MEMORY, "copy", "write_value", "wait_value", "thread")]
STEPS += [("launch", 3)]


@pytest.mark.parametrize(("call", "after"), STEPS)
def test_every_failing_step_of_the_bootstrap(call, after):
    """If one rank cannot share memory, no rank does, and every rank logs the reason once."""
    failure = f"CUDA error: injected failure in {call}"
    if call == "thread":
        failure = "this process cannot make another thread"
    with fresh(3, group=False, site="eager:auto", environ=(("PYCOLLECT_LOG", "info"),)) as pool:
        for turn in range(2):
            for first, second, *found in pool.run(bootstrap_with_fault, call, after, False, turn):
                assert (first.kind, second.kind) == ("", ""), (first, second)
                assert found == [900.0, True, 0, {}, []]
        why = f"PYCOLLECT_CUDA_TRANSPORT=cuda_ipc does not work here: rank {FAULTY_RANK}: "
        for rank in range(3):
            log = (pool.folder / f"rank_{rank}.log").read_text()
            assert log.count(why + failure) == 1, log
            assert log.count("PYCOLLECT_CUDA_TRANSPORT=host_staging: ") == 1, log
    with fresh(3, group=False, site="eager:cuda_ipc") as pool:
        for first, second, *_, left, violations in pool.run(bootstrap_with_fault, call, after):
            assert why + failure in first.text, first
            assert "does not work here" in second.text
            assert (left, violations) == ({}, [])


def bootstrapped_before(me: RankContext) -> tuple[Caught, float, list[str]]:
    site, x = me.start("bootstrapped_before"), torch.ones(100)
    dist.barrier(async_op=True).wait()
    connect(me)
    allow_threads(False)
    error = caught(dist.all_reduce, x)
    dist.destroy_process_group()
    allow_threads(True)
    return error, x.sum().item(), site.violations()


def test_calls_after_the_bootstrap_start_no_thread():
    with fresh(3, group=False, site="eager:cuda_ipc") as pool:
        for error, total, violations in pool.run(bootstrapped_before, seconds=30):
            assert (error.kind, total, violations) == ("", 300.0, []), error


def test_out_of_memory_and_a_failed_self_test():
    """Out of memory is resolved by emptying torch's cache; a lost kernel fails the self-test."""
    with fresh(3, group=False, site="eager:auto") as pool:
        for first, second, *found in pool.run(bootstrap_with_fault, "out of memory", 0):
            assert (first.kind, second.kind) == ("", ""), (first, second)
            assert found == [900.0, False, 2, {}, []]
    with fresh(3, group=False, site="eager:cuda_ipc") as pool:
        for first, *_ in pool.run(bootstrap_with_fault, "launch", 0, True):
            why = "rank 0: the self-test pattern that rank 1 wrote into this rank's GPU memory"
            assert f"{why} has not arrived" in first.text, first


def bootstrap_on_a_broken_device(me: RankContext) -> tuple[dict[str, int], int, list[str]]:
    """One rank's device does not tell whether its work has ended."""
    site = me.start("broken")
    if me.rank == FAULTY_RANK:
        site.fake.gpu.fail("query", 0)
    caught(dist.all_reduce, torch.ones(100))
    dist.destroy_process_group()
    return site.alive(), memory_of_groups(), site.violations()


def test_memory_that_a_device_may_still_access_stays_mapped():
    """Registered memory, too: its addresses must not be used again while the device knows them."""
    with fresh(3, group=False, site="eager:auto") as pool:
        found = pool.run(bootstrap_on_a_broken_device)
    kept, mappings, violations = found.pop(FAULTY_RANK)
    assert kept == {"allocated": 1, "registered": 1, "streams": 1}
    assert mappings > 0
    assert violations == []
    assert found == [({}, 0, [])] * 2


def bootstrap_blocked(me: RankContext, call: str) -> tuple[str, float, bool, list[str]]:
    """Bootstrap on devices on which this CUDA call blocks the host until the stream has done it."""
    site, x = me.start(call), torch.ones(100)
    site.fake.gpu.block(call)
    errors = [caught(dist.all_reduce, x) for _ in range(2)]
    dist.destroy_process_group()
    staged = "copy_ caller" in site.calls()
    return "".join(e.text for e in errors), x.sum().item(), staged, site.violations()


@pytest.mark.parametrize("call", ["launch", "wait_value"])
def test_a_bootstrap_with_cuda_launch_blocking(call):
    with fresh(3, group=False, site="late:cuda_ipc") as pool:
        assert pool.run(bootstrap_blocked, call) == [("", 900.0, False, [])] * 3


def bootstrap_on_an_occupied_gpu(me: RankContext) -> tuple[Any, ...]:
    """Streams that wait for a value keep the GPU that all ranks share."""
    site, x = me.start("occupied"), torch.ones(100)
    site.fake.gpu.occupy_gpu(os.environ["PYCOLLECT_TEST_GPU_LOCK"])
    error = caught(dist.all_reduce, x)
    dist.destroy_process_group()
    return error.text, x.sum().item(), "copy_ caller" in site.calls(), site.alive()


def slow_bootstrap(me: RankContext) -> tuple[Caught, dict[str, int], list[str]]:
    """One rank is so slow in the bootstrap that its peers time out while it has mapped memory."""
    site = me.start("slow_bootstrap", timeout=datetime.timedelta(seconds=2))
    site.fake.gpu.drop("write_value" if me.rank == FAULTY_RANK else "wait_value")
    return caught(dist.all_reduce, torch.ones(3)), site.alive(), site.violations()


@pytest.fixture(scope="module")
def slow_jobs() -> Iterator[dict[str, Pool]]:
    jobs = {
        "eager:auto": (bootstrap_with_fault, "write_value", 0, True),
        "eager:cuda_ipc": (slow_bootstrap,),
        "occupied": (bootstrap_on_an_occupied_gpu,),
    }
    each = {name: {"site": name} for name in jobs}
    with tempfile.NamedTemporaryFile() as lock:
        environ = (("PYCOLLECT_LOG", "info"), ("PYCOLLECT_TEST_GPU_LOCK", lock.name))
        each["occupied"] = {"site": "late:auto", "environ": environ}
        yield from started_jobs(jobs, 3, each, group=False)


@pytest.mark.slow  # waits for the 10 s limit of a bootstrap step
def test_lost_signals_end_the_bootstrap(slow_jobs):
    """One rank's writes are lost: the bootstrap ends on all ranks, and the device keeps no memory
    except what peers may have mapped."""
    for first, second, total, staged, _, left, violations in slow_jobs["eager:auto"].results(60):
        assert (first.kind, second.kind) == ("", ""), (first, second)
        assert (total, staged) == (900.0, True)
        assert (left, violations) == ({}, [])
    for error, left, violations in slow_jobs["eager:cuda_ipc"].results(60):
        assert error.kind == "Timeout", error
        assert f"rank {FAULTY_RANK} did not arrive" in error.text
        assert (left, violations) == ({}, [])


@pytest.mark.slow  # waits for the 10 s limit of a bootstrap step
def test_streams_that_occupy_the_gpu_are_not_used(slow_jobs):
    """A stream that waits may keep kernels of other processes from running: staging by the host."""
    pool = slow_jobs["occupied"]
    assert pool.results(60) == [("", 300.0, True, {})] * 3
    log = (pool.folder / "rank_0.log").read_text()  # the first rank to give up releases the others
    assert re.search(r"rank [012]: the GPU did not finish a self-test within 10 seconds", log)
