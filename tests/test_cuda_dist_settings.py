"""Multi-process tests that need a real GPU: settings of CUDA and torch, several GPUs, and a GPU
without free memory.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_placements import several_gpus
from dist_pool import RankContext, fresh
from dist_sites import GPU, LARGE, REAL, sites
from dist_waits import publish, wait_published
from test_cuda_dist_matrix import assert_bits, sizes_around_a_staging_buffer

cuda = pytest.mark.cuda
MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("site", sites("eager:cuda_ipc", *REAL, stands_in=False))
def test_eight_ranks(site):
    with fresh(8, site=site) as pool:
        assert pool.run(sizes_around_a_staging_buffer, seconds=180.0) == [[]] * 8
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            assert_bits(pool, dtype)


# Environment variables that CUDA reads when the process first uses it.
SETTINGS = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")


@cuda
@pytest.mark.slow
@pytest.mark.parametrize("site", REAL)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_cuda(setting, site):
    with fresh(2, site=site, environ=((setting, "1"),)) as pool:
        assert_bits(pool, torch.float32)


def expandable(me: RankContext, at_runtime: bool) -> bool:
    """Calls with expandable segments, whose memory legacy CUDA IPC handles cannot export."""
    if at_runtime:
        set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        if set_settings is None:  # the name in torch 2.11
            set_settings = torch.cuda.memory._set_allocator_settings
        set_settings("expandable_segments:True")
    x = torch.ones(MIB)
    segments = torch.cuda.memory.memory_snapshot()
    assert segments, "nothing is tested"
    assert all(segment["is_expandable"] for segment in segments)
    dist.all_reduce(x)
    y = me.site.symmetric(MIB).fill_(1) if me.site.streams else x
    if me.site.streams:
        dist.all_reduce(y)
        assert me.site.reaches(y)
    return bool(x.eq(me.world).all() & y.eq(me.world).all())


@cuda
@pytest.mark.parametrize("site", REAL)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", ""])
def test_expandable_segments(name, site):
    environ = ((name, "expandable_segments:True"),) if name else ()
    with fresh(2, site=site, environ=environ) as pool:
        assert pool.run(expandable, not name) == [True, True]
        assert_bits(pool, torch.float32)


def on_all_gpus(me: RankContext) -> list[float]:
    """all_reduce with each rank on its own GPU, in host memory, and with all ranks on one GPU."""
    mine = torch.device("cuda", me.rank % torch.cuda.device_count())
    xs = [torch.ones(9, device=device) for device in (mine, "cpu", GPU)]
    for x in xs:
        dist.all_reduce(x)
    dist.barrier()
    gathered: list[Any] = [None] * me.world
    dist.all_gather_object(gathered, me.rank)
    return [x.sum().item() for x in xs] + [sum(gathered)]


def on_another_gpu(me: RankContext) -> bool:
    """The group's staging buffer is on one GPU, the tensor and its stream on another."""
    placement, other = several_gpus()[:2]
    dist.all_reduce(torch.ones(LARGE, device=placement))
    side = torch.cuda.Stream(other)
    with torch.cuda.stream(side):
        x = torch.zeros(LARGE, device=other)
        me.site.fill_later(x, float(me.rank))
        dist.all_reduce(x)
        y = x * 2
    side.synchronize()
    return bool((y == me.world * (me.world - 1)).all())


def freed_on_the_buffers_gpu(me: RankContext) -> bool:
    """The copy of a tensor that is only written gets memory that pending work still reads."""
    placement, other = several_gpus()[:2]
    dist.all_reduce(torch.ones(LARGE, device=placement))
    y = torch.full((LARGE,), float(me.rank + 3), device=other)
    torch.cuda.synchronize(other)
    before = torch.ones(LARGE, device=placement)
    me.site.stall()
    read = before * 2
    del before
    dist.broadcast(y, 0)
    return bool((read == 2).all() & (y == 3).all().to(placement))


@cuda
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("site", REAL)
def test_several_gpus(site, world):
    with fresh(world, site=site) as pool:
        wanted = [9.0 * world] * 3 + [world * (world - 1) / 2]
        assert pool.run(on_all_gpus) == [wanted] * world
        if torch.cuda.device_count() > 1:
            assert pool.run(on_another_gpu) == [True] * world
            assert pool.run(freed_on_the_buffers_gpu) == [True] * world


def first_call_on_a_full_gpu(me: RankContext) -> tuple[int, float]:
    """The first call of a group after torch's caching allocator has taken all memory of the GPU."""
    x = torch.ones(LARGE)
    x.mean().item()  # loads the kernels now
    publish(me, "warm")
    wait_published(me, "warm", range(me.world))
    filling = []
    for size in (1 << 30, 64 * MIB, 2 * MIB):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                filling.append(torch.empty(size, dtype=torch.uint8))
    publish(me, "full")
    wait_published(me, "full", range(me.world))
    filling.clear()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    dist.all_reduce(x)
    return kept, x.mean().item()


@cuda
@pytest.mark.slow
def test_memory_cached_by_torch_is_freed_for_staging_buffers():
    with fresh(2, site="cuda:cuda_ipc") as pool:
        for kept, mean in pool.run(first_call_on_a_full_gpu):
            # More than a staging buffer.
            assert kept >= 128 * MIB, "another rank has allocated all memory"
            assert mean == 2.0
