"""pycollect.threads.launch: arguments, results, refusals, and how launches begin and end."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import total

import pycollect as pc
from pycollect import threads


def test_results_are_in_the_order_of_ranks():
    assert threads.launch(lambda rank, world: (rank, world), 4) == [(r, 4) for r in range(4)]


def test_further_arguments_reach_every_rank():
    box: list[int] = []
    found = threads.launch(lambda rank, world, *args: args, 2, 1, "two", box)
    assert found == [(1, "two", box)] * 2
    assert found[0][2] is box


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("world", [1, 2, 7])
def test_ranks_have_a_default_group(world, parallel):
    def program(rank: int, world: int) -> tuple[int, int, str, float]:
        return dist.get_rank(), dist.get_world_size(), dist.get_backend(), total(rank, world)

    wanted = [(r, world, "pycollect", sum(range(world))) for r in range(world)]
    assert threads.launch(program, world, parallel=parallel) == wanted


def test_launches_follow_each_other():
    for world in (3, 1, 5, 2):
        assert threads.launch(total, world) == [sum(range(world))] * world


def test_one_rank_runs_at_a_time_in_the_order_of_ranks():
    turns: list[tuple[str, int]] = []

    def program(rank: int, world: int) -> None:
        for step in ("first", "second"):
            turns.append((step, rank))
            dist.barrier()

    threads.launch(program, 4)
    assert turns[:4] == [("first", r) for r in range(4)]
    assert sorted(turns[4:]) == [("second", r) for r in range(4)]
    first = list(turns)
    turns.clear()
    threads.launch(program, 4)
    assert turns == first


def test_parallel_ranks_run_at_once():
    met = threading.Barrier(3)

    def program(rank: int, world: int) -> int:
        return met.wait(timeout=10)

    assert sorted(threads.launch(program, 3, parallel=True)) == [0, 1, 2]


def test_results_do_not_alias_tensors_of_other_ranks():
    def program(rank: int, world: int) -> list[torch.Tensor]:
        x = torch.full((4,), float(rank))
        everybody = [torch.empty(4) for _ in range(world)]
        dist.all_gather(everybody, x)
        y = torch.zeros(4)
        dist.scatter(y, everybody if rank == 0 else None, 0)
        received = torch.empty(4)
        sent = dist.isend(x, (rank + 1) % world)
        dist.recv(received, (rank - 1) % world)
        sent.wait()
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, x)
        exchanged = torch.empty(4)
        dist.all_to_all_single(exchanged[: world * 1], torch.full((world,), float(rank)))
        return [x, *everybody, y, received, exchanged, *objects]

    results = threads.launch(program, 3)
    owners: dict[int, int] = {}
    for rank, tensors in enumerate(results):
        for tensor in tensors:
            owner = owners.setdefault(tensor.untyped_storage().data_ptr(), rank)
            assert owner == rank, f"ranks {owner} and {rank} share memory"
    for tensors in results:
        before = [t.clone() for t in results[0]] if tensors is not results[0] else None
        for tensor in tensors:
            tensor.fill_(-1)
        if before:
            assert all(torch.equal(a, b) for a, b in zip(before, results[0], strict=True))


# --- refusals -------------------------------------------------------------------------------------


def test_a_function_is_required():
    with pytest.raises(TypeError, match="fn is a int"):
        threads.launch(3, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [0, -1])
def test_a_world_needs_a_rank(world):
    with pytest.raises(ValueError, match=f"world is {world}; it must be at least 1"):
        threads.launch(total, world)


@pytest.mark.parametrize("world", [2.5, "2", None, True])
def test_a_world_is_an_integer(world):
    with pytest.raises((TypeError, ValueError), match="world"):
        threads.launch(total, world)


@pytest.mark.parametrize(
    ("timeout", "error"), [("1", TypeError), (True, TypeError), (-1, ValueError)]
)
def test_a_timeout_is_in_seconds(timeout, error):
    with pytest.raises(error, match="timeout is"):
        threads.launch(total, 2, timeout=timeout)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (["cpu"], "1 devices for 2 ranks"),
        (["cpu"] * 3, "3 devices for 2 ranks"),
        ("nonsense", "no such device"),
        ("meta", "pass None, 'cpu' or a GPU"),
    ],
)
def test_a_device_is_the_cpu_or_a_gpu(device, message):
    with pytest.raises(ValueError, match=message):
        threads.launch(total, 2, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="torch finds no GPU"):
        threads.launch(total, 2, device="cuda:0")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), ["cpu", None]])
def test_the_cpu_can_be_named(device):
    assert threads.launch(total, 2, device=device) == [1.0, 1.0]


def test_launches_do_not_nest():
    def program(rank: int, world: int) -> str:
        with pytest.raises(RuntimeError, match="this thread is a rank already") as caught:
            threads.launch(total, 2)
        assert total(rank, world) == 3  # the launch itself is not harmed
        return str(caught.value)

    assert all("cannot nest" in text for text in threads.launch(program, 3))


def test_a_thread_of_a_rank_cannot_launch():
    errors: list[BaseException] = []

    def inner() -> None:
        try:
            threads.launch(total, 2)
        except RuntimeError as error:
            errors.append(error)

    def program(rank: int, world: int) -> float:
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
        return total(rank, world)

    assert threads.launch(program, 2) == [1.0, 1.0]
    assert len(errors) == 2
    assert all("cannot nest" in str(e) for e in errors)


def test_another_thread_cannot_launch_meanwhile():
    begun, end = threading.Event(), threading.Event()
    results: list[Any] = []

    def slow(rank: int, world: int) -> float:
        begun.set()
        assert end.wait(10)
        return total(rank, world)

    other = threading.Thread(target=lambda: results.append(threads.launch(slow, 2)))
    other.start()
    try:
        assert begun.wait(10)
        with pytest.raises(RuntimeError, match="another thread of this process runs a launch"):
            threads.launch(total, 3)
    finally:
        end.set()
        other.join()
    assert results == [[1.0, 1.0]]
    assert threads.launch(total, 3) == [3.0] * 3


# --- failures and ends ----------------------------------------------------------------------------


def test_the_first_exception_is_raised_with_notes():
    class OwnError(Exception):
        pass

    mine = OwnError("wrong")

    def program(rank: int, world: int) -> None:
        dist.barrier()
        if rank == 1:
            raise mine
        dist.barrier()

    with pytest.raises(OwnError) as caught:
        threads.launch(program, 3)
    assert caught.value is mine
    assert mine.__notes__[0] == "raised by rank 1 of 3"
    assert sorted(n[: len("rank 0 raised PeerLost")] for n in mine.__notes__[1:]) == [
        "rank 0 raised PeerLost",
        "rank 2 raised PeerLost",
    ]
    frames = [f.name for f in caught.traceback]
    assert "program" in frames  # the traceback leads to the rank's line


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("timeout", [0.2, datetime.timedelta(seconds=0.2)])
def test_a_timeout_ends_ranks_that_compute(timeout, parallel):
    def program(rank: int, world: int) -> None:
        dist.barrier()
        while rank == 0:
            sum(range(1000))
        dist.barrier()

    begin = time.monotonic()
    with pytest.raises(pc.Timeout, match="has not ended within its timeout") as caught:
        threads.launch(program, 2, timeout=timeout, parallel=parallel)
    assert time.monotonic() - begin < 3
    assert f"{__file__}:" in str(caught.value)
    assert "in program" in str(caught.value)
    assert threads.launch(total, 2) == [1.0, 1.0]


def test_a_launch_that_ends_in_time_is_not_harmed_by_its_timeout():
    assert threads.launch(total, 2, timeout=60) == [1.0, 1.0]


INTERRUPTED = """
import os, signal, sys, threading, time
import torch.distributed as dist
from pycollect import threads

def program(rank, world):
    dist.barrier()
    if rank == int(sys.argv[1]):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            time.sleep(0.01)
    dist.barrier()

signal.signal(signal.SIGINT, signal.default_int_handler)
begin = time.monotonic()
try:
    threads.launch(program, 3, parallel=sys.argv[2] == "True")
except KeyboardInterrupt as error:
    print("interrupted", len(error.__notes__), time.monotonic() - begin < 5)
    left = [t.name for t in threading.enumerate() if t.name.startswith("rank")]
    print("left", left, threads.launch(lambda rank, world: rank, 2))
"""


@pytest.mark.parametrize("busy", [0, 2])
@pytest.mark.parametrize("parallel", [False, True])
def test_ctrl_c_ends_all_ranks(busy, parallel):
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED, str(busy), str(parallel)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.stdout == "interrupted 3 True\nleft [] [0, 1]\n", found.stdout + found.stderr
