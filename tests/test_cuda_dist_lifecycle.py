"""Life cycle of groups that move CUDA tensors: destroying a group leaks nothing, whichever rank is
first, and tensors in shared memory may outlive the group or be created while it ends.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, RankContext, backend_of, caught, fresh
from dist_sites import GPU, LARGE, REAL, is_real, sites, until
from dist_waits import publish, wait_published

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
MIB = 1 << 20


# --- repeated creation and destruction of groups --------------------------------------------------


def resources_in_use(me: RankContext, name: str) -> tuple[int, int, int]:
    """Open descriptors, bytes of torch's allocator, and used bytes of the idle GPU (all users)."""
    files = len(os.listdir("/proc/self/fd"))
    if not me.site.real:
        return files, 0, 0
    me.site.synchronize()
    torch.cuda.empty_cache()
    publish(me, f"{name} before")
    wait_published(me, f"{name} before", range(me.world))
    free, total = torch.cuda.mem_get_info()
    publish(me, f"{name} after")
    wait_published(me, f"{name} after", range(me.world))
    return files, torch.cuda.memory_allocated(), total - free


def use_a_group_once(me: RankContext, site: Any, i: int) -> None:
    """Use a group once: calls (some never waited for), messages, a subgroup, and shared memory."""
    x, y, z = torch.ones(1000), torch.full((LARGE,), float(me.rank)), torch.zeros(LARGE)
    dist.all_reduce(x)
    group = dist.new_group(pg_options=site.options) if i % 4 == 1 else None
    works = [dist.all_reduce(x, group=group, async_op=True)]
    works += [dist.isend(y, 1 - me.rank), dist.irecv(z, 1 - me.rank)]
    for work in works if i % 3 else []:
        work.wait()
    symmetric = [site.symmetric(1000).fill_(1) for _ in range(3 * site.streams)]
    for tensor in symmetric[:2]:
        dist.all_reduce(tensor)
    del symmetric[: i % 2]
    dist.destroy_process_group()
    site.synchronize()
    assert bool(z.eq(1 - me.rank).all())
    assert not symmetric or symmetric[-1].eq(1).all()  # tensors may outlive the group
    symmetric.clear()


def cycles(me: RankContext, count: int, settled: int) -> tuple[list[Any], list[int]]:
    left, before = [], (0, 0, 0)
    for i in range(count):
        site = me.start(f"cycle_{i}")
        use_a_group_once(me, site, i)
        left += [found] if any(found := (site.unreleased(), site.violations())) else []
        del site
        if i + 1 == settled:
            before = resources_in_use(me, "early")
    return left, [b - a for a, b in zip(before, resources_in_use(me, "late"), strict=True)]


@pytest.mark.parametrize(
    ("site", "count"),
    [
        ("eager:cuda_ipc", 16),
        ("eager", 8),
        *(pytest.param(site, 40, marks=[pytest.mark.cuda, pytest.mark.slow]) for site in REAL),
    ],
)
def test_groups_leave_nothing_behind(site, count):
    count = int(os.environ.get("PYCOLLECT_TEST_CYCLES", count))
    settled = count // 4
    with fresh(2, group=False, site=site) as pool:
        for left, (files, bytes_of_torch, lost) in pool.run(cycles, count, settled, seconds=300.0):
            assert left == []
            assert files <= 0
            assert bytes_of_torch <= 0
            # A leak would cost at least one 2 MiB page of the GPU per cycle; the tolerance is half
            # of that, because CUDA itself may load a module late.
            assert lost < (count - settled) // 2 * 2 * MIB or not lost


def groups_in_a_cycle(me: RankContext, bound: bool) -> tuple[float, list[int], list[str]]:
    """Groups {0, 1}, {1, 2}, {0, 2}, each rank starting with another group: no order hangs.

    The default group bootstrapped in a first call, or at creation, bound to a device.
    """
    binds = {"device_id": torch.device(GPU)} if bound and me.site.real else {}
    site = me.start("circle", **binds)
    groups, memory = [], []
    if bound:
        connect(me)
    memory.append(site.allocations())
    site.run_ahead()
    for ranks in ((0, 1), (1, 2), (0, 2)):
        groups.append(dist.new_group(list(ranks), pg_options=site.options))
        if me.rank in ranks and bound:
            connect(me, groups[-1])
        elif me.rank in ranks:
            dist.all_reduce(torch.ones(3), group=groups[-1])
    memory.append(site.allocations())
    total = 0.0
    for turn in range(5):
        xs = [torch.full((500,), float(turn + me.rank)) for _ in range(2)]
        works = [
            dist.all_reduce(x, group=groups[g], async_op=True)
            for g, x in zip(((2, 0), (0, 1), (1, 2))[me.rank], xs, strict=True)
        ]
        for work in works:
            work.wait()
        assert all(until(work.is_completed) for work in works)
        total += sum(x.sum().item() for x in xs)
    return total, memory, site.violations()


