"""async_op=True returns a Work: its guarantees for order, results, errors and lifetimes."""

from __future__ import annotations

import gc
import sys
import weakref

import programs
import pytest
import torch
from reference import COLLECTIVES, IN_PLACE, assert_same, expected, left_fold, randoms

import pycollect as pc

LARGE = 1_000_003


def clones(tensors):
    return [t.clone() for t in tensors]


@pytest.mark.parametrize("count", [5, LARGE])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_wait_and_result(collective, count):
    values = randoms(3, (count,), torch.int32)
    wanted, tensors = expected(collective, values), clones(values)
    work = getattr(pc, collective)(tensors, async_op=True)
    assert work.is_completed() in (True, False)
    got = work.wait()
    assert work.is_completed() is True
    for again in (work.result(), work.wait()):
        assert again is got is None or all(a is g for a, g in zip(again, got, strict=True))
    assert (got is None) is (collective in IN_PLACE)
    assert_same(tensors if got is None else got, wanted)
    tensors = clones(values)
    got = getattr(pc, collective)(tensors, async_op=True).result()
    assert_same(tensors if got is None else got, wanted, "result waits")


def test_works_run_in_call_order():
    steps = [("all_reduce", "sum"), ("broadcast", 1), ("all_reduce", "bxor"), ("reduce", 2)]
    steps += [("all_reduce", "prod"), ("broadcast", 2), ("all_reduce", "avg")]
    for count in (7, 100_003):
        tensors = randoms(3, (count,), torch.int32)
        wanted = clones(tensors)
        works = []
        for name, argument in steps * 5:
            works.append(getattr(pc, name)(tensors, argument, async_op=True))
            option = {"op": argument} if name == "all_reduce" else {"root": argument}
            wanted = expected(name, wanted, **option)
        works[-1].wait()
        assert all(work.is_completed() for work in works), "the last waits for all before it"
        assert_same(tensors, wanted)


def test_synchronous_calls_run_after_earlier_async_calls():
    for _ in range(5):
        tensors = randoms(4, (LARGE,), torch.int32)
        first = left_fold(tensors, "sum")
        wanted = left_fold([first] * 4, "prod")
        work = pc.all_reduce(tensors, async_op=True)
        pc.all_reduce(tensors, "prod")
        assert_same(tensors, [wanted] * 4)
        assert work.is_completed()


def test_a_pending_result_may_be_the_next_calls_input():
    values = randoms(3, (LARGE,), torch.int32)
    out = [torch.zeros(3 * LARGE, dtype=torch.int32) for _ in range(3)]
    pc.all_gather(values, out=out, async_op=True)
    pc.all_reduce(out, async_op=True).wait()
    assert_same(out, [torch.cat(values) * 3] * 3)


@pytest.mark.parametrize("async_op", [False, True])
def test_inputs_of_unlike_layouts_are_copied_after_earlier_works(async_op):
    values = randoms(2, (1500, 1001), torch.int32)
    rows, columns = clones(values), [v.t().contiguous().t() for v in values]
    total = left_fold(values, "sum")
    works = [pc.all_reduce(tensors, async_op=True) for tensors in (rows, columns)]
    got = pc.all_gather([rows[0], columns[0]], async_op=async_op)
    assert_same(got.wait() if async_op else got, [torch.cat([total] * 2)] * 2)
    del works


def test_sources_that_are_not_dense_are_copied_after_earlier_works():
    values = randoms(2, (1500, 1001), torch.int32)
    tensors = [v.clone()[:, ::2] for v in values]
    work = pc.all_reduce(tensors, async_op=True)
    got = pc.replicate([tensors[0]], "cpu*2")
    assert_same([mine[0] for mine in got], [left_fold(values, "sum")[:, ::2]] * 2)
    del work


def test_many_works_are_waited_for_in_any_order():
    values = [randoms(2, (1000 + i,), torch.int32, seed=i) for i in range(200)]
    tensors = [clones(v) for v in values]
    works = [pc.all_reduce(t, async_op=True) for t in tensors]
    for i in reversed(range(200)):
        works[i].wait()
        assert_same(tensors[i], [left_fold(values[i], "sum")] * 2, i)


def test_tensors_live_until_their_work_completes():
    values = randoms(3, (LARGE,), torch.int32)
    wanted = expected("all_gather", values)
    for _ in range(3):
        inputs = clones(values)
        work = pc.all_gather(inputs, async_op=True)
        del inputs
        gc.collect()
        # Reuses the inputs' memory if it has been freed.
        _ = [torch.full((LARGE,), 7, dtype=torch.int32) for _ in range(3)]
        assert_same(work.wait(), wanted)
    last = values[0].clone()
    work = pc.all_reduce([last, *clones(values[1:])], async_op=True)  # a list held by no caller
    gc.collect()
    work.wait()
    assert_same([last], [left_fold(values, "sum")])


def test_tensors_are_released_when_their_work_completes():
    tensors = randoms(2, (1000,), torch.int32)
    alive = [weakref.ref(t) for t in tensors]
    work = pc.all_reduce(tensors, async_op=True)
    work.wait()
    del tensors
    gc.collect()
    assert [a() for a in alive] == [None, None], "a finished Work keeps its inputs"


def test_a_work_completes_without_a_wait():
    values = randoms(2, (LARGE,), torch.int32)
    tensors = clones(values)
    pc.all_reduce(tensors, async_op=True)  # the Work is dropped
    gc.collect()
    pc.barrier("cpu*2")
    assert_same(tensors, [left_fold(values, "sum")] * 2)


def test_invalid_async_calls_raise_at_once_and_affect_no_other_call():
    tensors = randoms(2, (LARGE,), torch.int32)
    wanted = [left_fold(tensors, "sum")] * 2
    work = pc.all_reduce(tensors, async_op=True)
    with pytest.raises(ValueError, match="shape"):
        pc.all_reduce([tensors[0], torch.zeros(3, dtype=torch.int32)], async_op=True)
    work.wait()
    assert_same(tensors, wanted)


EXITS_WITH_WORK = """
import sys
import numpy, torch
import pycollect as pc
tensors = [torch.ones(3_000_000) for _ in range(4)]
arrays = [numpy.ones(100, numpy.float32) for _ in range(4)]
works = [pc.all_reduce(tensors, "max", async_op=True) for _ in range(10)]
works += [pc.all_reduce(arrays, "max", async_op=True) for _ in range(10)]
if sys.argv[1] == "drop":
    del tensors, arrays, works
"""


# Python 3.11 to 3.13 ends the thread by an exception that no code may catch. The thread creates and
# frees no tensors: torch aborts if it is ended while torch frees one.
EXITS_IN_A_CALL = """
import threading, time
import torch
import pycollect as pc
class Slow:
    def __index__(self):
        time.sleep(0.02)
        return 0
tensors = [torch.ones(4), torch.ones(4)]
def call():
    while True:
        pc.broadcast(tensors, src=Slow())
threading.Thread(target=call, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize("how", ["keep", "drop", "daemon"])
def test_a_program_may_exit_with_work_in_flight(how):
    program = EXITS_IN_A_CALL if how == "daemon" else EXITS_WITH_WORK
    done = programs.run([sys.executable, "-c", program, how], timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
