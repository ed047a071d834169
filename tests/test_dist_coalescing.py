"""Coalesced calls act as one call: either all of them run, or none runs on any rank.

A refused call raises only at the end of the block, and an exception of the block leaves nothing
behind: afterwards all ranks have taken part in the same number of the group's calls. A block is
one thread's, and does not affect calls of other threads.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import programs
import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, RankContext, assert_in_step, backend_of, caught
from sites import sites
from torch.distributed import ReduceOp

pytestmark = pytest.mark.skipif(not OURS, reason="tests promises of pycollect alone")
CPU = torch.device("cpu")


def ones(n: int = 5) -> torch.Tensor:
    return torch.ones(n)


# --- refusals -------------------------------------------------------------------------------------

BAD = {
    "uint16": lambda: dist.all_reduce(torch.zeros(3, dtype=torch.uint16)),
    "expanded": lambda: dist.all_gather([torch.zeros(1).expand(3), torch.zeros(3)], ones(3)),
    "tag": lambda: dist.isend(ones(), 1 - dist.get_rank(), tag=-1),
    "bit operation": lambda: dist.reduce(ones(), 0, dist.ReduceOp.BXOR),
    "sparse": lambda: dist.group.WORLD.allreduce([torch.sparse_coo_tensor([[9]], [1.0], (9,))]),
    "splits": lambda: dist.all_to_all_single(ones(4), ones(4), [1, 2], [2, 2]),
}


def invalid_call(
    me: RankContext, bad: str, invalid_rank: int, where: int, device: bool
) -> tuple[Caught, list[float]]:
    x, y = ones() * (me.rank + 1), ones(7) * (me.rank + 1)

    def body() -> None:
        with dist._coalescing_manager(device=CPU, async_ops=device) as manager:
            for i in range(3):
                if i == where and me.rank == invalid_rank:
                    BAD[bad]()
                elif i == where:
                    dist.broadcast(torch.zeros(3), 0)
                else:
                    dist.broadcast([x, y][i % 2], me.world - 1)
        if device:
            manager.wait()

    raised = caught(body)
    assert_in_step(me)
    return raised, [x[0].item(), y[0].item()]


@pytest.mark.parametrize("invalid_rank", [0, 1])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("bad", BAD)
def test_a_refusal_raises_on_all_ranks_at_the_end(pools, bad, where, invalid_rank):
    results = pools(2).run(invalid_call, bad, invalid_rank, where, bool(where))
    for rank, (raised, kept) in enumerate(results):
        assert kept == [rank + 1.0] * 2, "no coalesced call may run"
        assert set(raised.kinds) & {"TypeError", "ValueError"}, raised
        if rank != invalid_rank:
            assert f"rank {invalid_rank} refused coalesced" in raised.text


def batch(me: RankContext) -> Caught:
    """A refused batch sends nothing, so sending the corrected batch delivers each message once."""
    peer = 1 - me.rank
    good = ones() * 3
    if me.rank == 1:
        a, b = ones() * 0, ones() * 0
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, peer) for t in (a, b)])[0].wait()
        assert (a[0].item(), b[0].item()) == (3.0, 4.0)
        assert_in_step(me)
        return Caught((), "", 0.0)
    refused = [dist.P2POp(dist.isend, good, peer, tag=tag) for tag in (0, -1)]
    raised = caught(dist.batch_isend_irecv, refused)
    dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer) for t in (good, good + 1)])[0].wait()
    assert_in_step(me)
    return raised


def test_a_refused_batch_of_messages_sends_nothing(pools):
    raised = pools(2).run(batch)[0]
    assert raised.kind == "ValueError", raised
    assert "tag is -1" in raised.text


# --- exceptions in the block ----------------------------------------------------------------------


class BodyFailed(BaseException):
    """An exception of a block that, like KeyboardInterrupt, is not an Exception."""


def body_fails(me: RankContext, device: torch.device | None, calls: int) -> Caught:
    tensors = [ones() for _ in range(calls)]

    def body() -> None:
        with dist._coalescing_manager(device=device):
            for x in tensors:
                dist.all_reduce(x) if device is None else dist.reduce(x, 0)
            if me.rank == 0:
                raise BodyFailed("in the body")

    try:
        raised = caught(body)
    except BodyFailed:
        raised = Caught(("BodyFailed",), "", 0.0)
    assert all(x.tolist() == ones().tolist() for x in tensors)
    assert_in_step(me)
    return raised


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("site", sites("", "late"))
@pytest.mark.parametrize("device", [None, CPU], ids=["torch's list", "the group's list"])
def test_an_exception_of_the_block_raises_on_all_ranks(pools, device, site, calls):
    first, *others = pools(3, site=site).run(body_fails, device, calls)
    assert first.kind == "BodyFailed"
    for raised in others:
        assert "rank 0 refused coalesced calls: BodyFailed: in the body" in raised.text


IMPORTED_BEFORE = """
from torch.distributed.distributed_c10d import _coalescing_manager as coalesce
import torch, torch.distributed as dist
import pycollect
dist.init_process_group("pycollect", store=dist.HashStore(), rank=0, world_size=1)
try:
    with coalesce():
        dist.all_reduce(torch.ones(1))
        raise KeyError
