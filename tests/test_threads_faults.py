"""Wrong programs on ranks as threads: each ends at once, with a diagnosis that names the ranks.

A diagnosis names for each waiting rank the operation, its number, the group, the shape and the
line of the program.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import PARALLEL, diagnose, total

import pycollect as pc
from pycollect import threads
from pycollect.threads import torch_internals

# --- calls that differ between ranks --------------------------------------------------------------

DIFFERENT: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "collective": (
        lambda rank: (
            dist.broadcast(torch.ones(4), 0) if rank == 1 else dist.all_reduce(torch.ones(4))
        ),
        "rank 1 called broadcast of 4 float32, root 0",
        "called all_reduce of 4 float32, op sum",
    ),
    "shape": (
        lambda rank: dist.all_reduce(torch.ones(4 + (rank == 1))),
        "rank 1 called all_reduce of 5 float32",
        "called all_reduce of 4 float32",
    ),
    "dtype": (
        lambda rank: dist.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int8)[rank == 1])),
        "rank 1 called all_reduce of 4 int8",
        "called all_reduce of 4 float32",
    ),
    "op": (
        lambda rank: dist.all_reduce(
            torch.ones(4), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
        ),
        "rank 1 called all_reduce of 4 float32, op max",
        "called all_reduce of 4 float32, op sum",
    ),
    "root": (
        lambda rank: dist.broadcast(torch.ones(4), int(rank == 1)),
        "rank 1 called broadcast of 4 float32, root 1",
        "called broadcast of 4 float32, root 0",
    ),
    "number of tensors": (
        lambda rank: dist.all_reduce_coalesced([torch.ones(4) for _ in range(2 + (rank == 1))]),
        "rank 1 called all_reduce",
        "called all_reduce",
    ),
    "barrier": (
        lambda rank: dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(4)),
        "rank 1 called barrier",
        "called all_reduce of 4 float32",
    ),
    "refused arguments": (
        lambda rank: dist.all_reduce(torch.ones(1).expand(4) if rank == 1 else torch.ones(4)),
        "rank 1 refused all_reduce",
        "",
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@PARALLEL
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_make_different_calls_raise_on_all_ranks(what, parallel):
    call, odd, others = DIFFERENT[what]

    def program(rank: int, world: int) -> None:
        dist.barrier()
        call(rank)

    found = diagnose(program, parallel=parallel)
    assert isinstance(found.error, ValueError)
    texts = {found.by: str(found.error), **found.others}
    assert set(texts) == {0, 1, 2}
    for rank, text in texts.items():
        if rank != 1 or what != "refused arguments":
            assert odd in text, text
            assert others in text, text


def test_a_mismatch_names_the_line_of_each_rank():
    def program(rank: int, world: int) -> None:
        if rank == 1:
            dist.broadcast(torch.ones(4), 0)
        else:
            dist.all_reduce(torch.ones(4))

    found = diagnose(program)
    for rank in range(3):
        assert re.search(rf"rank {rank} .*{re.escape(__file__)}:\d+", str(found.error)), rank


# --- ranks that end -------------------------------------------------------------------------------


@PARALLEL
def test_a_rank_that_returns_early_is_named(parallel):
    def program(rank: int, world: int) -> None:
        dist.all_reduce(torch.ones(4))
        if rank != 1:
            dist.all_reduce(torch.ones(2, 3))

    found = diagnose(program, parallel=parallel)
    assert isinstance(found.error, pc.PeerLost)
    for text in (str(found.error), *found.others.values()):
        assert "rank 1 has left the group" in text
    assert "all_reduce #1 of group" in str(found.error)
    assert "[2, 3] float32" in str(found.error)
    assert set(found.others) == {0, 2} - {found.by}


class OwnError(Exception):
    pass


class OwnExit(BaseException):
    pass


@PARALLEL
@pytest.mark.parametrize("error", [OwnError("wrong"), OwnExit("wrong"), SystemExit(3)])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_rank_that_raises_ends_the_launch_with_its_own_exception(when, error, parallel):
    error.__dict__.pop("__notes__", None)

    def program(rank: int, world: int) -> None:
        for place in ("before", "between", "after"):
            if rank == 1 and place == when:
                raise error
            if place != "after":
                dist.all_reduce(torch.ones(4))

    found = diagnose(program, parallel=parallel)
    assert found.error is error
    assert found.by == 1
    assert when == "after" or set(found.others) == {0, 2}
    for text in found.others.values():
        assert re.match("PeerLost: .*rank 1", text), text


def test_sys_exit_in_a_rank_is_raised_with_its_code():
    def program(rank: int, world: int) -> None:
        if rank == 2:
            sys.exit(7)
        dist.barrier()

    found = diagnose(program)
    assert isinstance(found.error, SystemExit)
    assert found.error.code == 7


def test_a_chained_exception_keeps_its_cause():
    def program(rank: int, world: int) -> None:
        if rank == 1:
            raise OwnError("outer") from ZeroDivisionError("inner")
        dist.barrier()

    found = diagnose(program)
    assert isinstance(found.error, OwnError)
    assert isinstance(found.error.__cause__, ZeroDivisionError)


def test_a_rank_that_catches_its_own_error_still_leaves_the_others_waiting():
    def program(rank: int, world: int) -> None:
        try:
            if rank == 1:
                raise OwnError
            dist.barrier()
        except OwnError:
            return

    found = diagnose(program)
    assert isinstance(found.error, pc.PeerLost)
    assert "rank 1 has left" in str(found.error)


def test_a_survivor_may_catch_the_loss_of_a_peer():
    def program(rank: int, world: int) -> str:
        if rank == 1:
            return "early"
        with pytest.raises(pc.PeerLost, match="rank 1 has left"):
            dist.barrier()
        return "caught"

    assert threads.launch(program, 3) == ["caught", "early", "caught"]
    assert threads.launch(total, 3) == [3.0] * 3


def test_a_coalescing_block_that_raises_on_one_rank_is_refused_by_all():
    def program(rank: int, world: int) -> None:
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(4))
            if rank == 1:
                raise OwnError("in the block")
            dist.all_reduce(torch.ones(5))

    found = diagnose(program)
    assert isinstance(found.error, OwnError)
    assert found.by == 1
    for rank in (0, 2):
        assert re.search("rank 1 .*OwnError: in the block", found.others[rank]), found.others


# --- hooks ----------------------------------------------------------------------------------------


def test_an_exception_in_a_ddp_comm_hook_is_the_launch_exception():
    import torch._dynamo  # DDP imports it, for some seconds

    def program(rank: int, world: int) -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))

        def hook(state, bucket):  # torch accepts no annotations that are strings
            if rank == 1:
                raise OwnError("in the hook")
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        model.register_comm_hook(None, hook)
        model(torch.ones(2, 3)).sum().backward()

    found = diagnose(program)
    assert isinstance(found.error, OwnError)
    assert found.by == 1
    assert set(found.others) == {0, 2}
    assert all("rank 1" in text for text in found.others.values())


def test_an_exception_in_an_autograd_hook_is_the_launch_exception():
    def program(rank: int, world: int) -> None:
        x = torch.ones(3, requires_grad=True)

        def hook(grad: torch.Tensor) -> None:
            dist.all_reduce(grad)
            if rank == 1:
                raise OwnError("in the hook")
            dist.all_reduce(grad)

        x.register_hook(hook)
        (x * 2).sum().backward()

    found = diagnose(program)
    assert isinstance(found.error, OwnError)
    assert found.by == 1
    assert all("rank 1 raised OwnError: in the hook" in t for t in found.others.values())


def test_an_exception_in_a_callback_of_a_future_is_named():
    def program(rank: int, world: int) -> None:
        def callback(done: torch.futures.Future[Any]) -> None:
            if rank == 1:
                raise OwnError("in the callback")

        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.get_future().then(callback).wait()
        dist.barrier()

    found = diagnose(program)
    assert "OwnError: in the callback" in str(found.error)
    assert found.by == 1
    assert set(found.others) == {0, 2}


@PARALLEL
def test_the_cause_is_raised_although_its_rank_leaves_first(parallel, monkeypatch):
    leave_groups = torch_internals.leave_groups

    def leave_slowly() -> None:
        failed = sys.exc_info()[0] is ValueError
        leave_groups()
        if failed:
            time.sleep(0.1)  # meanwhile the other ranks find that the rank has left

    def program(rank: int, world: int) -> None:
        if rank == 1:
            raise ValueError("the cause")
        dist.barrier()

    monkeypatch.setattr(torch_internals, "leave_groups", leave_slowly)
    found = diagnose(program, parallel=parallel)
    assert str(found.error) == "the cause"
    assert set(found.others) == {0, 2}
