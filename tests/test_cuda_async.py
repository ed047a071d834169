"""async_op=True on GPUs: when a Work completes, and how long memory stays allocated.

The caching allocator reuses freed memory at once, so these tests overwrite memory that was freed
too early before the GPU reaches it.
"""

from __future__ import annotations

import gc

import pytest
import torch
from reference import assert_same, expected, randoms
from sites import PLACEMENTS

import pycollect as pc

pytestmark = pytest.mark.cuda

COUNT = 300_007


def delay_streams(devices, cycles=20_000_000):
    """Keep the GPUs' current streams busy for about 10 ms."""
    for device in {d for d in devices if d.type == "cuda"}:
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)


def on_devices(values, devices):
    return [v.to(d, copy=True) for v, d in zip(values, devices, strict=True)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("algorithm", [None, *pc.algorithms("all_gather")])
def test_inputs_live_until_they_are_read(placement, algorithm):
    devices, api = placement.devices(3), placement.api(3)
    values = randoms(3, (COUNT,), torch.int32)
    wanted = expected("all_gather", values)
    for _ in range(10):
        tensors = on_devices(values, devices)
        delay_streams(devices, 2_000_000)
        work = api.all_gather(tensors, algorithm=algorithm, async_op=True)
        del tensors
        gc.collect()
        spoilers = [torch.full((COUNT,), 7, dtype=torch.int32, device=d) for d in devices * 3]
        assert_same([g.cpu() for g in work.wait()], wanted)
        del spoilers


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_memory_freed_after_a_call_on_rank_streams_is_not_reused_too_early(placement):
    world = 4
    devices, api = placement.devices(world), placement.api(world)
    sides = [torch.cuda.Stream(d) if d.type == "cuda" else None for d in devices]
    values = randoms(world, (COUNT,), torch.int32)
    wanted = expected("all_gather", values)
    for algorithm in (None, *pc.algorithms("all_gather")):
        base = on_devices(values, devices)
        placement.synchronize(world)
        tensors = []
        for side, b in zip(sides, base, strict=True):
            with torch.cuda.stream(side):  # None keeps the current stream
                tensors.append(b.clone())
        delay_streams(devices, 2_000_000)
        got = api.all_gather(tensors, streams=sides, algorithm=algorithm)
        del tensors
        for side, d in zip(sides, devices, strict=True):
            with torch.cuda.stream(side):
                for _ in range(3):
                    torch.full((COUNT,), 7, dtype=torch.int32, device=d)
        placement.synchronize(world)
        assert_same([g.cpu() for g in got], wanted, algorithm)


def test_a_work_completes_only_after_its_gpu_work():
    tensors = [torch.ones(1000, device="cuda:0") for _ in range(2)]
    pc.all_reduce(tensors, async_op=True).wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    work = pc.all_reduce(tensors, async_op=True)
    assert not work.is_completed()
    torch.cuda.synchronize()
    work.wait()
    assert work.is_completed()


def test_a_barrier_waits_for_the_gpu():
    tensors = [torch.ones(1000, device="cuda:0") for _ in range(2)]
    pc.all_reduce(tensors)  # loads the kernel, which may wait for the GPU
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # at least 0.1 s
    done = torch.cuda.Event()
    pc.all_reduce(tensors)
    done.record()
    assert not done.query()
    pc.barrier("cuda:0*2")
    assert done.query()
