"""CuPy arrays on CuPy's own stream: calls are ordered with it on entry and on exit.

The library orders the call behind CuPy's stream, which `__cuda_array_interface__` names, and that
stream behind the call.
"""

from __future__ import annotations

import pytest
import torch
from reference import assert_same, expected, left_fold, randoms

import pycollect as pc

pytestmark = pytest.mark.cuda

COUNT = 500_009


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason="needs CuPy: pip install 'pycollect[cuda13]'")


def arrays_of(cupy, values):
    return [cupy.asarray(v.numpy()) for v in values]


def tensors_of(cupy, arrays):
    return [torch.from_numpy(cupy.asnumpy(a)) for a in arrays]


def delay_stream(stream, cycles=20_000_000):
    """Keep CuPy's stream busy for about 10 ms."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(cycles)


@pytest.mark.parametrize("algorithm", [None, "two_shot"])
def test_calls_are_ordered_with_cupys_current_stream(cupy, algorithm):
    values = randoms(3, (COUNT,), torch.int32)
    base = arrays_of(cupy, values)
    arrays = [cupy.zeros_like(b) for b in base]
    copies = [cupy.zeros_like(b) for b in base]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for _ in range(5):
        with stream:
            delay_stream(stream)
            for a, b in zip(arrays, base, strict=True):
                a[...] = b
            pc.all_reduce(arrays, algorithm=algorithm)
            for c, a in zip(copies, arrays, strict=True):
                c[...] = a
                a.fill(-7)
        stream.synchronize()
        assert_same(tensors_of(cupy, copies), [left_fold(values, "sum")] * 3)


def test_arrays_as_inputs_and_outputs(cupy):
    values = randoms(3, (60, 7), torch.float32)
    arrays = arrays_of(cupy, values)
    for collective in ("all_gather", "reduce_scatter", "all_to_all"):
        wanted = expected(collective, values)
        got = getattr(pc, collective)(arrays)
        assert_same([g.cpu() for g in got], wanted, collective)
        out = [cupy.zeros(tuple(w.shape), cupy.float32) for w in wanted]
        getattr(pc, collective)(arrays, out=out)
        assert_same(tensors_of(cupy, out), wanted, f"{collective}, out")
    chunks = pc.scatter(arrays[0], "cuda:0*3")
    assert_same([c.cpu() for c in chunks], list(values[0].tensor_split(3)))


def test_an_async_work_keeps_its_arrays_alive(cupy):
    values = randoms(3, (COUNT,), torch.int32)
    wanted = expected("all_gather", values)
    for _ in range(5):
        arrays = arrays_of(cupy, values)
        torch.cuda._sleep(20_000_000)
        work = pc.all_gather(arrays, async_op=True)
        del arrays
        spoilers = [cupy.full(COUNT, 7, cupy.int32) for _ in range(9)]
        assert_same([g.cpu() for g in work.wait()], wanted)
        del spoilers
