"""How memory of GPUs goes to other processes, without one: as file descriptors, of which nothing is
left behind, and where that does not work nobody shares any.
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


def refused(me: Me, call: str) -> tuple[Any, ...]:
    """Groups in which one rank's GPU cannot give memory to the others, or open theirs."""
    found = []
    for turn in range(2):
        made, fake = dist_fake.options("eager:best")
        me.init(f"{call}_{turn}", pg_options=made)
        if me.rank == VICTIM:
            fake.gpu.fail(call)
        x = torch.ones(1000)
        dist.all_reduce(x)
        staged, opened = "copy_ caller" in fake.calls(), fake.gpu.books().get("opened", 0)
        dist.destroy_process_group()
        found.append((x.sum().item(), staged, opened, alive(fake), fake.gpu.fouls()))
    return tuple(found)


@pytest.mark.parametrize("call", ["allocate", "export_memory", "map"])
def test_all_go_through_the_host_and_say_why_once(call):
    with fresh(3, group=False, environ=(("PYCOLLECT_LOG", "info"),)) as pool:
        for found in pool.run(refused, call):
            assert found == ((3000.0, True, 0, {}, []),) * 2
        why = (
            f"PYCOLLECT_CUDA_SYNC=stream does not work here: rank 1: CUDA error: made up, in {call}"
        )
        for rank in range(3):
            log = (pool.folder / f"rank_{rank}.log").read_text()
            assert log.count(why) == 1, log
            assert log.count("PYCOLLECT_CUDA_SYNC=host: ") == 1, log


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def cycles(me: Me, count: int) -> tuple[int, list[str]]:
    """Descriptors that groups leave behind, once there have been some."""
    fouls: list[str] = []
    before = 0
    for i in range(count):
        made, fake = dist_fake.options("eager:stream")
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