def connect(me: RankContext, group: dist.ProcessGroup | None = None) -> None:
    """Connect eagerly, as torch does for groups created with a device_id, except on the CPU."""
    if not me.site.real:
        backend_of(group).eager_connect_single_device(torch.device("cpu"))


@pytest.mark.parametrize("bound", [False, True], ids=["first call", "bound"])
@pytest.mark.parametrize("site", sites("late:cuda_ipc", "eager:cuda_ipc", *REAL, stands_in=False))
def test_cyclic_groups_do_not_hang(site, bound):
    with fresh(3, group=False, site=site) as pool:
        for rank, (total, memory, violations) in enumerate(pool.run(groups_in_a_cycle, bound)):
            pairs = (1 + 2, 1 + 3, 2 + 3)[rank]
            assert total == 500.0 * (5 * pairs + 4 * 10)
            assert memory == ([1, 3] if bound else [0, 2]) or is_real(site)
            assert violations == []


# --- destroying a group ---------------------------------------------------------------------------


def tensor_outlives_group(me: RankContext) -> None:
    site = me.start("first")
    x = site.symmetric(1000).fill_(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    gc.collect()
    assert x.eq(3 * me.world).all()
    x += 1
    other = me.start("second")
    dist.all_reduce(x)
    assert x.eq((3 * me.world + 1) * me.world).all()
    if site.fake:
        assert not other.reaches(x)
        assert "RuntimeError" in caught(other.symmetric, 2**50).kinds
    del x
    dist.destroy_process_group()
    assert site.unreleased() == {}


@pytest.mark.parametrize("site", sites("eager:cuda_ipc", "cuda:cuda_ipc"))
def test_a_tensor_outlives_its_group(site):
    with fresh(2, group=False, site=site) as pool:
        pool.run(tensor_outlives_group)


def memory_of_groups() -> int:
    """Return the number of mappings of memory that the processes of groups share."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:pycollect " in line for line in maps)


def mappings_after_destroy(me: RankContext) -> list[int]:
    """Numbers of mappings of a group's memory: before and after its end, while tensors are alive.

    Rank 0, which has its peers' memory mapped, destroys the group long after them: no rank waits.
    """
    site = me.start("kept")
    group, x, y = dist.group.WORLD, site.symmetric(1000).fill_(3), site.symmetric(LARGE).fill_(4)
    dist.all_reduce(x)  # rank 0 maps the peers' `x`; no rank maps `y`
    found = [memory_of_groups()]
    if me.rank == 0:
        wait_published(me, "ended", range(1, me.world))
    begin = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begin < 1.0
    found.append(memory_of_groups())
    publish(me, "ended")
    assert x.eq(3 * me.world).all()
    assert y.eq(4).all()
    del x, y
    gc.collect()
    assert site.unreleased() == {}
    assert site.violations() == []
    assert group is not None
    return found


def test_tensors_and_handles_keep_no_mapping_of_a_destroyed_group():
    with fresh(3, group=False, site="eager:cuda_ipc") as pool:
        assert pool.run(mappings_after_destroy) == [[1, 0]] * 3


def allocations_during_destroy(me: RankContext) -> tuple[list[str], int]:
    """Two threads allocate tensors while the group is destroyed."""
    import pycollect

    site = me.start("meanwhile")
    allocator = pycollect.SymmetricAllocator(device=site.gpu)
    tensors, errors = [], []

    def makes() -> None:
        try:
            while True:
                tensors.append(allocator.empty(LARGE))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=makes) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert until(lambda: len(tensors) > 4)
    dist.destroy_process_group()
    for thread in threads:
        thread.join(10.0)
    left = memory_of_groups()
    tensors.clear()
    gc.collect()
    assert site.unreleased() == {}
    return errors, left


def test_allocations_during_destroy_raise():
    with fresh(2, group=False, site="eager:cuda_ipc") as pool:
        for errors, left in pool.run(allocations_during_destroy):
            assert len(errors) == 2
            assert all("destroyed" in error for error in errors), errors
            assert left == 0


def shut_down_twice(me: RankContext) -> list[bool]:
    """Two threads shut a group down: return whether each waits for the call in flight."""
    x = me.site.symmetric(LARGE).fill_(1)
    dist.all_reduce(x)
    me.site.stall()
    me.site.fill_later(x, 2.0)  # the collective waits for it
    dist.all_reduce(x, async_op=True)
    threads = [threading.Thread(target=backend_of().shutdown) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    waiting = [thread.is_alive() for thread in threads]
    me.site.resume()
    for thread in threads:
        thread.join()
    assert x.eq(2 * me.world).all()
    return waiting


def test_two_threads_shut_a_group_down():
    with fresh(2, site="late:cuda_ipc") as pool:
        assert pool.run(shut_down_twice) == [[True, True]] * 2
