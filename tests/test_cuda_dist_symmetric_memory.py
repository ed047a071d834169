"""Symmetric GPU memory on emulated devices: tensors that peers cannot access, and the lifetime of
memory that peers have mapped.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, RankContext, caught, fresh
from dist_sites import LARGE, until
from test_cuda_dist_faults import FAULTY_RANK
from test_cuda_dist_zero_copy import bootstrap
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="tests the symmetric memory of pycollect")


def collect_log() -> list[str]:
    """Return a list that collects all further log messages."""
    import pycollect

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    pycollect.log.logger.addHandler(handler)
    pycollect.log.logger.setLevel(logging.INFO)
    pycollect._C.enable_log()
    return lines


def more_tensors_than_segments(me: RankContext) -> tuple[int, int]:
    """Reduce more shared tensors (70) than peers can map (64); the rest are copied."""
    lines = collect_log()
    bootstrap(me)
    xs = [me.site.symmetric(100).fill_(i + me.rank) for i in range(70)]
    known = sum(map(me.site.reaches, xs))
    counts = [me.site.launches(lambda x=x: dist.all_reduce(x)) for x in xs]
    for i, x in enumerate(xs):
        assert x.eq(me.world * i + sum(range(me.world))).all(), i
    assert sum("already has 64 segments, the maximum" in x for x in lines) == 1, lines
    return known, counts.count(0)  # rank 0 launches a kernel in every call


def failing_export(me: RankContext) -> tuple[int, int]:
    """Memory that one rank cannot export remains usable; its tensors are copied."""
    bootstrap(me)
    lines = collect_log()
    if me.rank == FAULTY_RANK:
        me.fake.gpu.fail("export_memory")
    x, y = me.site.symmetric(LARGE).fill_(me.rank), me.site.symmetric(LARGE).fill_(me.rank)
    me.fake.gpu.fail("export_memory", -1)
    matching = [line for line in lines if "cannot be exported to other processes" in line]
    assert len(matching) == (me.rank == FAULTY_RANK), lines
    assert all("injected failure in export_memory" in line for line in matching)
    copied = me.site.launches(lambda: dist.all_reduce(x))
    assert x.eq(3).all()
    y = me.site.symmetric(LARGE).fill_(me.rank)
    zero_copy = me.site.launches(lambda: dist.all_reduce(y))
    assert y.eq(3).all()
    return min(copied, 2), zero_copy


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        (more_tensors_than_segments, [(64, 0), (64, 64), (64, 64)]),
        (failing_export, [(2, 1), (2, 0), (2, 0)]),
    ],
    ids=["more tensors than segments", "failing export"],
)
def test_tensors_that_peers_cannot_map_are_staged(job, wanted):
    with fresh(3, site="eager:cuda_ipc") as pool:
        assert pool.run(job) == wanted


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all_reduce": lambda x, whole: dist.all_reduce(x),
    "all_gather": lambda x, whole: dist.all_gather_into_tensor(whole, x),
}


def failing_map(me: RankContext, call: str, faulty_rank: int) -> tuple[Any, ...]:
    """One rank cannot map its peers' tensors, which shows only after all agreed to use them."""
    x, whole = (
        me.site.symmetric(LARGE).fill_(me.rank),
        me.site.symmetric(me.world * LARGE).fill_(-1),
    )
    bootstrap(me)
    if me.rank == faulty_rank:
        me.fake.gpu.fail("map")
    begin = time.monotonic()
    error = caught(CALLS[call], x, whole)
    took = time.monotonic() - begin
    me.fake.gpu.fail("map", -1)
    again = caught(CALLS[call], x, whole)
    return error, again, took, x.unique().tolist(), me.site.violations()


@pytest.mark.parametrize(("call", "faulty_rank"), [("all_reduce", 0), ("all_gather", 1)])
def test_memory_that_one_rank_cannot_map(call, faulty_rank):
    with fresh(3, site="eager:cuda_ipc") as pool:
        found = pool.run(failing_map, call, faulty_rank)
        for rank, (_, again, took, values, violations) in enumerate(found):
            assert "CollectiveError" in again.kinds, again
            assert took < 2.0
            assert values == [rank]
            assert violations == []
        why = "'s tensor cannot be reached: CUDA error: injected failure in map"
        assert why in found[faulty_rank][0].text


