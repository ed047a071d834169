"""The end of a group that has GPU memory which other processes reach, without a device: with
tensors that stay, or that are made meanwhile, and by two threads.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import dist_fake
import pytest
import torch.distributed as dist
from dist_pool import OURS, Me, backend_of, caught, fresh
from dist_tracts import GPU, LARGE, in_the_end, make, reached
from dist_waits import heard, say

pytestmark = pytest.mark.skipif(not OURS, reason="has memory of its own")


def outlives(me: Me) -> None:
    made, fake = dist_fake.options("eager:stream")
    me.init("first", pg_options=made)
    x = make(1000).fill_(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    gc.collect()
    assert x.sum().item() == 3000 * me.world
    me.init("second", pg_options=dist_fake.options("eager:stream")[0])
    dist.all_reduce(x)
    assert x.eq(3 * me.world**2).all()
    assert not reached(x)
    error = caught(lambda: make(2**50))
    assert "RuntimeError" in error.kinds, error
    del x
    dist.destroy_process_group()
    assert in_the_end(fake) == {}


def test_a_tensor_outlives_its_group():
    with fresh(2, group=False) as pool:
        pool.run(outlives)


def memory_of_groups() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:pycollect " in line for line in maps)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def kept(me: Me) -> list[int]:
    """Mappings of a group's memory: with it, and behind its end, when there are tensors left."""
    made, fake = dist_fake.options("eager:stream")
    me.init("kept", pg_options=made)
    group, x, y = dist.group.WORLD, make(1000).fill_(3), make(LARGE).fill_(4)
    dist.all_reduce(x)  # rank 0 opens the others', and nobody does so with `y`
    found = [memory_of_groups()]
    if me.rank == 0:
        heard(me, "ended", range(1, me.world))
    dist.destroy_process_group()
    found.append(memory_of_groups())
    say(me, "ended")
    assert x.eq(3 * me.world).all()
    assert y.eq(4).all()
    del x, y
    gc.collect()
    until(lambda: not in_the_end(fake))
    assert group is not None
    return found


def test_tensors_and_handles_keep_no_memory_of_a_group_that_has_ended():
    with fresh(3, group=False) as pool:
        assert pool.run(kept) == [[1, 0]] * 3


def made_meanwhile(me: Me) -> tuple[list[str], int]:
    """Tensors that threads make while the group ends."""
    import pycollect

    made, fake = dist_fake.options("eager:stream")
    me.init("meanwhile", pg_options=made)
    allocator = pycollect.Allocator(device=GPU)
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
    until(lambda: len(tensors) > 4)
    dist.destroy_process_group()
    for thread in threads:
        thread.join(10.0)
    left = memory_of_groups()
    tensors.clear()
    gc.collect()
    assert in_the_end(fake) == {}
    return errors, left


def test_tensors_that_are_made_while_the_group_ends():
    with fresh(2, group=False) as pool:
        for errors, left in pool.run(made_meanwhile):
            assert len(errors) == 2
            assert all("destroyed" in error for error in errors), errors
            assert left == 0


def closed_twice(me: Me) -> list[bool]:
    """Which of two threads that end a group wait for what is under way?"""
    x = make(LARGE).fill_(1)
    dist.all_reduce(x)
    me.fake.stall(True)
    me.fake.fill_later(x, 2.0)  # which the collective waits for
    dist.all_reduce(x, async_op=True)
    threads = [threading.Thread(target=backend_of().shutdown) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    waiting = [thread.is_alive() for thread in threads]
    me.fake.stall(False)
    for thread in threads:
        thread.join()
    assert x.eq(2 * me.world).all()
    return waiting


def test_two_threads_end_a_group():
    with fresh(2, staged="late:stream") as pool:
        assert pool.run(closed_twice) == [[True, True]] * 2
