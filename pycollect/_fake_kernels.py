"""Fake kernels of torch.ops.pycollect.*: shapes and layouts of results, without any data.

torch.compile and torch.export run them in place of the operators, which csrc/torch/ops.cpp defines.
Results have the layouts that the operators give them, because compiled code relies on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .autograd.linear_along_dim import even

P = ParamSpec("P")
R = TypeVar("R")
Devices = Sequence[str]  # names
Lengths = Sequence[int]

# Operators that only write tensors of their caller: nothing is known of them but their schemas.
_IN_PLACE = ["all_reduce_", "all_reduce_coalesced_", "reduce_", "broadcast_", "copy_"]
_IN_PLACE += ["broadcast_coalesced_", "all_gather.out", "reduce_scatter.out", "all_to_all.out"]
_IN_PLACE += ["scatter.out", "gather.out"]


def _fake(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return torch.library.register_fake(name), with the type that it lacks."""
    register: Callable[[Callable[P, R]], Callable[P, R]] = torch.library.register_fake(
        f"pycollect::{name}"
    )
    return register


def _writes_its_arguments(*_args: object, **_options: object) -> None:
    pass


for _name in _IN_PLACE:
    _fake(_name)(_writes_its_arguments)


def _common_order(tensors: Sequence[Tensor]) -> list[int]:
    """Return an order of dimensions in which all tensors are contiguous, else the row-major one."""
    row_major = list(range(tensors[0].dim()))
    if all(t.is_contiguous() for t in tensors):
        return row_major
    largest = max(tensors, key=lambda t: t.numel())
    order = sorted(row_major, key=lambda d: -largest.stride()[d])
    fits = all(t.numel() == 0 or t.permute(order).is_contiguous() for t in tensors)
    return order if fits else row_major


class _Blocks:
    """Results of a collective along a dimension: they have the inputs' order of dimensions."""

    def __init__(self, inputs: Sequence[Tensor], dim: int) -> None:
        self._first, self._order = inputs[0], _common_order(inputs)
        self._dim = range(inputs[0].dim())[dim]
        self.lengths = [t.shape[self._dim] for t in inputs]

    def result(self, length: int, device: torch.device | str) -> Tensor:
        """Return an empty result of a length along the dimension."""
        sizes = list(self._first.shape)
        sizes[self._dim] = length
        ordered = [sizes[d] for d in self._order]
        empty = torch.empty(ordered, dtype=self._first.dtype, device=device)
        return empty.permute([self._order.index(d) for d in range(len(sizes))])


def _steps(tensor: Tensor) -> list[int]:
    """Return the strides of all dimensions but those of size 1, whose strides mean nothing."""
    return [step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie side by side: a new tensor then has the same strides."""
    return _steps(tensor) == _steps(torch.empty_like(tensor))


def _alike(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return dense tensors of equal strides themselves, others as contiguous tensors."""
    if all(_steps(t) == _steps(tensors[0]) and _is_dense(t) for t in tensors):
        return tensors
    return [t.contiguous() for t in tensors]


@_fake("all_reduce")
def _all_reduce(
    tensors: Sequence[Tensor], op: str = "sum", *, algorithm: str | None = None
) -> list[Tensor]:
    return [torch.empty_like(t) for t in _alike(tensors)]


@_fake("reduce")
def _reduce(
    tensors: Sequence[Tensor], dst: int = 0, op: str = "sum", *, algorithm: str | None = None
) -> Tensor:
    return torch.empty_like(_alike(tensors)[dst])


@_fake("broadcast")
def _broadcast(
    tensors: Sequence[Tensor], src: int = 0, *, algorithm: str | None = None
) -> list[Tensor]:
    return [torch.empty_like(tensors[src], device=t.device) for t in tensors]


@_fake("all_gather")
def _all_gather(
    tensors: Sequence[Tensor], dim: int = 0, *, algorithm: str | None = None
) -> list[Tensor]:
    blocks = _Blocks(tensors, dim)
    return [blocks.result(sum(blocks.lengths), t.device) for t in tensors]


@_fake("reduce_scatter")
def _reduce_scatter(
    tensors: Sequence[Tensor], op: str = "sum", dim: int = 0, *, algorithm: str | None = None
) -> list[Tensor]:
    blocks = _Blocks(tensors, dim)
    chunks = even(blocks.lengths[0], len(tensors))
    return [blocks.result(n, t.device) for n, t in zip(chunks, tensors, strict=True)]


@_fake("all_to_all")
def _all_to_all(
    tensors: Sequence[Tensor], dim: int = 0, split_sizes: Lengths | None = None
) -> list[Tensor]:
    blocks, world = _Blocks(tensors, dim), len(tensors)
    if split_sizes is None:
        sent = [even(length, world) for length in blocks.lengths]
    else:
        rows = [split_sizes[at : at + world] for at in range(0, len(split_sizes), world)]
        sent = [tuple(row) for row in rows * (world if len(rows) == 1 else 1)]
    arrived = zip(*sent, strict=True)
    return [blocks.result(sum(n), t.device) for n, t in zip(arrived, tensors, strict=True)]


@_fake("scatter")
def _scatter(
    tensor: Tensor, devices: Devices, chunk_sizes: Lengths | None = None, dim: int = 0
) -> list[Tensor]:
    blocks = _Blocks([tensor], dim)
    chunks = even(blocks.lengths[0], len(devices)) if chunk_sizes is None else chunk_sizes
    return [blocks.result(n, device) for n, device in zip(chunks, devices, strict=True)]


@_fake("gather")
def _gather(tensors: Sequence[Tensor], device: torch.device | None = None, dim: int = 0) -> Tensor:
    blocks = _Blocks(tensors, dim)
    return blocks.result(sum(blocks.lengths), device or tensors[0].device)


@_fake("replicate")
def _replicate(tensors: Sequence[Tensor], devices: Devices) -> list[Tensor]:
    dense = [t if _is_dense(t) else t.contiguous() for t in tensors]
    return [torch.empty_like(t, device=device) for t in dense for device in devices]


@_fake("copy")
def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device)
