"""Calls on memory that is not torch's, such as CuPy's, on emulated GPUs: its order and its life."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest
import torch
from emulated_gpus import Gpus, total, values
from torch import Tensor


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch import DLPack tensors of the emulated kind of device."""
    module = ModuleType("torch.privateuseone")
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.privateuseone", module)


class Array:
    """An array of a library that uses its memory on a stream of its own, as CuPy does."""

    def __init__(self, gpus: Gpus, of: Tensor, stream: object) -> None:
        self.memory = gpus.tensor(of, stream=stream)
        self.stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"version": 3, "stream": self.stream.stream_id}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (12, 0)  # DLPack's kDLExtDev is torch's PrivateUse1

    def __dlpack__(self, **_: object) -> object:
        return torch.utils.dlpack.to_dlpack(self.memory)


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
    tensors = [gpus.torch.foreign(8, 0) for _ in of]
    for t, v in zip(tensors, of, strict=True):
        gpus.torch.write(t, v)
    work = gpus.all_reduce(tensors, async_op=True)
    del work
    gc.collect()
    for t in tensors:
        gpus.expect(t, total(of))
    gpus.check()
