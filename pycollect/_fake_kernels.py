"""Fake kernels of torch.ops.pycollect.*: shapes and layouts of results, without any data.

torch.compile and torch.export run them in place of the operators, which csrc/torch/ops.cpp defines.
Results have the layouts that the operators give them, because compiled code relies on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._in_graph import FUNCTIONS
from .autograd.linear_along_dim import even

Kernel = Callable[..., Any]
Tensors = Sequence[Tensor]


def _fake(name: str) -> Callable[[Kernel], Kernel]:
    """Return a decorator that registers a fake kernel, which gets all arguments by name."""
    schema = getattr(torch.ops.pycollect, name).default._schema
    names = [argument.name for argument in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}

    def register(kernel: Kernel) -> Kernel:
        def fake(*args: Any, **options: Any) -> Any:
            return kernel(**{**defaults, **dict(zip(names, args, strict=False)), **options})

        torch.library.register_fake(f"pycollect::{name}", fake)
        return kernel

    return register


def _writes_its_arguments(*_args: object, **_options: object) -> None:
    """Operators that only write tensors of their caller: their schemas say all that is known."""


for _name in FUNCTIONS:
    for _operator in (f"{_name.rstrip('_')}_", f"{_name}.out"):
        if torch._C._dispatch_has_kernel(f"pycollect::{_operator}"):
            torch.library.register_fake(f"pycollect::{_operator}", _writes_its_arguments)


def _common_order(tensors: Tensors) -> list[int]:
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

    def __init__(self, inputs: Tensors, dim: int) -> None:
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


def _strides_without_unit_dims(tensor: Tensor) -> list[int]:
    """Return the strides of all dimensions but those of size 1, whose strides mean nothing."""
    return [step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie side by side: a new tensor then has the same strides."""
    return _strides_without_unit_dims(tensor) == _strides_without_unit_dims(
        torch.empty_like(tensor)
    )


def _in_one_layout(tensors: Tensors) -> Tensors:
    """Return dense tensors of equal strides themselves, others as contiguous tensors."""
    if all(
        _strides_without_unit_dims(t) == _strides_without_unit_dims(tensors[0]) and _is_dense(t)
        for t in tensors
    ):
        return tensors
    return [t.contiguous() for t in tensors]


@_fake("all_reduce")
def _all_reduce(tensors: Tensors, **_: Any) -> list[Tensor]:
    return [torch.empty_like(t) for t in _in_one_layout(tensors)]


@_fake("reduce")
def _reduce(tensors: Tensors, dst: int, **_: Any) -> Tensor:
    return torch.empty_like(_in_one_layout(tensors)[dst])


@_fake("tree_sum")
def _tree_sum(tensors: Tensors, dtype: torch.dtype | None) -> Tensor:
    return torch.empty_like(_in_one_layout(tensors)[0], dtype=dtype)


@_fake("broadcast")
def _broadcast(tensors: Tensors, src: int, **_: Any) -> list[Tensor]:
    return [torch.empty_like(tensors[src], device=t.device) for t in tensors]


@_fake("all_gather")
def _all_gather(tensors: Tensors, dim: int, **_: Any) -> list[Tensor]:
    blocks = _Blocks(tensors, dim)
    return [blocks.result(sum(blocks.lengths), t.device) for t in tensors]


@_fake("reduce_scatter")
def _reduce_scatter(tensors: Tensors, dim: int, **_: Any) -> list[Tensor]:
    blocks = _Blocks(tensors, dim)
    chunks = even(blocks.lengths[0], len(tensors))
    return [blocks.result(n, t.device) for n, t in zip(chunks, tensors, strict=True)]


@_fake("all_to_all")
def _all_to_all(tensors: Tensors, dim: int, split_sizes: Any) -> list[Tensor]:
    blocks, world = _Blocks(tensors, dim), len(tensors)
    if split_sizes is None:
        sent = [even(length, world) for length in blocks.lengths]
    else:
        rows = [split_sizes[at : at + world] for at in range(0, len(split_sizes), world)]
        sent = [tuple(row) for row in rows * (world if len(rows) == 1 else 1)]
    arrived = zip(*sent, strict=True)
    return [blocks.result(sum(n), t.device) for n, t in zip(arrived, tensors, strict=True)]


@_fake("scatter")
def _scatter(tensor: Tensor, devices: list[str], chunk_sizes: Any, dim: int) -> list[Tensor]:
    blocks = _Blocks([tensor], dim)
    chunks = even(blocks.lengths[0], len(devices)) if chunk_sizes is None else chunk_sizes
    return [blocks.result(n, device) for n, device in zip(chunks, devices, strict=True)]


@_fake("gather")
def _gather(tensors: Tensors, device: torch.device | None, dim: int) -> Tensor:
    blocks = _Blocks(tensors, dim)
    return blocks.result(sum(blocks.lengths), device or tensors[0].device)


@_fake("replicate")
def _replicate(tensors: Tensors, devices: list[str]) -> list[Tensor]:
    dense = [t if _is_dense(t) else t.contiguous() for t in tensors]
    return [torch.empty_like(t, device=device) for t in dense for device in devices]


@_fake("copy")
def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device)
