"""Calls on memory that is not torch's, such as CuPy's, on emulated GPUs: its order and its life."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from emulated_gpus import Array, Gpus, on_ranks, total, values


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("async_op", [False, True])
def test_arrays_of_other_libraries_are_ordered_with_their_streams(
    gpus: Gpus, async_op: bool
) -> None:
    of = values(2)
    theirs = gpus.stream()
    arrays = [Array(gpus, v, theirs) for v in of]
    work = gpus.all_reduce(arrays, async_op=async_op)
    if async_op:
        work.wait()
    for a in arrays:
        gpus.expect(a.memory, total(of), theirs)
    gpus.check()


@pytest.mark.usefixtures("exchange")
def test_memory_of_other_libraries_is_ordered_when_a_work_is_dropped(gpus: Gpus) -> None:
    of = values(2)
    theirs = gpus.stream()
    arrays = [Array(gpus, v, theirs) for v in of]
    work = gpus.all_reduce(arrays, async_op=True)
    del work
    gc.collect()
    for a in arrays:
        gpus.expect(a.memory, total(of), theirs)
    gpus.check()


def test_memory_that_torch_does_not_own_is_ordered_when_a_work_is_dropped(gpus: Gpus) -> None:
    """Its owner, such as another process, reuses it in the order of the current stream."""
    of = values(2)
    tensors = [gpus.torch.empty_foreign(8, 0) for _ in of]
    for t, v in zip(tensors, of, strict=True):
        gpus.torch.write(t, v)
    work = gpus.all_reduce(tensors, async_op=True)
    del work
    gc.collect()
    for t in tensors:
        gpus.expect(t, total(of))
    gpus.check()


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("async_op", [False, True])
def test_an_array_without_a_stream_is_ordered_with_the_current_one(
    gpus: Gpus, async_op: bool
) -> None:
    """Its library has ordered its work before that stream, but the call is on named streams."""
    of = values(2)
    arrays = [Array(gpus, v, gpus.torch.current(0), tells=False) for v in of]
    named = [gpus.stream() for _ in of]
    work = gpus.all_reduce(arrays, streams=named, async_op=async_op)
    if async_op:
        work.wait()
    for a in arrays:
        gpus.expect(a.memory, total(of))
    gpus.check()


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("tells", [False, True])
def test_an_asynchronous_call_on_arrays_overlaps_with_later_work(gpus: Gpus, tells: bool) -> None:
    """The current stream waits in wait(), although the arrays' library uses it, too."""
    arrays = [Array(gpus, v, gpus.torch.current(0), tells) for v in values(2)]
    work = gpus.all_reduce(arrays, async_op=True)
    gpus.torch.write(arrays[0].memory, torch.zeros(8))  # before wait(): a mistake of the caller
    assert gpus.cuda.race is not None
    work.wait()


def test_memory_that_is_not_aligned_is_refused(gpus: Gpus) -> None:
    tensors = [gpus.torch.empty_foreign(8, 0, offset) for offset in (0, 2)]
    with pytest.raises(ValueError, match=r"tensors\[1\] .*not aligned"):
        gpus.all_reduce(tensors)


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("tells", [False, True])
def test_a_stream_in_a_capture_is_refused_outside(gpus: Gpus, tells: bool) -> None:
    """The named streams would join the capture: the call would run in replays only."""
    named, origin = gpus.stream(), gpus.stream()
    gpus.cuda.allow_eager_work(True)
    arrays = [Array(gpus, v, named, tells) for v in values(2)]
    with gpus.capture(origin):
        for a in arrays:
            a.stream = origin
        with pytest.raises(ValueError, match="stream of an array's library is in the capture"):
            gpus.all_reduce(arrays, streams=[named] * 2)
        assert gpus.cuda.capture_id(named) == 0


@pytest.mark.usefixtures("exchange")
def test_arrays_are_ordered_with_a_stream_of_the_same_capture(gpus: Gpus) -> None:
    of = values(2)
    origin, named = gpus.stream(), gpus.stream()
    with gpus.capture(origin):
        gpus.fork(origin, named)
        arrays = [Array(gpus, v, origin, tells=False) for v in of]
        gpus.all_reduce(arrays, streams=[named] * 2)
        for a in arrays:
            gpus.expect(a.memory, total(of), origin)
    gpus.check()


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("async_op", [False, True])
def test_the_first_failure_is_raised_if_the_device_is_lost(async_op: bool) -> None:
    """Whatever the library still tries on the device, such as ordering streams, fails as well."""

    def failure(kind: str, after: int) -> str:
        gpus = Gpus(2)
        of, theirs = values(4, 64), [gpus.stream(device) for device in (0, 1)]
        tensors: list[Any] = on_ranks(gpus, of, 2)
        tensors[:2] = [Array(gpus, of[0], theirs[0]), tensors[1]]
        gpus.all_reduce(tensors, algorithm="two_shot", async_op=async_op)
        gpus.cuda.inject(kind, after=after)
        try:
            gpus.all_reduce(tensors, algorithm="two_shot", async_op=async_op)
        except RuntimeError as error:
            return str(error)
        else:
            return ""
        finally:
            gpus.cuda.heal()
            gpus.torch.run(0)
            gpus.close()

    number = 0
    while first := failure("fail", number):
        assert failure("lost", number) == first
        number += 1
    assert number > 20
