"""Module functions may be called from any thread, concurrently, on worlds of any size."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reference import assert_same, expected, left_fold, randoms

import pycollect as pc

THREADS = 8
SECONDS = 60


def run_concurrently(task, threads=THREADS):
    """Run task(0) ... task(threads - 1) concurrently; raise the first error."""
    gate = threading.Barrier(threads)

    def start(i):
        gate.wait(SECONDS)
        return task(i)

    with ThreadPoolExecutor(threads) as pool:
        return [f.result(SECONDS) for f in [pool.submit(start, i) for i in range(threads)]]


@pytest.mark.parametrize("count", [5, 3000, 100_003])
@pytest.mark.parametrize("async_op", [False, True], ids=["now", "async"])
def test_threads_with_different_worlds(count, async_op):
    def task(i):
        world = 2 + i % 4
        values = randoms(world, (count + i,), torch.int32, seed=i)
        for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce"):
            for _ in range(3):
                tensors = [v.clone() for v in values]
                got = getattr(pc, collective)(tensors, async_op=async_op)
                got = got.wait() if async_op else got
                wanted = expected(collective, values)
                assert_same(tensors if got is None else got, wanted, f"thread {i}, {collective}")

    run_concurrently(task)


def test_threads_share_inputs():
    values = randoms(3, (50_001,), torch.float32)
    wanted = expected("reduce_scatter", values)
    for got in run_concurrently(lambda _: [pc.reduce_scatter(values) for _ in range(10)]):
        for result in got:
            assert_same(result, wanted)


def test_threads_make_the_same_new_plans():
    # Worlds of no other test, every algorithm: all threads make the same plans at once.
    def task(i):
        for world in (17, 18, 19):
            for algorithm in pc.algorithms():
                tensors = randoms(world, (40,), torch.int64, seed=i)
                wanted = left_fold(tensors, "sum")
                pc.all_reduce(tensors, algorithm=algorithm)
                assert_same(tensors, [wanted] * world, f"thread {i}, {algorithm}")

    run_concurrently(task)


def test_threads_wait_for_one_work():
    values = randoms(3, (1_000_003,), torch.int32)
    tensors = [v.clone() for v in values]
    work = pc.all_reduce(tensors, async_op=True)
    assert run_concurrently(lambda _: work.wait()) == [None] * THREADS
    assert_same(tensors, [left_fold(values, "sum")] * 3)


def test_errors_stay_in_their_thread():
    def task(i):
        for _ in range(50):
            tensors = randoms(3, (100,), torch.int32, seed=i)
            if i % 2:
                with pytest.raises(ValueError, match=f"no_such_{i}"):
                    pc.all_reduce(tensors, algorithm=f"no_such_{i}")
            else:
                wanted = left_fold(tensors, "sum")
                pc.all_reduce(tensors)
                assert_same(tensors, [wanted] * 3)

    run_concurrently(task)


def test_other_threads_run_during_a_fold():
    # The GIL is released during a large fold: another thread completes steps.
    tensors = [torch.ones(8_000_000) for _ in range(4)]
    steps = [0]
    stop = threading.Event()

    def count():
        while not stop.is_set():
            steps[0] += 1
            stop.wait(0.0005)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        most = 0
        for _ in range(5):
            before = steps[0]
            pc.all_reduce(tensors, "max")
            most = max(most, steps[0] - before)
    finally:
        stop.set()
        counter.join()
    assert most >= 2, "no other thread ran during a fold of 128 MB"
