"""A child that is forked after its parent has reduced in parallel works, and never hangs.

at::parallel_for hangs in such a child, so no child calls torch's own kernels: expected
values are computed before the fork, and compared through NumPy. A hang is a failure.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import traceback

import numpy as np
import pytest
import torch
from reference import left_fold, randoms

import pycollect as pc

SECONDS = 15
LARGE = 500_003
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def parallel_parent():
    """Every test starts in a process whose threads have already run reductions."""
    torch.set_num_threads(max(2, torch.get_num_threads()))
    tensors = [torch.ones(LARGE) for _ in range(3)]
    pc.all_reduce(tensors)
    pc.all_reduce(tensors, async_op=True).wait()
    torch.ones(LARGE).add_(1).sum()


def in_child(body):
    """Run body() in a forked child; the test fails with its traceback, or if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # never returns into pytest
        status = b"right"
        try:
            body()
        except BaseException:
            status = traceback.format_exc().encode()
        os.write(writer, status)
        os._exit(0)
    os.close(writer)
    try:
        ready = select.select([reader], [], [], SECONDS)[0]
        output = os.read(reader, 65536).decode() if ready else f"hung for {SECONDS} s"
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert output == "right", output or "died"


def case(count=LARGE, dtype=torch.float32, world=3):
    """Tensors, and their sum as an array."""
    tensors = randoms(world, (count,), dtype, tame=True)
    return tensors, left_fold(tensors, "sum").numpy()


def check(tensors, wanted):
    for t in tensors:
        np.testing.assert_array_equal(t.numpy(), wanted)


@pytest.mark.parametrize("algorithm", [None, *pc.algorithms()])
def test_every_algorithm_in_a_child(algorithm):
    tensors, wanted = case(dtype=torch.int32)

    def body():
        pc.all_reduce(tensors, algorithm=algorithm)
        check(tensors, wanted)

    in_child(body)


def test_many_calls_of_every_size():
    cases = [case(count) for count in (1, 1000, 8193, 100_003, LARGE)]

    def body():
        for tensors, wanted in cases:
            pc.all_reduce(tensors)
            check(tensors, wanted)

    in_child(body)


def test_out_of_place_and_async_in_a_child():
    tensors, wanted = case()
    everything = np.concatenate([t.numpy() for t in tensors])
    gathered = [np.empty(3 * LARGE, np.float32) for _ in range(3)]

    def body():
        pc.all_gather(tensors, out=gathered, async_op=True).wait()
        for g in gathered:
            np.testing.assert_array_equal(g, everything)
        work = pc.all_reduce(tensors, async_op=True)
        work.wait()
        check(tensors, wanted)

    in_child(body)


# Calls that must rearrange elements; torch would do that with threads of its own.
UNLIKE = {
    "all_gather": lambda a, b, out: pc.all_gather([a, b])[1],
    "all_gather, out": lambda a, b, out: pc.all_gather([a, a], out=out)[1],
    "reduce_scatter": lambda a, b, out: pc.reduce_scatter([a, b])[0],
    "all_to_all": lambda a, b, out: pc.all_to_all([a, b])[0],
    "gather": lambda a, b, out: pc.gather([a, b]),
    "scatter": lambda a, b, out: pc.scatter(b[:, ::2], "cpu*2")[1],
    "replicate": lambda a, b, out: pc.replicate([b[:, ::2]], "cpu*2")[1][0],
    "copy_": lambda a, b, out: (pc.copy_(a, b), a)[1],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_unlike_layouts_in_a_child(mode):
    @mode()
    def call(name, tensors):
        return UNLIKE[name](*tensors).numpy()

    def tensors():
        a = torch.arange(490_000.0).view(700, 700)
        return a, a.flip(0).t(), [torch.zeros(700, 1400).t() for _ in range(2)]

    cases = [(name, call(name, tensors()), tensors()) for name in UNLIKE]

    def body():
        for name, wanted, mine in cases:
            np.testing.assert_array_equal(call(name, mine), wanted, name)

    in_child(body)


def test_a_child_forked_while_work_is_in_flight():
    mine, my_sum = case()
    copies, sum_of_copies = case()
    works = [pc.all_reduce([t.clone() for t in mine], async_op=True) for _ in range(20)]
    works.append(pc.all_reduce(mine, async_op=True))

    def body():
        pc.all_reduce(copies)
        check(copies, sum_of_copies)
        again, its_sum = copies, copies[0].numpy() * np.float32(3)
        pc.all_reduce(again, async_op=True).wait()
        np.testing.assert_allclose(again[0].numpy(), its_sum, rtol=1e-6)

    in_child(body)
    for work in works:
        work.wait()
    check(mine, my_sum)


def test_a_grandchild():
    tensors, wanted = case()
    copies = [t.clone() for t in tensors]

    def body():
        pc.all_reduce(copies)
        in_child(lambda: (pc.all_reduce(tensors), check(tensors, wanted)))

    in_child(body)


def test_forked_from_another_thread():
    tensors, wanted = case()
    failures = []

    def fork():
        try:
            in_child(lambda: (pc.all_reduce(tensors), check(tensors, wanted)))
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join(2 * SECONDS)
    assert not thread.is_alive()
    assert not failures, failures


def _sum_of(array, queue):
    tensors = [torch.from_numpy(array.copy()) for _ in range(4)]
    pc.all_reduce(tensors)
    queue.put([float(t.numpy().max()) for t in tensors])


def test_multiprocessing_fork():
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    array = np.full(LARGE, 1.5, np.float32)
    children = [context.Process(target=_sum_of, args=(array, queue)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(SECONDS)
    alive = [child for child in children if child.is_alive()]
    for child in alive:
        child.kill()
    assert not alive, "a forked worker hung"
    assert [child.exitcode for child in children] == [0, 0]
    assert [queue.get() for _ in children] == [[6.0] * 4] * 2
