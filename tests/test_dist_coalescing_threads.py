"""Coalescing is per thread: a block in one thread does not affect calls of other threads."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from dist_in_step import CPU, assert_in_step, ones
from dist_pool import OURS, Caught, RankContext, backend_of, caught, pools_of_a_module

pytestmark = pytest.mark.skipif(not OURS, reason="tests promises of pycollect alone")


@pytest.fixture(scope="module")
def pools(ranks_as):
    yield from pools_of_a_module(ranks_as=ranks_as)


def errors_in_thread(function) -> list[BaseException]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def threads(me: RankContext) -> None:
    backend = backend_of()
    x, y = (torch.full((4,), float(me.rank)) for _ in range(2))

    def another() -> None:
        backend._start_coalescing()
        dist.broadcast(y, 1)
        backend._end_coalescing().wait()

    backend._start_coalescing()
    dist.broadcast(x, 1)
    assert not errors_in_thread(another)
    assert not errors_in_thread(lambda: assert_in_step(me))  # not coalesced in that thread
    assert (x[0].item(), y[0].item()) == (me.rank, 1.0)
    backend._end_coalescing().wait()
    assert x.tolist() == [1.0] * 4
    assert_in_step(me)


def test_coalescing_is_per_thread(pools):
    pools(2).run(threads)


def threads_with_lists_of_torch(me: RankContext) -> None:
    x, y, z = (torch.full((4,), float(me.rank)) for _ in range(3))

    def another() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(y)
            dist.all_reduce(ones(2))

    with dist._coalescing_manager():
        dist.all_reduce(x)
        assert not errors_in_thread(lambda: dist.all_reduce(z))  # not coalesced in that thread
        assert not errors_in_thread(another)
        assert (x[0].item(), y[0].item(), z[0].item()) == (me.rank, 1.0, 1.0)
    assert x.tolist() == [1.0] * 4
    assert_in_step(me)


def test_coalescing_by_torch_is_per_thread(pools):
    pools(2).run(threads_with_lists_of_torch)


def unfinished_blocks(me: RankContext) -> None:
    """Unfinished blocks of ended threads do not affect later threads with a reused thread id."""
    unfinished = [dist._coalescing_manager() for _ in range(5)]
    for manager in unfinished:
        assert not errors_in_thread(manager.__enter__)
        assert not errors_in_thread(lambda: assert_in_step(me))
    assert_in_step(me)
    del unfinished, manager
    gc.collect()
    backend = backend_of()
    for _ in range(5):
        assert not errors_in_thread(backend._start_coalescing)
        assert not errors_in_thread(lambda: assert_in_step(me))
    assert_in_step(me)


def test_unfinished_blocks_of_ended_threads_affect_no_other(pools):
    pools(2).run(unfinished_blocks)


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
            suspended_block = suspended()
            next(suspended_block)
            errors = errors_in_thread(
                suspended_block.close if closes else lambda it=suspended_block: next(it, None)
            )
            assert closes == (not errors), errors
            assert all("must end in the thread that began them" in str(e) for e in errors)
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
