"""Memory of GPUs that goes to other processes, without one: where it cannot, tensors go through the
host, and no descriptor stays behind.
"""

from __future__ import annotations

import os
from typing import Any

import dist_fake
import pytest
import torch
import torch.distributed as dist
from dist_fake import alive
from dist_pool import OURS, Me, fresh

pytestmark = pytest.mark.skipif(not OURS, reason="has slabs of its own")
VICTIM = 1


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared(me: Me, call: str) -> tuple[Any, ...]:
    """A group in which one rank cannot hand its memory over, or open what it is handed."""
    made, fake = dist_fake.options("eager:best")
    me.init(call, pg_options=made)
    if me.rank == VICTIM:
        fake.gpu.fail(call)
    x = torch.ones(1000)
    dist.all_reduce(x)
    staged = "copy_out" in fake.trace()
    opened = fake.gpu.books().get("opened", 0)
    dist.destroy_process_group()
    return x.sum().item(), staged, opened, alive(fake), fake.gpu.fouls()


def log_of(pool: Any, rank: int) -> str:
    return (pool.folder / f"rank_{rank}.log").read_text()


def test_memory_that_cannot_be_shared_is_nobodys():
    with fresh(3, group=False, environ=(("PYCOLLECT_LOG", "info"),)) as pool:
        for found in pool.run(shared, "nothing fails"):
            assert found == (3000.0, False, 2, {}, [])
        for call in ("handle_of", "open"):
            for found in pool.run(shared, call):
                assert found == (3000.0, True, 0, {}, [])
            why = f"stream does not work here: rank 1: CUDA error: made up, in {call}"
            assert all(log_of(pool, rank).count(why) == 1 for rank in range(3))


def cycles(me: Me, count: int) -> tuple[int, list[str]]:
    """Descriptors that groups leave behind, once there have been some."""
    fouls: list[str] = []
    before = 0
    for i in range(count):
        made, fake = dist_fake.options("eager:best")
        me.init(f"cycle_{i}", pg_options=made)
        dist.all_reduce(torch.ones(10))
        dist.destroy_process_group()
        fouls += fake.gpu.fouls()
        del made, fake
        if i == 2:
            before = descriptors()
    return descriptors() - before, fouls


def test_no_descriptor_is_left_behind():
    with fresh(2, group=False) as pool:
        assert pool.run(cycles, 12, seconds=60) == [(0, [])] * 2
