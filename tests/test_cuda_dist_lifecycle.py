"""Life cycle of groups that move CUDA tensors: destroying a group leaks nothing, takes a limited
time even if a device's work does not end, and frees no memory that a device may still access.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import test_dist_work
import torch
import torch.distributed as dist
from devices import LARGE, until
from dist_pool import OURS, Caught, RankContext, backend_of, caught, fresh
from faults import FAULTY_RANK
from sites import EMULATED, REAL, sites

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
LIMIT = 25.0  # seconds within which a group is destroyed, whatever its devices do


def warm(me: RankContext) -> torch.Tensor:
    """Run a first call on all ranks; return a tensor of threes."""
    count = LARGE if me.site.real else 1000
    dist.all_reduce(torch.full((count,), 3.0))
    me.site.synchronize()
    dist.barrier()
    return torch.full((count,), 3.0)


# --- repeated creation and destruction of groups --------------------------------------------------


def use_a_group_once(me: RankContext, site: Any, i: int) -> None:
    """Use a group once: calls, some never waited for, messages and a subgroup."""
    x, y, z = torch.ones(1000), torch.full((LARGE,), float(me.rank)), torch.zeros(LARGE)
    dist.all_reduce(x)
    group = dist.new_group(pg_options=site.options) if i % 4 == 1 else None
    works = [dist.all_reduce(x, group=group, async_op=True)]
    works += [dist.isend(y, 1 - me.rank), dist.irecv(z, 1 - me.rank)]
    for work in works if i % 3 else []:
        work.wait()
    dist.destroy_process_group()
    site.synchronize()
    assert bool(z.eq(1 - me.rank).all())


def cycles(me: RankContext, count: int) -> list[Any]:
    left: list[Any] = []
    held = 0  # bytes on a GPU, after half of the cycles
    for i in range(count):
        site = me.start(f"cycle_{i}")
        use_a_group_once(me, site, i)
        left += [found] if any(found := (site.unreleased(), site.violations())) else []
        if site.real and i >= count // 2:
            held = held or torch.cuda.memory_allocated()
            left += [more] if (more := torch.cuda.memory_allocated() - held) > 0 else []
        del site
    return left


@pytest.mark.parametrize("site", sites("eager", *REAL))
def test_groups_leave_nothing_behind(site):
    count = int(os.environ.get("PYCOLLECT_TEST_CYCLES", "16"))
    with fresh(2, group=False, site=site) as pool:
        assert pool.run(cycles, count, seconds=300.0) == [[], []]


@pytest.mark.parametrize("site", sites(*EMULATED, *REAL))
def test_groups_that_cross_in_any_order(pools, site):
    pools(3, site=site).run(test_dist_work.cycle)


# --- destroying a group ---------------------------------------------------------------------------


def shut_down_twice(me: RankContext) -> list[bool]:
    """Two threads shut a group down: return whether each waits for the call in flight."""
    x = torch.ones(LARGE)
    dist.all_reduce(x)
    me.site.stall()
    me.site.fill_later(x, 2.0)  # the collective waits for it
    work = dist.all_reduce(x, async_op=True)
    threads = [threading.Thread(target=backend_of().shutdown) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    waiting = [thread.is_alive() for thread in threads]
    me.site.resume()
    for thread in threads:
        thread.join()
    work.wait()
    assert x.eq(2 * me.world).all()
    return waiting


def test_two_threads_shut_a_group_down():
    with fresh(2, site="late") as pool:
        assert pool.run(shut_down_twice) == [[True, True]] * 2


def destroyed_with_a_stuck_stream(me: RankContext) -> tuple[float, Caught, list[float]]:
    """One rank's stream waits for work of another library, which ends after the group."""
    x = warm(me)
    earlier = dist.all_reduce(torch.ones(1000), async_op=True)
    until(earlier.is_completed)
    if me.rank == FAULTY_RANK:
        me.site.stall()
    me.site.run_ahead()
    work = dist.all_reduce(x, async_op=True)
    begin = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - begin
    earlier.wait()
    error = caught(work.wait)
    me.site.resume()
    me.site.synchronize()
    return took, error, x.unique().tolist()


@pytest.mark.slow  # waits for the limits of the device's work
@pytest.mark.parametrize("site", EMULATED)
def test_a_stream_that_does_not_end(site):
    with fresh(3, site=site) as pool:
        for took, error, values in pool.run(destroyed_with_a_stuck_stream, seconds=2 * LIMIT):
            assert took < LIMIT
            assert "CollectiveError" in error.kinds, error
            assert values == [3.0]


def foreign_memory(me: RankContext, call: str) -> list[float]:
    """Memory of another library is released, and its owner uses it again, after the group's end."""
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    me.site.run_ahead(0.002)
    y = me.fake.empty_foreign(64).fill_(1.0 + me.rank)
    if call == "all_reduce":
        dist.all_reduce(y, async_op=True).wait()
    elif me.rank == 0:
        dist.send(y, 1)
    elif me.rank == 1:
        dist.irecv(y, 0).wait()
    del y
    dist.destroy_process_group()
    z = me.fake.empty_foreign(64).fill_(-1.0)
    me.site.resume()
    me.site.synchronize()
    time.sleep(0.2)
    return z.unique().tolist()


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_foreign_memory_is_held_until_the_device_is_done(call):
    with fresh(3, site="late") as pool:
        assert pool.run(foreign_memory, call) == [[-1.0]] * 3


def beside_a_capture(me: RankContext) -> tuple[Caught, dict[str, int], list[str]]:
    """Another thread captures meanwhile, as the emulator does for all threads."""
    dist.all_reduce(warm(me))
    me.site.synchronize()
    errors: list[Caught] = []
    with me.site.capturing():
        thread = threading.Thread(target=lambda: errors.append(caught(dist.destroy_process_group)))
        thread.start()
        thread.join()
    return errors[0], me.site.unreleased(), me.site.violations()


@pytest.mark.parametrize("site", sites(*EMULATED, *REAL, stands_in=False))
def test_a_group_ends_beside_a_capture(site):
    """Nothing is left, and nothing waits for the whole device, which would end the capture."""
    with fresh(3, site=site) as pool:
        for error, left, violations in pool.run(beside_a_capture):
            assert (error.kind, left, violations) == ("", {}, []), error
