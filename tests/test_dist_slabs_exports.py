"""How memory of GPUs goes to other processes, without one: the way is found, named or refused, and
ranks need not take the same.
"""

from __future__ import annotations

import os
from typing import Any

import dist_fake
import pytest
import torch
import torch.distributed as dist
from dist_fake import alive
from dist_pool import OURS, Me, fresh, said

import pycollect as pc

pytestmark = pytest.mark.skipif(not OURS, reason="has slabs of its own")
VICTIM = 1


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared(me: Me, name: str, ipc: str, refused: tuple[str, ...]) -> tuple[Any, ...]:
    """A group in which one rank's GPU refuses some ways."""
    made, fake = dist_fake.options("eager:best", ipc)
    me.init(name, pg_options=made)
    for way in refused if me.rank == VICTIM else ():
        fake.gpu.fail(way)
    x = torch.ones(1000)
    dist.all_reduce(x)
    books, staged = fake.gpu.books(), "copy_out" in fake.trace()
    opened = {way: books.get(f"opened by {way}", 0) for way in ("name", "fd")}
    dist.destroy_process_group()
    return x.sum().item(), staged, opened, alive(fake), fake.gpu.fouls()


def log_of(pool: Any, rank: int) -> str:
    return (pool.folder / f"rank_{rank}.log").read_text()


INFO = (("PYCOLLECT_LOG", "info"),)


def test_the_first_way_that_a_gpu_has_is_taken():
    with fresh(3, group=False, environ=INFO) as pool:
        for _, (total, staged, opened, left, fouls) in enumerate(
            pool.run(shared, "all", "best", ())
        ):
            assert (total, staged, left, fouls) == (3000.0, False, {}, [])
            assert opened == {"name": 2, "fd": 0}
        assert all("PYCOLLECT_CUDA_IPC" not in log_of(pool, r) for r in range(3))
        for rank, (total, staged, opened, left, fouls) in enumerate(
            pool.run(shared, "one", "best", ("legacy",))
        ):
            assert (total, staged, left, fouls) == (3000.0, False, {}, [])
            assert opened == ({"name": 2, "fd": 0} if rank == VICTIM else {"name": 1, "fd": 1})
        said = log_of(pool, VICTIM)
        assert said.count("goes to other processes by PYCOLLECT_CUDA_IPC=fd; legacy: CUDA") == 1
        assert "PYCOLLECT_CUDA_IPC" not in log_of(pool, 0)


def test_a_way_that_is_named_is_taken_or_refused():
    with fresh(3, group=False, environ=INFO) as pool:
        for total, staged, opened, left, fouls in pool.run(shared, "named", "fd", ("legacy",)):
            assert (total, staged, left, fouls) == (3000.0, False, {}, [])
            assert opened == {"name": 0, "fd": 2}
        for name, refused in (("legacy", ("legacy",)), ("best", ("legacy", "fd"))):
            for total, staged, opened, left, fouls in pool.run(shared, f"no_{name}", name, refused):
                assert (total, staged, left, fouls) == (3000.0, True, {}, [])
                assert opened == {"name": 0, "fd": 0}
        said = log_of(pool, 0)
        assert "rank 1: CUDA error: made up, in legacy" in said
        assert "rank 1: no way to give memory to other processes works; legacy: " in said
        assert "; fd: CUDA error: made up, in fd" in said


def cycles(me: Me, count: int) -> tuple[int, list[str]]:
    """Descriptors that groups leave behind, once there have been some."""
    fouls: list[str] = []
    before = 0
    for i in range(count):
        made, fake = dist_fake.options("eager:best", "fd")
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


def unreachable(me: Me, ipc: str, way: str) -> tuple[Any, ...]:
    """Memory that a peer cannot open, although its owner could not know."""
    made, fake = dist_fake.options("eager:best", ipc)
    me.init(f"unreachable_{ipc}_{way}".replace(" ", "_"), pg_options=made)
    if me.rank == VICTIM:
        fake.gpu.fail(way)
    x = torch.ones(1000)
    dist.all_reduce(x)
    books, staged = fake.gpu.books(), "copy_out" in fake.trace()
    dist.destroy_process_group()
    return x.sum().item(), staged, books.get("opened by fd", 0), alive(fake), fake.gpu.fouls()


def test_what_cannot_be_opened_goes_another_way():
    with fresh(3, group=False, environ=INFO) as pool:
        for found in pool.run(unreachable, "best", "open by name"):
            assert found == (3000.0, False, 2, {}, [])
        log = log_of(pool, 0)
        assert "PYCOLLECT_CUDA_IPC=fd; legacy: other processes could not open it" in log
        for rank, found in enumerate(pool.run(unreachable, "best", "open")):
            assert found == (3000.0, True, 0 if rank == VICTIM else 2, {}, [])
        assert "made up, in open; otherwise rank 1: CUDA error" in log_of(pool, 0)
        for found in pool.run(unreachable, "legacy", "open by name"):
            assert found == (3000.0, True, 0, {}, [])


def test_ways_by_name(monkeypatch):
    assert pc.distributed.options(cuda_ipc="fd").cuda_ipc == "fd"
    with pytest.raises(ValueError, match="cuda_ipc is 'socket'; allowed are best, legacy, fd"):
        pc.distributed.options(cuda_ipc="socket")
    program = """
import pycollect, torch.distributed as dist
try:
    dist.init_process_group("pycollect", store=dist.HashStore(), rank=0, world_size=1)
except ValueError as error:
    print(error)
"""
    refusal = "PYCOLLECT_CUDA_IPC is 'pidfd'; allowed are legacy, fd"
    assert said(program, PYCOLLECT_CUDA_IPC="pidfd").strip() == refusal
    assert said(program, PYCOLLECT_CUDA_IPC="LEGACY") == ""
