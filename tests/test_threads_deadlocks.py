"""Waits of ranks as threads that cannot end: deadlocks, and timeouts of groups.

Every rank raises a deadlock at once, which says what each one waits for.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it, for some seconds
import torch.distributed as dist
from programs import run
from thread_programs import LARGE, PARALLEL, diagnose, ends_within

import pycollect as pc
from pycollect import threads
from pycollect.threads import launcher


def ring_of_receives(rank: int, world: int) -> None:
    dist.recv(torch.ones(4), (rank + 1) % world)


def large_message_without_receive(rank: int, world: int) -> None:
    if rank == 0:
        dist.send(torch.ones(LARGE), 1)
    dist.barrier()


def another_tag(rank: int, world: int) -> None:
    if rank == 0:
        dist.send(torch.ones(LARGE), 1, tag=1)
    if rank == 1:
        dist.recv(torch.ones(LARGE), 0, tag=2)
    dist.barrier()


def barrier_of_one_member(rank: int, world: int) -> None:
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.barrier(group=pair)
    dist.barrier()


def groups_in_another_order(rank: int, world: int) -> None:
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=one)
        dist.all_reduce(torch.ones(3), group=other)
    if rank == 1:
        dist.all_reduce(torch.ones(5), group=other)
        dist.all_reduce(torch.ones(5), group=one)


def group_that_rank_0_does_not_create(rank: int, world: int) -> None:
    if rank != 0:
        dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(2))


def group_that_rank_2_does_not_create(rank: int, world: int) -> None:
    if rank != 2:
        dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(2))


def default_group_made_by_one(rank: int, world: int) -> None:
    if rank == 1:
        dist.init_process_group("gloo")


def async_work_that_one_does_not_post(rank: int, world: int) -> None:
    if rank == 1:
        dist.send(torch.ones(LARGE), 0)
    else:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        work.wait()


CREATION = ("the creation of group", "dist.new_group(")
# What each rank waits for, in parts, and the call on the line of the program where it does.
DEADLOCKS: dict[Callable[[int, int], None], dict[int, tuple[str, str]]] = {
    ring_of_receives: {
        0: ("recv #0 from rank 1 of group '... with tag 0 on [4] float32", "dist.recv("),
        1: ("recv #0 from rank 2 of group '... with tag 0 on [4] float32", "dist.recv("),
        2: ("recv #0 from rank 0 of group '... with tag 0 on [4] float32", "dist.recv("),
    },
    large_message_without_receive: {
        0: (f"send #0 to rank 1 of group '... with tag 0 on [{LARGE}] float32", "dist.send("),
        1: ("barrier #0 of group", "dist.barrier("),
        2: ("barrier #0 of group", "dist.barrier("),
    },
    another_tag: {
        0: ("send #0 to rank 1 ... with tag 1", "dist.send("),
        1: ("recv #0 from rank 0 ... with tag 2", "dist.recv("),
        2: ("barrier #0", "dist.barrier("),
    },
    barrier_of_one_member: {
        0: ("barrier #0 of group '1'", "dist.barrier(group=pair)"),
        1: ("barrier #0 of group '0'", "dist.barrier()"),
        2: ("barrier #0 of group '0'", "dist.barrier()"),
    },
    groups_in_another_order: {
        0: ("all_reduce #0 of group '1'...on [3] float32", "group=one"),
        1: ("all_reduce #0 of group '2'...on [5] float32", "group=other"),
    },
    group_that_rank_0_does_not_create: {
        0: ("all_reduce #0", "dist.all_reduce("), 1: CREATION, 2: CREATION
    },
    group_that_rank_2_does_not_create: {
        0: CREATION, 1: CREATION, 2: ("all_reduce #0", "dist.all_reduce(")
    },
    default_group_made_by_one: {1: ("the creation of group", "dist.init_process_group(")},
    async_work_that_one_does_not_post: {
        0: ("all_reduce #0 of group '...on [5] float32", "work.wait()"),
        1: ("send #0 to rank 0", "dist.send("),
        2: ("all_reduce #0 of group '...on [5] float32", "work.wait()"),
    },
}  # fmt: skip


@PARALLEL
@pytest.mark.parametrize("program", DEADLOCKS)
def test_every_rank_raises_what_all_wait_for(program, parallel):
    found, waits = diagnose(program, parallel=parallel), DEADLOCKS[program]
    assert isinstance(found.error, pc.Deadlock), repr(found.error)
    assert set(found.waits) == set(waits), found.error
    for rank, (what, call) in waits.items():
        for part in what.split("..."):
            assert part in found.waits[rank], (rank, found.error)
        assert call in found.source[rank], (rank, found.error)
    for rank in {0, 1, 2} - set(waits):
        assert f"rank {rank} has ended" in str(found.error)
    assert set(found.others) == set(waits) - {found.by}
    assert all(text.startswith("Deadlock") for text in found.others.values()), found.others


@PARALLEL
def test_a_key_that_no_rank_writes(parallel):
    def program(rank: int, world: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["missing"], datetime.timedelta(seconds=30))
        dist.barrier()

    # The limit is the caller's own, who may go on after it: it ends at once instead of a deadlock.
    found = diagnose(program, parallel=parallel)
    assert isinstance(found.error, pc.Timeout), repr(found.error)
    assert "missing' before the timeout was over" in str(found.error)
    assert "rank 0 waits for barrier #0" in str(found.error)


NEVER_POSTED = """
import time, torch, torch.distributed as dist, pycollect as pc
from pycollect import threads

