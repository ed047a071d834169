"""Ranks as threads in rare situations: callbacks, polling, threads of ranks, lost turns."""

from __future__ import annotations

import _thread
import contextlib
import hashlib
import io
import multiprocessing
import queue
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import PARALLEL, ends_within

import pycollect as pc
from pycollect import threads


@PARALLEL
def test_polling_ends_when_the_peer_has_left(parallel):
    def program(rank: int, world: int) -> bool:
        if rank == 1:
            return True
        work = dist.all_reduce(torch.ones(2), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        return work.is_success()

    with ends_within(2):
        assert threads.launch(program, 2, parallel=parallel, timeout=20) == [False, True]


@PARALLEL
def test_a_thread_of_a_rank_reads_the_store(parallel):
    def program(rank: int, world: int) -> bytes:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"key {rank}", f"value {rank}")
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(store.get, f"key {1 - rank}").result()

    assert threads.launch(program, 2, parallel=parallel, timeout=20) == [b"value 1", b"value 0"]


def waits_for_an_event(rank: int) -> list[float]:
    """Lose the turn in the wait, because there is a future of a work that is not complete."""
    x, event = torch.ones(1), threading.Event()
    if rank == 1:
        dist.all_reduce(x)
        return torch.rand(3).tolist()
    work = dist.all_reduce(x, async_op=True)
    work.get_future()
    threading.Timer(0.3, event.set).start()
    event.wait()
    numbers: list[float] = torch.rand(3).tolist()
    work.wait()
    return numbers


def waits_for_a_future(rank: int) -> list[float]:
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
    else:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        dist.send(torch.zeros(1), 1)
        future.wait()
    return torch.rand(3).tolist()


def waits_for_threads_that_compute(rank: int) -> list[float]:
    """Keep the turn, as in a parallel loop of torch; an open future is no reason to lose it."""
    data, lock = bytes(16 << 20), threading.Lock()

    def compute() -> None:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            hashlib.sha256(data)  # without the GIL
        lock.release()

    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        numbers: list[float] = torch.rand(3).tolist()
        dist.all_reduce(torch.ones(1))
        return numbers
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.get_future()
    dist.send(torch.zeros(1), 1)
    lock.acquire()
    _thread.start_new_thread(compute, ())
    lock.acquire()
    numbers = torch.rand(3).tolist()
    work.wait()
    return numbers


@pytest.mark.parametrize(
    "draw", [waits_for_an_event, waits_for_a_future, waits_for_threads_that_compute]
)
def test_a_rank_has_its_own_random_state_after_a_wait(draw):
    def program(rank: int, world: int) -> list[float]:
        torch.manual_seed(rank)
        return draw(rank)

    for rank, numbers in enumerate(threads.launch(program, 2, timeout=20)):
        assert torch.rand(3, generator=torch.Generator().manual_seed(rank)).tolist() == numbers


@pytest.mark.parametrize("wait", ["result", "join", "queue"])
def test_a_rank_waits_with_a_limit_for_a_thread_of_its_own(wait):
    """It loses its turn: the thread waits for the other ranks."""

    def program(rank: int, world: int) -> None:
        if wait == "result":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(dist.barrier).result(timeout=15)
            return
        done: queue.Queue[None] = queue.Queue()
        thread = threading.Thread(target=lambda: done.put(dist.barrier()))
        thread.start()
        thread.join(15) if wait == "join" else done.get(timeout=15)
        assert not thread.is_alive() or wait == "queue"

    with ends_within(5):
        threads.launch(program, 2, timeout=20)


def test_a_callback_posts_the_last_part_of_a_collective():
    """The callback runs in a thread that runs collectives of which all ranks have posted theirs."""

    def program(rank: int, world: int) -> tuple[float, float]:
        big, y, z = torch.ones(30_000_000), torch.ones(1), torch.ones(1)
        token = torch.zeros(1)
        if rank == 1:
            works = [dist.all_reduce(x, async_op=True) for x in (big, y)]
            dist.send(token, 0)
            dist.all_reduce(z)
            for work in works:
                work.wait()
            return y.item(), z.item()
        dist.recv(token, 1)
        out: list[torch.futures.Future[Any]] = []
        posting = threading.Event()

        def post_second() -> None:
            posting.wait()
            time.sleep(0.02)  # the first one runs
            future = dist.all_reduce(y, async_op=True).get_future()
            out.append(future.then(lambda _: dist.all_reduce(z)))

        thread = threading.Thread(target=post_second)
        thread.start()
        posting.set()
        dist.all_reduce(big)
        thread.join()
        out[0].wait()
        return y.item(), z.item()

    assert threads.launch(program, 2, timeout=20) == [(2.0, 2.0)] * 2


def older_thread(pool: ThreadPoolExecutor | None, store: Any) -> None:
    assert pool is not None
    pool.submit(lambda: (time.sleep(0.5), store.set("now", "")))


def thread_with_a_limit(pool: None, store: Any) -> None:
    def write() -> None:
        with pytest.raises(pc.Timeout):
            store.wait(["never"], timedelta(seconds=1))
        store.set("now", "")

    threading.Thread(target=write).start()


def thread_that_begins_late(pool: None, store: Any) -> None:
    """A new thread may take long to begin, and counts before."""
    threading.Thread(target=store.set, args=("now", ""), name="late").start()


@pytest.mark.parametrize("write", [older_thread, thread_with_a_limit, thread_that_begins_late])
def test_a_thread_that_may_write_the_key_is_waited_for(write, monkeypatch):
    begin = threading.Thread._bootstrap_inner

    def begin_late(self: threading.Thread) -> None:
        if self.name == "late":
            self._started.set()  # the rank that has started it goes on
            time.sleep(0.2)
        begin(self)

    def program(rank: int, world: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            write(pool, store)
        store.wait(["now"])

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", begin_late)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1)) if write is older_thread else None
        if pool is not None:
            pool.submit(int).result()
        threads.launch(program, 2, timeout=20)


def set_later(event: Any) -> None:
    time.sleep(4)
    event.set()


def wait_for_another_process(pool: ThreadPoolExecutor) -> None:
    """Such a wait is like one for a lock, but another process ends it."""
    context = multiprocessing.get_context("fork")
    event = context.Event()
    process = context.Process(target=set_later, args=(event,))
    process.start()
    event.wait()
    process.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait",
    [
        lambda pool: pool.submit(time.sleep, 5).result(),
        lambda pool: pool.submit(subprocess.check_output, ["sleep", "5"]).result(),
        wait_for_another_process,
    ],
)
def test_a_long_wait_for_what_is_no_rank_is_no_deadlock(wait):
    def program(rank: int, world: int) -> None:
        if rank == 0:
            wait(pool)
        dist.barrier()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the pool's thread was there before the launch
        threads.launch(program, 2, timeout=30)


def idle_pool() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    return pool


def monitor_of_progress_bars() -> None:
    bars = pytest.importorskip("tqdm")
    if bars.tqdm.monitor is not None:
        bars.tqdm.monitor.exit()
        bars.tqdm.monitor = None
    for _ in bars.tqdm(range(2), file=io.StringIO()):
        pass


@pytest.mark.parametrize("start", [idle_pool, monitor_of_progress_bars])
def test_an_idle_thread_of_a_rank_hides_no_deadlock(start):
    def program(rank: int, world: int) -> None:
        started = start() if rank == 0 else None
        dist.recv(torch.ones(1), 1 - rank)
        del started

    with ends_within(5), pytest.raises(pc.Deadlock):
        threads.launch(program, 2, timeout=20)
