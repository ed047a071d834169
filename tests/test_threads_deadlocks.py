"""Deadlocks and lost peers on ranks as threads: what each rank waits for is said at once."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import (
    LARGE,
    PARALLEL,
    Diagnosis,
    assert_all_raise,
    diagnose,
    ends_within,
)

import pycollect as pc
from pycollect import threads


def assert_deadlock(found: Diagnosis, waits: dict[int, tuple[str, str]], world: int = 3) -> None:
    """Check what the ranks wait for, and the call on the line of the program where each waits."""
    assert isinstance(found.error, pc.Deadlock), repr(found.error)
    assert set(found.waits) == set(waits), found.error
    for rank, (what, call) in waits.items():
        for part in what.split("..."):
            assert part in found.waits[rank], (rank, found.error)
        assert call in found.source[rank], (rank, found.error)
    for rank in set(range(world)) - set(waits):
        assert f"rank {rank} has ended" in str(found.error)
    assert set(found.others) == set(waits) - {found.by}


@PARALLEL
def test_a_ring_of_receives(parallel):
    def program(rank: int, world: int) -> None:
        dist.recv(torch.ones(4), (rank + 1) % world)

    found = diagnose(program, parallel=parallel)
    assert_deadlock(found, {
        r: (f"recv #0 from rank {(r + 1) % 3} of group '... with tag 0 on [4] float32", "dist.recv")
        for r in range(3)
    })  # fmt: skip


@PARALLEL
def test_every_rank_raises_the_deadlock(parallel):
    def program(rank: int, world: int) -> None:
        dist.recv(torch.ones(4), (rank + 1) % world)

    assert_all_raise(diagnose(program, parallel=parallel), pc.Deadlock)


@PARALLEL
def test_a_large_message_without_a_receive(parallel):
    def program(rank: int, world: int) -> None:
        if rank == 0:
            dist.send(torch.ones(LARGE), 1)
        dist.barrier()

    found = diagnose(program, parallel=parallel)
    assert_deadlock(found, {
        0: (f"send #0 to rank 1 of group '... with tag 0 on [{LARGE}] float32", "dist.send"),
        1: ("barrier #0 of group", "dist.barrier"),
        2: ("barrier #0 of group", "dist.barrier"),
    })  # fmt: skip


def test_a_message_to_a_rank_that_has_ended():
    def program(rank: int, world: int) -> None:
        if rank == 0:
            dist.send(torch.ones(LARGE), 1)

    found = diagnose(program)
    assert isinstance(found.error, pc.PeerLost)
    assert "send #0 to rank 1" in str(found.error)
    assert "rank 1 has left" in str(found.error)


@PARALLEL
def test_another_tag(parallel):
    def program(rank: int, world: int) -> None:
        if rank == 0:
            dist.send(torch.ones(LARGE), 1, tag=1)
        if rank == 1:
            dist.recv(torch.ones(LARGE), 0, tag=2)
        dist.barrier()

    found = diagnose(program, parallel=parallel)
    assert_deadlock(found, {
        0: ("send #0 to rank 1 ... with tag 1", "dist.send"),
        1: ("recv #0 from rank 0 ... with tag 2", "dist.recv"),
        2: ("barrier #0", "dist.barrier"),
    })  # fmt: skip


@PARALLEL
@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize(("more", "dtype"), [(1, torch.float32), (-1, torch.float32),
                                             (0, torch.int32)])  # fmt: skip
def test_a_receive_of_another_size_or_dtype(more, dtype, count, parallel):
    def program(rank: int, world: int) -> None:
        if rank == 0:
            dist.send(torch.ones(count), 1)
        if rank == 1:
            dist.recv(torch.ones(count + more, dtype=dtype), 0)
        dist.barrier()

    found = diagnose(program, parallel=parallel)
    assert isinstance(found.error, ValueError)
    assert f"rank 0 sent {4 * count} bytes of float32 with tag 0 to rank 1" in str(found.error)
    assert f"a receive of {4 * (count + more)} bytes of" in str(found.error)


@PARALLEL
def test_a_barrier_of_a_subgroup_that_a_member_does_not_enter(parallel):
    def program(rank: int, world: int) -> None:
        pair = dist.new_group([0, 1])
        if rank == 0:
            dist.barrier(group=pair)
        else:
            dist.barrier()

    found = diagnose(program, parallel=parallel)
    assert_deadlock(found, {
        0: ("barrier #0 of group '", "group=pair"),
        1: ("barrier #0 of group '", "dist.barrier()"),
        2: ("barrier #0 of group '", "dist.barrier()"),
    })  # fmt: skip
    assert found.waits[0] != found.waits[1] == found.waits[2]


@PARALLEL
def test_groups_used_in_another_order(parallel):
    def program(rank: int, world: int) -> None:
        one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        if rank == 0:
            dist.all_reduce(torch.ones(3), group=one)
            dist.all_reduce(torch.ones(3), group=other)
        if rank == 1:
            dist.all_reduce(torch.ones(5), group=other)
            dist.all_reduce(torch.ones(5), group=one)

    found = diagnose(program, parallel=parallel)
    assert_deadlock(found, {
        0: ("all_reduce #0 of group '...on [3] float32", "group=one"),
        1: ("all_reduce #0 of group '...on [5] float32", "group=other"),
    })  # fmt: skip


@PARALLEL
@pytest.mark.parametrize("absent", [0, 2])
def test_a_group_that_not_all_ranks_create(absent, parallel):
    def program(rank: int, world: int) -> None:
        if rank != absent:
            dist.new_group([0, 1, 2])
        dist.all_reduce(torch.ones(2))

    found = diagnose(program, parallel=parallel)
    assert_deadlock(found, {
        r: ("all_reduce #0", "dist.all_reduce") if r == absent else ("", "dist.new_group")
        for r in range(3)
    })  # fmt: skip
    for rank in {0, 1, 2} - {absent}:
        assert "creation of group" in found.waits[rank] or "the store's key" in found.waits[rank]


@PARALLEL
def test_a_default_group_that_one_rank_makes_again(parallel):
    def program(rank: int, world: int) -> None:
        if rank == 1:
            dist.init_process_group("gloo")

    found = diagnose(program, parallel=parallel)
    assert isinstance(found.error, pc.Deadlock), repr(found.error)
    assert "the creation of group" in str(found.error)


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


@PARALLEL
def test_an_async_work_that_a_peer_never_posts(parallel):
    def program(rank: int, world: int) -> None:
        if rank == 1:
            dist.send(torch.ones(LARGE), 0)
        else:
            work = dist.all_reduce(torch.ones(5), async_op=True)
            work.wait()

    found = diagnose(program, parallel=parallel)
    all_reduce = ("all_reduce #0 of group '...on [5] float32", "work.wait()")
    assert_deadlock(found, {0: all_reduce, 1: ("send #0 to rank 0", "dist.send"), 2: all_reduce})


@PARALLEL
def test_a_thread_of_a_rank_that_waits(parallel):
    import threading

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


def test_a_rank_that_is_left_behind_changes_no_random_state():
    ends, entered = threading.Event(), time.monotonic()

    def program(rank: int, world: int) -> None:
        torch.manual_seed(100 + rank)
        if rank == 0:
            try:
                time.sleep(4)  # no exception interrupts it
            finally:
                ends.set()

    with ends_within(4), pytest.raises(pc.Timeout):
        threads.launch(program, 2, timeout=0.3)
    torch.manual_seed(7)
    assert ends.wait(10)
    time.sleep(0.2)  # rank 0 leaves, which lets rank 1 have its first turn
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(7)))
    assert time.monotonic() - entered > 4
