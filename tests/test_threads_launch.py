"""pycollect.threads.launch: arguments, results, refusals, and how launches begin and end."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import PARALLEL, ends_within, total

import pycollect as pc
from pycollect import threads


@PARALLEL
@pytest.mark.parametrize(("world", "device"), [(1, None), (2, ["cpu", None]), (7, "cpu")])
def test_ranks_have_a_default_group_and_results_in_their_order(world, device, parallel):
    def program(rank: int, world: int, *more: Any) -> tuple[Any, ...]:
        assert dist.get_backend() == "pycollect"
        return rank, dist.get_rank(), dist.get_world_size(), total(rank, world), *more

    box: list[int] = []
    found = threads.launch(program, world, 1, box, device=device, parallel=parallel, timeout=60)
    assert found == [(r, r, world, sum(range(world)), 1, box) for r in range(world)]
    assert found[0][-1] is box


def test_one_rank_runs_at_a_time_in_the_order_of_ranks():
    turns: list[tuple[str, int]] = []

    def program(rank: int, world: int) -> None:
        turns.append(("first", rank))
        group = dist.new_group([0, 2])
        for step in ("second", "third"):
            dist.barrier()
            turns.append((step, rank))
            if rank in (0, 2):
                dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()

    runs = []
    for _ in range(4):
        threads.launch(program, 4)
        runs.append(list(turns))
        turns.clear()
    assert runs[0][:4] == [("first", r) for r in range(4)]
    assert sorted(runs[0]) == [(step, r) for step in ("first", "second", "third") for r in range(4)]
    assert runs == [runs[0]] * 4


def test_parallel_ranks_run_at_once():
    met = threading.Barrier(3)

    def program(rank: int, world: int) -> int:
        return met.wait(timeout=10)

    assert sorted(threads.launch(program, 3, parallel=True)) == [0, 1, 2]


def test_results_do_not_alias_tensors_of_other_ranks():
    def program(rank: int, world: int) -> list[torch.Tensor]:
        x, y, z = (torch.full((3,), float(rank)) for _ in range(3))
        everybody = [torch.empty(3) for _ in range(world)]
        dist.all_gather(everybody, x)
        dist.scatter(y, everybody if rank == 0 else None, 0)
        received, exchanged = torch.empty(3), torch.empty(3)
        sent = dist.isend(x, (rank + 1) % world)
        dist.recv(received, (rank - 1) % world)
        sent.wait()
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, x)
        dist.all_to_all_single(exchanged, z)
        return [x, y, z, *everybody, received, exchanged, *objects]

    owners: dict[int, int] = {}
    results = threads.launch(program, 3)
    for rank, tensors in enumerate(results):
        for tensor in tensors:
            owner = owners.setdefault(tensor.untyped_storage().data_ptr(), rank)
            assert owner == rank, f"ranks {owner} and {rank} share memory"


# --- refusals -------------------------------------------------------------------------------------


REFUSALS: list[Any] = [
    (3, 2, {}, TypeError, "fn is a int"),
    *((total, n, {}, ValueError, f"world is {n}; it must be at least 1") for n in (0, -1)),
    *((total, n, {}, TypeError, "world") for n in (2.5, "2", None, True)),
    *((total, 2, {"timeout": t}, TypeError, "timeout is") for t in ("1", True)),
    (total, 2, {"timeout": -1}, ValueError, "timeout is"),
    (total, 2, {"device": ["cpu"]}, ValueError, "1 devices for 2 ranks"),
    (total, 2, {"device": ["cpu"] * 3}, ValueError, "3 devices for 2 ranks"),
    (total, 2, {"device": "nonsense"}, ValueError, "no such device"),
    (total, 2, {"device": "meta"}, ValueError, "pass None, 'cpu' or a GPU"),
    pytest.param(
        *(total, 2, {"device": "cuda:0"}, ValueError, "torch finds no GPU"),
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
    ),
]


@pytest.mark.parametrize(("fn", "world", "options", "error", "message"), REFUSALS)
def test_wrong_arguments_are_refused(fn, world, options, error, message):
    with pytest.raises(error, match=message):
        threads.launch(fn, world, **options)


def test_launches_do_not_nest():
    def launch_again(errors: list[str]) -> None:
        with pytest.raises(RuntimeError, match="this thread is a rank already") as caught:
            threads.launch(total, 2)
        errors.append(str(caught.value))

    def program(rank: int, world: int) -> list[str]:
        errors: list[str] = []
        launch_again(errors)
        thread = threading.Thread(target=launch_again, args=(errors,))
        thread.start()
        thread.join()
        assert total(rank, world) == 3  # the launch itself is not harmed
        return errors

    for errors in threads.launch(program, 3):
        assert len(errors) == 2
        assert all("cannot nest" in text for text in errors)


def test_another_thread_cannot_launch_meanwhile():
    begun, end = threading.Event(), threading.Event()

    def slow(rank: int, world: int) -> float:
        begun.set()
        assert end.wait(10)
        return total(rank, world)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(threads.launch, slow, 2)
        assert begun.wait(10)
        with pytest.raises(RuntimeError, match="another thread of this process runs a launch"):
            threads.launch(total, 3)
        end.set()
        assert other.result() == [1.0, 1.0]
    assert threads.launch(total, 3) == [3.0] * 3


# --- stores of users ------------------------------------------------------------------------------


class PythonStore(dist.Store):
    """A user's store, which takes the GIL in every call and may be broken."""

    def __init__(self, checks: int) -> None:
        super().__init__()
        self._keys, self._left = dist.HashStore(), checks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._keys, name)

    def set(self, key: str, value: Any) -> None:
        self._keys.set(key, value)

    def get(self, key: str) -> Any:
        return self._keys.get(key)

    def add(self, key: str, value: int) -> int:
        return self._keys.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the store is broken")
        return self._keys.check(keys)


