"""Every collective has a named range in torch's profiler, on the thread that runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
from sites import GPU, ON_GPU
from torch.profiler import ProfilerActivity, profile

import pycollect as pc


def ones(device, world=2, count=4):
    return [torch.ones(count, device=device) for _ in range(world)]


CALLS = {
    "all_reduce": lambda d: pc.all_reduce(ones(d)),
    "all_reduce, async": lambda d: pc.all_reduce(ones(d, 2, 100_000), async_op=True).wait(),
    "all_reduce_coalesced": lambda d: pc.all_reduce_coalesced([ones(d), ones(d)]),
    "reduce": lambda d: pc.reduce(ones(d)),
    "broadcast": lambda d: pc.broadcast(ones(d)),
    "broadcast_coalesced": lambda d: pc.broadcast_coalesced([ones(d), ones(d)]),
    "all_gather": lambda d: pc.all_gather(ones(d)),
    "reduce_scatter": lambda d: pc.reduce_scatter(ones(d)),
    "all_to_all": lambda d: pc.all_to_all(ones(d)),
    "scatter": lambda d: pc.scatter(ones(d)[0], [d, d]),
    "gather": lambda d: pc.gather(ones(d)),
    "replicate": lambda d: pc.replicate(ones(d), [d, d]),
    "copy_": lambda d: pc.copy_(*ones(d)),
    "barrier": lambda d: pc.barrier([d, d]),
}


def names_of(run):
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    return [e.name for e in recorded.events() if e.name.startswith("pycollect::")]


@pytest.mark.parametrize("device", ["cpu", pytest.param(GPU, marks=ON_GPU)])
@pytest.mark.parametrize("name", CALLS)
def test_calls_have_a_named_range(name, device):
    assert names_of(lambda: CALLS[name](device)) == [f"pycollect::{name.partition(',')[0]}"]


def test_operators_have_a_named_range():
    tensors = ones("cpu")
    names = names_of(lambda: torch.ops.pycollect.all_reduce_(tensors))
    assert names == ["pycollect::all_reduce_", "pycollect::all_reduce"]


def test_the_range_of_an_async_call_ends_with_the_call():
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        pc.all_reduce(ones("cpu"), async_op=True).wait()
        time.sleep(0.5)
    (event,) = (e for e in recorded.events() if e.name == "pycollect::all_reduce")
    assert event.time_range.elapsed_us() < 400_000


def test_a_refused_call_has_no_range():
    def refused():
        with pytest.raises(ValueError, match="shape"):
            pc.all_reduce([torch.ones(2), torch.ones(3)])

    assert names_of(refused) == []


OUTLIVED = """
import contextlib, sys
import torch
from freed_memory import changes_of_freed_memory
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function
import pycollect as pc

def profiled(all_threads):
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=config)

def changes(how):
    tensors = [torch.ones(1 << 24) for _ in range(2)]
    never = torch.futures.Future()
    with profiled(how == "all threads"):
        if how == "kept":  # the future holds the profile's state
            with record_function("begun") as begun:
                begun._call_end_callbacks_on_future(never)
        works = [pc.all_reduce(tensors, async_op=True) for _ in range(4)]
        while not works[0].is_completed():
            pass
    with profiled(True) if how == "all threads" else contextlib.nullcontext():
        with changes_of_freed_memory() as changed:
            for work in works:
                work.wait()
            pc.barrier(["cpu"] * 2)
            return changed()

print(sum(changes(sys.argv[1]) for _ in range(5)), "changes")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ended", "kept", "all threads"])
def test_a_call_may_outlive_the_profile(how):
    """All threads share one heap here, so that freed memory of any of them is found."""
    command, path = [sys.executable, "-c", OUTLIVED, how], os.pathsep.join(sys.path)
    environ = os.environ | {"MALLOC_ARENA_MAX": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, timeout=120, capture_output=True, text=True)
    assert done.stdout == "0 changes\n", done.stderr