def program(rank, world):
    if rank == 1:
        dist.recv(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()

for parallel in (False, True):
    begin = time.monotonic()
    try:
        threads.launch(program, 3, timeout=20, parallel=parallel)
    except pc.Deadlock:
        print("deadlock", time.monotonic() - begin < 5)
"""


def test_a_future_of_a_work_that_a_peer_never_posts(tmp_path):
    """In a process of its own: a thread of another test could be the one that is awaited."""
    program = tmp_path / "program.py"
    program.write_text(NEVER_POSTED)
    found = run([sys.executable, program], timeout=60)
    assert found.stdout == "deadlock True\n" * 2, found.stdout + found.stderr


@PARALLEL
def test_a_backward_pass_of_ddp_ends_when_a_peer_has_ended(parallel):
    def program(rank: int, world: int) -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        if rank != 0:
            model(torch.ones(2, 3)).sum().backward()

    with ends_within(5), pytest.raises(RuntimeError) as caught:
        threads.launch(program, 3, timeout=20, parallel=parallel)
    assert not isinstance(caught.value, pc.Timeout), caught.value


@PARALLEL
def test_a_thread_of_a_rank_that_waits_hides_no_deadlock(parallel):
    def program(rank: int, world: int) -> None:
        pair = dist.new_group([0, 1])
        if rank == 0:
            thread = threading.Thread(target=ignoring_loss, args=(pair,))
            thread.start()
        dist.barrier()
        if rank == 0:
            thread.join()

    def ignoring_loss(pair: Any) -> None:
        with contextlib.suppress(pc.PeerLost, pc.Deadlock):
            dist.all_reduce(torch.ones(3), group=pair)

    with ends_within(5):
        threads.launch(program, 3, timeout=1.5, parallel=parallel)


@pytest.mark.slow
def test_a_rank_that_is_left_behind_is_no_success():
    def program(rank: int, world: int) -> int:
        if rank == 0:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return rank

    with ends_within(12), pytest.raises(pc.Deadlock, match=r"rank 0 did not stop.*\n.*is blocked"):
        threads.launch(program, 2)


def test_a_rank_that_is_left_behind_changes_no_random_state(monkeypatch):
    ends, entered = threading.Event(), time.monotonic()

    def program(rank: int, world: int) -> None:
        torch.manual_seed(100 + rank)
        if rank == 0:
            try:
                time.sleep(1.5)  # no exception interrupts it
            finally:
                ends.set()

    monkeypatch.setattr(launcher, "_INTERRUPT_SECONDS", 0.1)
    monkeypatch.setattr(launcher, "_ABANDON_SECONDS", 0.4)
    with pytest.raises(pc.Timeout):
        threads.launch(program, 2, timeout=0.3)
    assert not ends.is_set()
    torch.manual_seed(7)
    assert ends.wait(10)
    time.sleep(0.2)  # rank 0 leaves, which lets rank 1 have its first turn
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(7)))
    assert time.monotonic() - entered > 1.5


# --- timeouts of groups ---------------------------------------------------------------------------


def reduced(rank: int, x: torch.Tensor, group: Any) -> None:
    dist.all_reduce(x, group=group)


def received(rank: int, x: torch.Tensor, group: Any) -> None:
    if rank == 1:
        dist.send(x, 0, group=group)
    else:
        dist.recv(x, 1, group=group)


@pytest.mark.parametrize("call", [reduced, received])
def test_a_call_that_raised_writes_nothing_later(
    call: Callable[[int, torch.Tensor, Any], None],
) -> None:
    def program(rank: int, world: int, late: float) -> tuple[bool, float, float]:
        x = torch.full((40_000_000,), rank + 1.0)  # a call takes longer than its limit
        group = dist.new_group()
        group._get_backend(torch.device("cpu")).set_timeout(datetime.timedelta(milliseconds=20))
        dist.barrier()
        if rank == 1:
            time.sleep(late)
        raised = False
        try:
            call(rank, x, group)
        except pc.CollectiveError:
            raised = True
        at_the_end = x[-1].item()
        time.sleep(0.1)
        return raised, at_the_end, x[-1].item()

    for late in (0.002, 0.015, 0.1):
        outcomes = threads.launch(program, 2, late, parallel=True, timeout=60)
        for _, at_the_end, later in outcomes:
            assert at_the_end == later
        raised, at_the_end, _ = outcomes[0]
        assert (at_the_end == 1.0) == raised
