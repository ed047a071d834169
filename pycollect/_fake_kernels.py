"""Fake kernels of torch.ops.pycollect.*: result shapes for torch.compile and torch.export.

The operators are defined in csrc/torch/ops.cpp; the eager functions do not use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def _fake(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return torch.library.register_fake(name), with the type that it lacks."""
    register: Callable[[Callable[P, R]], Callable[P, R]] = torch.library.register_fake(name)
    return register


@_fake("pycollect::all_reduce_")
def _all_reduce(tensors: list[Tensor], op: str = "sum", *, algorithm: str | None = None) -> None:
    pass


@_fake("pycollect::reduce_")
def _reduce(
    tensors: list[Tensor], dst: int = 0, op: str = "sum", *, algorithm: str | None = None
) -> None:
    pass


@_fake("pycollect::broadcast_")
def _broadcast(tensors: list[Tensor], src: int = 0, *, algorithm: str | None = None) -> None:
    pass


@_fake("pycollect::all_gather")
def _all_gather(
    tensors: list[Tensor], dim: int = 0, *, algorithm: str | None = None
) -> list[Tensor]:
    whole = torch.cat(tensors, dim)
    return [torch.empty_like(whole) for _ in tensors]


@_fake("pycollect::reduce_scatter")
def _reduce_scatter(
    tensors: list[Tensor], op: str = "sum", dim: int = 0, *, algorithm: str | None = None
) -> list[Tensor]:
    chunks = torch.tensor_split(tensors[0], len(tensors), dim)
    return [torch.empty_like(chunk) for chunk in chunks]


@_fake("pycollect::all_to_all")
def _all_to_all(tensors: list[Tensor], dim: int = 0) -> list[Tensor]:
    cut = [torch.tensor_split(t, len(tensors), dim) for t in tensors]
    return [torch.empty_like(torch.cat(arrived, dim)) for arrived in zip(*cut, strict=True)]
