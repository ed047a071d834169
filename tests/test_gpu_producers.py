"""Calls on memory that is not torch's, such as CuPy's, on emulated GPUs: its order and its life."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_gpus import Array, Gpus, on_ranks, values


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
