"""Wrong programs on ranks as threads: each ends at once, with a diagnosis that names the ranks."""

from __future__ import annotations

import re
import sys
import time
import traceback
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it, for some seconds
import torch.distributed as dist
from thread_programs import LARGE, PARALLEL, diagnose

import pycollect as pc
from pycollect.threads import torch_internals


@PARALLEL
def test_a_mismatch_names_the_call_and_the_line_of_each_rank(parallel):
    def program(rank: int, world: int) -> None:
        if rank == 1:
            dist.broadcast(torch.ones(4), 0)
        else:
            dist.all_reduce(torch.ones(4))

    found = diagnose(program, parallel=parallel)
    texts = {found.by: str(found.error), **found.others}
    assert isinstance(found.error, ValueError)
    assert set(texts) == {0, 1, 2}
    for text in texts.values():
        assert "rank 1 called broadcast of 4 float32, root 0" in text, text
        assert "called all_reduce of 4 float32, op sum" in text, text
    for rank in range(3):
        assert re.search(rf"rank {rank} .*{re.escape(__file__)}:\d+", str(found.error)), rank


# --- ranks that end -------------------------------------------------------------------------------


def first_of_two_calls(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(4))
    if rank != 1:
        dist.all_reduce(torch.ones(2, 3))


def caught_error(rank: int, world: int) -> None:
    try:
        if rank == 1:
            raise OwnError
        dist.barrier()
    except OwnError:
        return


def message_to_it(rank: int, world: int) -> None:
    if rank == 0:
        dist.send(torch.ones(LARGE), 1)


def monitored_barrier(rank: int, world: int) -> None:
    if rank != 1:
        dist.group.WORLD.monitored_barrier()


EARLY = [
    (monitored_barrier, {0, 2}, ("monitored_barrier #0 of group",)),
    (first_of_two_calls, {0, 2}, ("all_reduce #1 of group", "[2, 3] float32")),
    (caught_error, {0, 2}, ("barrier #0 of group",)),
    (message_to_it, {0}, ("send #0 to rank 1",)),
]


@PARALLEL
@pytest.mark.parametrize(("program", "waiting", "words"), EARLY)
def test_a_rank_that_returns_early_is_named(program, waiting, words, parallel):
    found = diagnose(program, parallel=parallel)
    assert isinstance(found.error, pc.PeerLost)
    for text in (str(found.error), *found.others.values()):
        assert re.search("rank 1 has left the group", text), text
    assert all(word in str(found.error) for word in words), found.error
    assert {found.by, *found.others} == waiting


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
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].line == "raise error"  # the traceback leads to the rank's line
    assert when == "after" or set(found.others) == {0, 2}
    for text in found.others.values():
        assert re.match("PeerLost: .*rank 1", text), text


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


# --- exceptions in functions that torch calls -----------------------------------------------------


def hook_of_ddp(rank: int, world: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))

    def hook(state, bucket):  # torch accepts no annotations that are strings
        if rank == 1:
            raise OwnError("in the hook")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    model(torch.ones(2, 3)).sum().backward()


def hook_of_autograd(rank: int, world: int) -> None:
    x = torch.ones(3, requires_grad=True)

    def hook(grad: torch.Tensor) -> None:
        dist.all_reduce(grad)
        if rank == 1:
            raise OwnError("in the hook")
        dist.all_reduce(grad)

    x.register_hook(hook)
    (x * 2).sum().backward()


def callback_of_a_future(rank: int, world: int) -> None:
    def callback(done: torch.futures.Future[Any]) -> None:
        if rank == 1:
            raise OwnError("in the hook")

    dist.all_reduce(torch.ones(2), async_op=True).get_future().then(callback).wait()
    dist.barrier()


@pytest.mark.parametrize("program", [hook_of_ddp, hook_of_autograd, callback_of_a_future])
def test_an_exception_in_a_hook_is_that_of_the_launch(program):
    found = diagnose(program)
    assert isinstance(found.error, OwnError) or program is callback_of_a_future
    assert re.search("(^|OwnError: )in the hook", str(found.error))
    assert found.by == 1
    assert set(found.others) == {0, 2}
    assert all("rank 1 raised " in text for text in found.others.values()), found.others


# --- objects of other ranks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda group: dist.all_reduce(torch.ones(2), group=group),
        lambda group: group.allreduce([torch.ones(2)]).wait(),
    ],
)
def test_a_group_of_another_rank_is_refused(use):
    shared: dict[str, Any] = {}

    def program(rank: int, world: int) -> None:
        use(shared.setdefault("group", dist.group.WORLD))

    found = diagnose(program)
    assert isinstance(found.error, (ValueError, pc.CollectiveError))
    assert found.by == 1
    texts = [str(found.error), *found.error.__notes__]
    assert any("each rank has process groups of its own" in text for text in texts), texts


@pytest.mark.parametrize("end", ["wait", "is_completed"])
def test_a_work_of_another_rank_is_refused(end):
    shared: list[dist.Work] = []

    def program(rank: int, world: int) -> None:
        if rank == 0:
            shared.append(dist.all_reduce(torch.ones(2), async_op=True))
            dist.barrier()
        elif rank == 1:
            while end == "is_completed" and not shared[0].is_completed():
                pass
            shared[0].wait()

    found = diagnose(program)
    assert isinstance(found.error, pc.CollectiveError)
    assert found.by == 1
    assert "rank 1 of the launch used group" in str(found.error)
