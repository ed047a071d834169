"""CUDA tensors between processes where only a GPU shows anything: settings that CUDA and torch
read, several GPUs, and a GPU that is full.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import Me, fresh
from dist_site import GPU, LARGE, REAL, sites
from dist_waits import heard, say
from homes import several_gpus
from test_cuda_dist_matrix import at_the_edges, right

cuda = pytest.mark.cuda
MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("site", sites("eager:stream", *REAL, stands_in=False))
def test_eight_ranks(site):
    with fresh(8, site=site) as pool:
        assert pool.run(at_the_edges, seconds=180.0) == [[]] * 8
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            right(pool, dtype)


# Read when the process first uses CUDA.
SETTINGS = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")


@cuda
@pytest.mark.slow
@pytest.mark.parametrize("site", REAL)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_cuda(setting, site):
    with fresh(2, site=site, environ=((setting, "1"),)) as pool:
        right(pool, torch.float32)


def expandable(me: Me, anew: bool) -> bool:
    """Whether torch's tensors lie where no legacy handle of IPC reaches them, and ours as ever."""
    if anew:
        set_anew = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        if set_anew is None:  # torch 2.11's name of it
            set_anew = torch.cuda.memory._set_allocator_settings
        set_anew("expandable_segments:True")
    x = torch.ones(MIB)
    segments = torch.cuda.memory.memory_snapshot()
    assert all(segment["is_expandable"] for segment in segments)
    dist.all_reduce(x)
    y = me.site.make(MIB).fill_(1) if me.site.streams else x
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
        right(pool, torch.float32)


def on_all_gpus(me: Me) -> list[float]:
    """Ranks on one GPU, one on each that there is, and on the host, by turns."""
    mine = torch.device("cuda", me.rank % torch.cuda.device_count())
    xs = [torch.ones(9, device=device) for device in (mine, "cpu", GPU)]
    for x in xs:
        dist.all_reduce(x)
    dist.barrier()
    gathered: list[Any] = [None] * me.world
    dist.all_gather_object(gathered, me.rank)
    return [x.sum().item() for x in xs] + [sum(gathered)]


def on_another_gpu(me: Me) -> bool:
    """The group's slab is on one GPU; the tensor, and who makes and reads it, are on another."""
    home, other = several_gpus()[:2]
    dist.all_reduce(torch.ones(LARGE, device=home))
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


def crowded(me: Me) -> tuple[int, float]:
    """The first call of a group when torch has taken all of the GPU, and keeps it for later."""
    x = torch.ones(LARGE)
    x.mean().item()  # what is loaded once is loaded now
    say(me, "warm")
    heard(me, "warm", range(me.world))
    taken = []
    for size in (1 << 30, 64 * MIB, 2 * MIB):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8))
    say(me, "full")
    heard(me, "full", range(me.world))
    taken.clear()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    dist.all_reduce(x)
    return kept, x.mean().item()


@cuda
@pytest.mark.slow
def test_what_torch_keeps_for_later_is_room_for_slabs():
    with fresh(2, site="cuda:stream") as pool:
        for kept, mean in pool.run(crowded):
            assert kept >= 128 * MIB, "another rank had taken it all"  # a slab, and some more
            assert mean == 2.0
