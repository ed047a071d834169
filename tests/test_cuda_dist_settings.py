"""CUDA tensors between processes where something is unusual: many of them, settings that CUDA and
torch read once, groups that come and go.
"""

from __future__ import annotations

import contextlib
import os
import time

import dist_staged
import pytest
import torch
import torch.distributed as dist
from dist_pool import Me, fresh
from homes import GPU

from pycollect import _C

pytestmark = [pytest.mark.cuda, pytest.mark.slow]
RUNGS = _C.cuda_rungs()[1:]
SECONDS = 180.0
MIB = 1 << 20
# Read when the process first uses CUDA.
SETTINGS = {
    "launch-blocking": ("CUDA_LAUNCH_BLOCKING", "1"),
    "one-connection": ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
}


def environ(rung: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (("PYCOLLECT_CUDA_SYNC", rung), *more)


def right(found: list[tuple[int, list[str]]]) -> None:
    assert min(run for run, _ in found) > 80
    wrong = [f"rank {rank}: {line}" for rank, (_, lines) in enumerate(found) for line in lines]
    assert not wrong, "\n".join(wrong[:12])


@pytest.mark.parametrize("rung", RUNGS)
def test_eight_processes(rung):
    with fresh(8, environ=environ(rung)) as pool:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            right(pool.run(dist_staged.sweep, dtype, GPU, seconds=SECONDS))


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_of_cuda(setting, rung):
    with fresh(2, environ=environ(rung, setting)) as pool:
        right(pool.run(dist_staged.sweep, torch.float32, GPU, seconds=SECONDS))


def expandable(me: Me) -> bool:
    """Whether tensors now lie where no legacy handle of IPC reaches them."""
    set_anew = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_anew is None:  # torch 2.11's name of it
        set_anew = torch.cuda.memory._set_allocator_settings
    set_anew("expandable_segments:True")
    x = torch.ones(MIB, device=GPU)
    segments = torch.cuda.memory.memory_snapshot()
    return x.sum().item() == MIB and all(segment["is_expandable"] for segment in segments)


@pytest.mark.parametrize("rung", RUNGS)
def test_expandable_segments(rung):
    with fresh(2, environ=environ(rung)) as pool:
        assert pool.run(expandable, seconds=SECONDS) == [True, True]
        right(pool.run(dist_staged.sweep, torch.float32, GPU, seconds=SECONDS))


def meet(me: Me, name: str) -> None:
    """Without a group: all ranks have come."""
    store = dist.FileStore(f"{me.folder}/{name}")
    store.add("come", 1)
    while store.add("come", 0) < me.world:
        time.sleep(0.001)


def free_bytes(me: Me, name: str) -> int:
    """Of the GPU, while no rank does anything."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    meet(me, f"{name}_before")
    free, _ = torch.cuda.mem_get_info(GPU)
    meet(me, f"{name}_after")
    return free


def cycles(me: Me, count: int, settled: int) -> int:
    """Bytes that the GPU, whoever owns them, has lost to groups that are gone."""
    before = 0
    for i in range(count):
        me.init(f"cycle_{i}")
        x = torch.ones(300_000, device=GPU)
        dist.all_reduce(x)
        if i % 4 == 1:
            other = dist.new_group()
            dist.all_reduce(x, group=other)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        torch.cuda.synchronize()
        dist.destroy_process_group()
        del x, work
        if i + 1 == settled:
            before = free_bytes(me, "early")
    return before - free_bytes(me, "late")


@pytest.mark.parametrize("rung", RUNGS)
def test_groups_leave_no_memory_behind(rung):
    count, settled = int(os.environ.get("PYCOLLECT_TEST_CYCLES", "40")), 10
    assert count > settled, "PYCOLLECT_TEST_CYCLES is too few to see what they lose"
    with fresh(2, group=False, environ=environ(rung)) as pool:
        lost = max(pool.run(cycles, count, settled, seconds=300.0))
    # The smallest thing that a group takes of a GPU is a page of 2 MiB, in every cycle; CUDA itself
    # may load a module late.
    assert lost < (count - settled) // 2 * 2 * MIB, f"{lost / MIB:.1f} MiB in {count} cycles"


def descriptors_and_bytes(me: Me, count: int, settled: int) -> tuple[int, int]:
    """What groups leave behind whose memory is file descriptors."""
    files, before = 0, 0
    for i in range(count):
        me.init(f"cycle_{i}")
        x = torch.ones(300_000, device=GPU)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        dist.destroy_process_group()
        del x
        if i + 1 == settled:
            files, before = len(os.listdir("/proc/self/fd")), free_bytes(me, "early")
    lost = before - free_bytes(me, "late")
    return len(os.listdir("/proc/self/fd")) - files, lost


def test_descriptors_are_closed_and_what_they_stand_for_is_freed():
    with fresh(2, group=False, environ=environ("stream")) as pool:
        for files, lost in pool.run(descriptors_and_bytes, 20, 5, seconds=SECONDS):
            assert files <= 0
            assert lost < 15 // 2 * 2 * MIB, f"{lost / MIB:.1f} MiB"


def crowded(me: Me) -> tuple[int, float]:
    """The first call of a group when torch has taken all of the GPU, and keeps it for later."""
    x = torch.ones(300_000, device=GPU)
    x.mean().item()  # what is loaded once is loaded now
    meet(me, "warm")
    taken = []
    for size in (1 << 30, 64 * MIB, 2 * MIB):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device=GPU))
    meet(me, "full")
    taken.clear()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    dist.all_reduce(x)
    return kept, x.mean().item()


def test_what_torch_keeps_for_later_is_room_for_slabs():
    with fresh(2, environ=environ("stream")) as pool:
        for kept, mean in pool.run(crowded, seconds=SECONDS):
            assert kept >= 128 * MIB, "another rank had taken it all"  # a slab, and some more
            assert mean == 2.0


def bound(me: Me) -> float:
    """Groups made with a device: their first calls come in a circle."""
    me.init("bound", device_id=torch.device(GPU))
    groups = [dist.new_group(list(ranks)) for ranks in ((0, 1), (1, 2), (0, 2))]
    xs = [torch.full((500,), 1.0 + me.rank, device=GPU) for _ in range(2)]
    works = [
        dist.all_reduce(x, group=groups[g], async_op=True)
        for g, x in zip(((2, 0), (0, 1), (1, 2))[me.rank], xs, strict=True)
    ]
    for work in works:
        work.wait()
    total = sum(x.sum().item() for x in xs)
    dist.destroy_process_group()
    return total


@pytest.mark.parametrize("rung", RUNGS)
def test_groups_made_with_a_device(rung):
    with fresh(3, group=False, environ=environ(rung)) as pool:
        assert pool.run(bound, seconds=SECONDS) == [500.0 * n for n in (3 + 4, 3 + 5, 4 + 5)]
