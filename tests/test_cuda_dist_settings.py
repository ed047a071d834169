"""Multi-process tests that need a real GPU: settings of CUDA and torch, and several GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_placements import several_gpus
from dist_pool import RankContext, fresh
from dist_sites import GPU, LARGE, REAL
from matrix import drawn
from matrix_sites import rank_differs

cuda = pytest.mark.cuda
MIB = 1 << 20


# Environment variables that CUDA reads when the process first uses it.
SETTINGS = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")


@cuda
@pytest.mark.slow
@pytest.mark.parametrize("site", REAL)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_cuda(setting, site):
    with fresh(2, site=site, environ=((setting, "1"),)) as pool:
        assert pool.run(rank_differs, drawn("ranks", 2)) == [[], []]


def expandable(me: RankContext, at_runtime: bool) -> bool:
    """A call with expandable segments, which torch maps piece by piece."""
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
    return bool(x.eq(me.world).all())


@cuda
@pytest.mark.parametrize("site", REAL)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", ""])
def test_expandable_segments(name, site):
    environ = ((name, "expandable_segments:True"),) if name else ()
    with fresh(2, site=site, environ=environ) as pool:
        assert pool.run(expandable, not name) == [True, True]
        assert pool.run(rank_differs, drawn("ranks", 2)) == [[], []]


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
    """A call on a side stream of one GPU after a call on another GPU."""
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


@cuda
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("site", REAL)
def test_several_gpus(site, world):
    with fresh(world, site=site) as pool:
        wanted = [9.0 * world] * 3 + [world * (world - 1) / 2]
        assert pool.run(on_all_gpus) == [wanted] * world
        if torch.cuda.device_count() > 1:
            assert pool.run(on_another_gpu) == [True] * world