def reachable_windows(me: RankContext) -> list[bool]:
    """Whether peers can access tensors that fill a symmetric segment, and that exceed it."""
    x = me.site.symmetric(10)
    segment_bytes = me.site.usage().used
    found = []
    for nbytes in (segment_bytes, segment_bytes + 4):
        window = (ctypes.c_char * nbytes).from_address(x.data_ptr())
        found.append(me.site.reaches(torch.frombuffer(window, dtype=torch.float32)))
    return found


def test_tensors_beyond_a_segment_are_not_symmetric():
    with fresh(1, site="eager:cuda_ipc") as pool:
        assert pool.run(reachable_windows) == [[True, False]]


def invalid_arguments(me: RankContext) -> list[Caught]:
    import pycollect as pc

    errors = [caught(lambda: pc.symmetric_empty(3, device="meta")), caught(me.site.symmetric, -1)]
    gloo = dist.new_group(backend="gloo")
    return [*errors, caught(lambda: pc.symmetric_empty(3, device=me.site.gpu, group=gloo))]


def test_invalid_arguments_raise():
    with fresh(2, site="late:cuda_ipc") as pool:
        found = pool.run(invalid_arguments)
    for meta, negative, foreign in found:
        assert "allowed are 'cpu' and GPUs" in meta.text
        assert "no dimension may be negative" in negative.text
        assert "make it with 'pycollect'" in foreign.text or "has no memory" in foreign.text
        assert {e.kind for e in (meta, negative, foreign)} == {"ValueError"}


# --- lifetime of memory ---------------------------------------------------------------------------


def used_bytes(me: RankContext) -> int:
    """Used bytes, after up to 2 s for the streams to release freed tensors."""
    until(lambda: me.site.usage().used == 0, 2.0)
    return me.site.usage().used


def reuse_of_mapped_memory(me: RankContext) -> None:
    """Freed memory that peers have mapped is kept and reused; other memory is freed."""
    x = me.site.symmetric(LARGE).fill_(1)
    first, before = x.data_ptr(), me.site.usage()
    assert before.used >= x.nbytes
    assert before.used == before.reserved
    dist.all_reduce(x)
    dist.barrier()
    del x
    assert used_bytes(me) == 0
    dist.barrier()
    assert me.site.usage().cached == (0 if me.rank == 0 else before.used)
    y = me.site.symmetric(LARGE // 2 + 10).fill_(1)
    assert (y.data_ptr() == first) or me.rank == 0
    dist.all_reduce(y)
    z = me.site.symmetric(LARGE).fill_(2)
    assert z.data_ptr() != y.data_ptr()
    dist.all_reduce(z)
    assert z.eq(2 * me.world).all()
    assert y.eq(me.world).all()


def release_after_calls(me: RankContext) -> None:
    """Tensors exposed to a successful call are released soon after it."""
    for turn in range(20):
        x = me.site.symmetric(LARGE).fill_(turn)
        dist.all_reduce(x)
        assert x.eq(turn * me.world).all()
        del x
        assert used_bytes(me) == 0


def forked(me: RankContext) -> None:
    """A forked child deletes tensors; its parent can still use them in zero-copy calls."""
    x, whole = me.site.symmetric(LARGE).fill_(me.rank), me.site.symmetric(me.world * LARGE)
    bootstrap(me)
    time.sleep(0.05)  # until only the variables hold the tensors
    child = os.fork()
    if child == 0:
        del x, whole
        os._exit(0)
    os.waitpid(child, 0)
    assert me.site.launches(lambda: dist.all_gather_into_tensor(whole, x)) == 1
    assert whole.view(me.world, LARGE)[:, -1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("job", "site"),
    [
        (reuse_of_mapped_memory, "eager:cuda_ipc"),
        (release_after_calls, "late:cuda_ipc"),
        (forked, "eager:cuda_ipc"),
    ],
)
def test_lifetime_of_symmetric_memory(job, site):
    with fresh(3, site=site) as pool:
        pool.run(job)


def tensors_held_by_calls(me: RankContext) -> tuple[bool, list[str]]:
    """Shared tensors that only their calls hold; return whether descriptors stay constant."""
    files = []
    for _ in range(12):
        dist.all_reduce(me.site.symmetric(LARGE).fill_(1), async_op=True)
        assert until(lambda: me.site.usage().used == 0)
        files.append(len(os.listdir("/proc/self/fd")))
    return files[-1] - files[3] < 4, me.site.violations()


def test_memory_of_completed_calls_is_freed():
    """Allocating frees such memory, not the thread that releases the streams' finished work."""
    with fresh(3, site="late:cuda_ipc") as pool:
        assert pool.run(tensors_held_by_calls) == [(True, [])] * 3
