"""Emulates the GPU kernels on host memory: runs the steps of one level without a GPU.

The code is that of the kernels; only inline loads and stores are replaced. Every access is checked
for alignment and recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import reference as ref
import torch
from torch import Tensor

from pycollect import _testing

ARGS_BYTES = 4096  # of kernel parameters


@dataclasses.dataclass
class Task:
    """A kernel task, on 2-D views with contiguous rows and any stride between rows."""

    dsts: Sequence[Tensor]
    srcs: Sequence[Tensor]
    finishes: bool = True

    def packed(self) -> tuple[Any, ...]:
        rows, count = self.dsts[0].shape
        sides = (self.dsts, self.srcs)
        addresses = [[t.data_ptr() for t in side] for side in sides]
        pitches = [[t.stride(0) * t.element_size() for t in side] for side in sides]
        return (*addresses, *pitches, count, rows, self.finishes)


def float8_bytes() -> list[int]:
    """The bytes of overflow, infinity and NaN in both float8 types, in the installed torch."""
    values = torch.tensor([1e6, float("inf"), float("nan")])
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
    return [int(b) & 0x7F for kind in kinds for b in values.to(kind).view(torch.uint8)]


def launch(
    tasks: Sequence[Task],
    op: str = "sum",
    *,
    world: int = 0,
    multiprocessors: int = 1,
    float8: Sequence[int] = (),
    order: str = "rank",
) -> list[dict[str, Any]]:
    """Run the tasks; return what each launch did, which must not write beside its destinations."""
    dtype, result = tasks[0].srcs[0].dtype, tasks[0].dsts[0].dtype
    dsts = [dst for task in tasks for dst in task.dsts]
    before = [ref.surrounding_bytes(dst) for dst in dsts]
    launches: list[dict[str, Any]] = _testing.emulate_launch(
        [task.packed() for task in tasks],
        ref.short(dtype),
        op,
        world or len(tasks[0].srcs),
        multiprocessors,
        float8 or float8_bytes(),
        order,
        result != dtype,
    )
    for one in launches:
        assert one["stored_twice"] == 0
        assert one["args_bytes"] <= ARGS_BYTES
    for dst, around in zip(dsts, before, strict=True):
        assert torch.equal(ref.surrounding_bytes(dst), around), "wrote outside"
    return launches


def one_row(t: Tensor) -> Tensor:
    """A dense tensor as one row."""
    return t.view(1, -1)


def shifted(t: Tensor, elements: int) -> Tensor:
    """Copy a tensor as one row that starts `elements` elements after a multiple of 64 bytes."""
    base = torch.zeros(t.numel() + 64 + elements, dtype=t.dtype)
    start = -base.data_ptr() % 64 // t.element_size() + elements
    return base[start : start + t.numel()].copy_(t.flatten()).view(1, -1)


def reals(t: Tensor) -> int:
    return t.numel() * t.element_size()