except KeyError:
    pass
work = dist.all_reduce(torch.ones(1), async_op=True)
work.wait()  # would raise if calls were still being coalesced
dist.destroy_process_group()
"""


def test_a_manager_imported_before_pycollect_leaves_no_state():
    ran = programs.run([sys.executable, "-c", IMPORTED_BEFORE], timeout=60)
    assert ran.returncode == 0, ran.stderr


def exceptions_before_any_call(me: RankContext) -> None:
    for device in (None, CPU):
        with pytest.raises(BodyFailed), dist._coalescing_manager(device=device):
            raise BodyFailed
        assert_in_step(me)
    with pytest.raises(AttributeError), dist._coalescing_manager(device=CPU):
        dist.isend(ones(), 1 - me.rank).wait()  # there is no Work until the block ends
    assert_in_step(me)


def ends_its_group(group: dist.ProcessGroup) -> None:
    with dist._coalescing_manager(group, CPU):
        dist.broadcast(ones(), 0, group)
        dist.destroy_process_group(group)
        raise KeyError("unrelated")


def failures_outside_the_block(me: RankContext) -> None:
    """No backend for the device, and a destroyed group."""
    devices: list[object] = ["cpu"]
    if me.spec.ranks_as != "threads":  # for threads "cpu:pycollect" has all devices
        devices.append(torch.device("cuda"))
    for device in devices:
        with pytest.raises((RuntimeError, TypeError)), dist._coalescing_manager(device=device):
            pass
        assert_in_step(me)
    assert caught(ends_its_group, dist.new_group(backend="cpu:pycollect")).kind == "KeyError"
    assert_in_step(me)


def test_failures_outside_the_block_leave_no_state(pools):
    pools(2, backend="cpu:pycollect").run(failures_outside_the_block)


TWICE, THRICE = (dist._make_nccl_premul_sum(factor) for factor in (2.0, 3.0))
# Words of torch's error -> the second call of a block that begins with an all_reduce.
UNLIKE: dict[str, Callable[[], object]] = {
    "must be alike": lambda: dist.all_gather_into_tensor(torch.zeros(2), torch.ones(1)),
    "one op, not SUM and MAX": lambda: dist.all_reduce(ones(), ReduceOp.MAX),
}


def unlike(me: RankContext, words: str) -> Caught:
    def body() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(ones())
            UNLIKE[words]() if me.rank == 0 else dist.all_reduce(ones())

    raised = caught(body)
    assert_in_step(me)
    return raised


@pytest.mark.parametrize("words", UNLIKE)
def test_unlike_calls_raise_on_all_ranks(pools, words):
    first, second = pools(2).run(unlike, words)
    assert words in first.text
    assert "rank 0 refused" in second.text


def alike_ops(me: RankContext) -> None:
    """Ops compare equal in either spelling; PREMUL_SUM ops differ if their factors differ."""
    x, y = ones() * 0 + 1, ones(7) * 0 + 1

    def reduced(op_of_x: ReduceOp, op_of_y: ReduceOp) -> tuple[float, float]:
        with dist._coalescing_manager():
            dist.all_reduce(x, op_of_x)
            dist.all_reduce(y, op_of_y)
        return x[0].item(), y[0].item()

    assert reduced(ReduceOp.SUM, ReduceOp(ReduceOp.SUM)) == (2.0, 2.0)
    assert reduced(TWICE, TWICE) == (8.0, 8.0)
    assert "has a factor" in caught(reduced, TWICE, THRICE).text
    assert_in_step(me)
    assert (x[0].item(), y[0].item()) == (8.0, 8.0)


# --- threads --------------------------------------------------------------------------------------


def error_in_thread(function: Callable[[], object]) -> BaseException | None:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).exception()


def threads(me: RankContext) -> None:
    backend = backend_of()
    x, y = (torch.full((4,), float(me.rank)) for _ in range(2))

    def another() -> None:
        backend._start_coalescing()
        dist.broadcast(y, 1)
        backend._end_coalescing().wait()

    backend._start_coalescing()
    dist.broadcast(x, 1)
    assert error_in_thread(another) is None
    assert error_in_thread(lambda: assert_in_step(me)) is None  # not coalesced in that thread
    assert (x[0].item(), y[0].item()) == (me.rank, 1.0)
    backend._end_coalescing().wait()
    assert x.tolist() == [1.0] * 4
    assert_in_step(me)


def threads_with_lists_of_torch(me: RankContext) -> None:
    x, y, z = (torch.full((4,), float(me.rank)) for _ in range(3))

    def another() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(y)
            dist.all_reduce(ones(2))

    with dist._coalescing_manager():
        dist.all_reduce(x)
        assert error_in_thread(lambda: dist.all_reduce(z)) is None  # not coalesced in that thread
        assert error_in_thread(another) is None
        assert (x[0].item(), y[0].item(), z[0].item()) == (me.rank, 1.0, 1.0)
    assert x.tolist() == [1.0] * 4
    assert_in_step(me)


def unfinished_blocks(me: RankContext) -> None:
    """Unfinished blocks of ended threads do not affect later threads with a reused thread id."""
    unfinished = [dist._coalescing_manager() for _ in range(5)]
    for manager in unfinished:
        assert error_in_thread(manager.__enter__) is None
        assert error_in_thread(lambda: assert_in_step(me)) is None
    assert_in_step(me)
    del unfinished, manager
    gc.collect()
    backend = backend_of()
    for _ in range(5):
        assert error_in_thread(backend._start_coalescing) is None
        assert error_in_thread(lambda: assert_in_step(me)) is None
    assert_in_step(me)


JOBS = (exceptions_before_any_call, alike_ops, threads, threads_with_lists_of_torch)
JOBS += (unfinished_blocks,)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_other_calls_and_other_threads_are_unaffected(pools, job):
    pools(2).run(job)


def out_of_order(me: RankContext) -> list[Caught]:
    backend = backend_of()
    raised = [caught(backend._end_coalescing)]
    x = ones()
    backend._start_coalescing()
    dist.broadcast(x * 0 if me.rank == 0 else x, 0)
    raised.append(caught(backend._start_coalescing))
    assert_in_step(me)
    return [*raised, caught(backend._end_coalescing)]


def test_an_end_without_a_start_and_a_start_without_an_end(pools):
    for no_start, no_end, still_none in pools(2).run(out_of_order):
        assert no_start.kind == still_none.kind == no_end.kind == "ValueError"
        assert "this thread has not started to coalesce calls" in no_start.text
        assert "this thread has already started to coalesce calls" in no_end.text


def end_in_another_thread(
    me: RankContext, device: torch.device | None, closes: bool
) -> list[Caught]:
    """A generator suspended in a block is finished by another thread than the one that began it."""
    raised = []
    for with_call in (False, True):
        group = dist.new_group([0, 1])
        x = ones()

        def suspended(group=group, x=x, with_call=with_call):
            with dist._coalescing_manager(group, device):
                if with_call and device is None:
                    dist.all_reduce(x, group=group)
                elif with_call:
                    dist.broadcast(x, 0, group)
                yield

        if me.rank == 0:
            next(suspended_block := suspended())
            end = suspended_block.close if closes else lambda it=suspended_block: next(it, None)
            error = error_in_thread(end)
            assert closes == (error is None), error
            assert closes or "must end in the thread that began them" in str(error)
        raised.append(caught(dist.all_reduce, x, group=group))
        assert raised[-1].kinds or x.tolist() == (2 * ones()).tolist()
        dist.destroy_process_group(group)
    assert_in_step(me)
    return raised


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("device", [None, CPU], ids=["torch's list", "the group's list"])
def test_a_block_ended_by_another_thread_raises(pools, device, closes):
    for empty, called in pools(2).run(end_in_another_thread, device, closes):
        assert bool(empty.kinds) == (device is not None)
        for raised in (empty, called) if device else (called,):
            assert "CollectiveError" in raised.kinds, raised