@PARALLEL
@pytest.mark.parametrize("checks", [0, 1, 2, 5, 1_000_000])
def test_a_users_store_may_be_broken(checks, parallel):
    store = PythonStore(checks)

    def program(rank: int, world: int) -> float:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        return total(rank, world)

    if checks == 1_000_000:
        assert threads.launch(program, 3, parallel=parallel, timeout=20) == [3.0] * 3
        return
    with pytest.raises(RuntimeError, match="the store is broken"), ends_within(5):
        threads.launch(program, 3, parallel=parallel, timeout=20)


def test_a_key_may_be_deleted_while_another_rank_reads_it():
    def program(rank: int, world: int) -> bytes | None:
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.set("key", "first")
            found: bytes = store.get("key")  # lets rank 1 run
            return found
        store.delete_key("key")
        store.check(["another"])  # lets rank 0 run
        store.set("key", "second")
        return None

    with ends_within(5):
        assert threads.launch(program, 2, timeout=10) == [b"second", None]


# --- ends -----------------------------------------------------------------------------------------


SHORT = datetime.timedelta(seconds=0.2)


@pytest.fixture
def python_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("busy", "parallel", "timeout"),
    [(0, False, None), (2, True, None), (0, False, 0.2), (2, True, SHORT)],
)
def test_ctrl_c_and_a_timeout_end_all_ranks(python_handler, busy, parallel, timeout):
    """One rank runs Python code meanwhile, and the others wait."""
    waiting: list[BaseException] = []

    def program(rank: int, world: int) -> None:
        dist.barrier()
        if rank == busy and timeout is None:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
        while rank == busy:
            sum(range(1000))
        try:
            dist.barrier()
        except pc.CollectiveError as error:
            waiting.append(error)
            raise

    kind = KeyboardInterrupt if timeout is None else pc.Timeout
    with ends_within(3), pytest.raises(kind) as caught:
        threads.launch(program, 3, parallel=parallel, timeout=timeout)
    assert len(caught.value.__notes__) == 3
    if timeout is not None:
        assert "has not ended within its timeout" in str(caught.value)
        assert str(caught.value).count(f"{__file__}:") == 3
        assert "in program" in str(caught.value)
        assert not parallel or [type(error) for error in waiting] == [pc.Timeout] * 2
    assert not [t for t in threading.enumerate() if t.name.startswith("rank")]
    assert threads.launch(total, 2) == [1.0, 1.0]
