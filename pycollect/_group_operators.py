"""Fake kernels and gradients of torch.ops.pycollect.group_*, the operators on a group's ranks.

csrc/torch/c10d/group_operators.cpp defines the operators. Gradients are those of the sum of all
ranks' losses, as in torch.distributed.nn.functional: every rank must run the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

operators = torch.ops.pycollect
Splits = list[int] | None


def _world(group_name: Any) -> int:
    return _resolve_process_group(group_name).size()


def _rows(tensor: Tensor, rows: int) -> Tensor:
    """Return an empty tensor like `tensor`, contiguous, with `rows` in the first dimension."""
    return tensor.new_empty([rows, *tensor.shape[1:]])


def _all_reduce(tensor: Tensor, op: str, group_name: str) -> Tensor:
    return tensor.new_empty(tensor.shape)


def _all_gather(input: Tensor, group_name: str) -> Tensor:
    return _rows(input, (input.shape[0] if input.dim() else 1) * _world(group_name))


def _reduce_scatter(input: Tensor, op: str, group_name: str) -> Tensor:
    return _rows(input, input.shape[0] // _world(group_name))


def _all_to_all(
    input: Tensor,
    group_name: str,
    output_split_sizes: Splits = None,
    input_split_sizes: Splits = None,
) -> Tensor:
    return _rows(input, sum(output_split_sizes) if output_split_sizes else input.shape[0])


def _in_place(*_args: object) -> None:
    pass


def _keep_reduction(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.op, ctx.group_name = inputs
    if ctx.op not in ("sum", "avg"):
        raise ValueError(f"op {ctx.op!r} has no gradient here; allowed are sum, avg")


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return operators.group_all_reduce(grad, ctx.op, ctx.group_name), None, None


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    share = grad / _world(ctx.group_name) if ctx.op == "avg" else grad
    return operators.group_all_gather(share, ctx.group_name), None, None


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensor, ctx.group_name = inputs
    ctx.shape = tensor.shape


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return operators.group_reduce_scatter(grad, "sum", ctx.group_name).reshape(ctx.shape), None


def _keep_splits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensor, ctx.group_name, ctx.output_split_sizes, ctx.input_split_sizes = inputs
    if ctx.input_split_sizes is None:  # the gradient may have another number of rows
        world = _world(ctx.group_name)
        ctx.input_split_sizes = [tensor.shape[0] // world] * world


def _all_to_all_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    splits = ctx.input_split_sizes, ctx.output_split_sizes
    return operators.group_all_to_all(grad, ctx.group_name, *splits), None, None, None


for _name, _fake, _keep, _backward in (
    ("group_all_reduce", _all_reduce, _keep_reduction, _all_reduce_backward),
    ("group_all_gather", _all_gather, _keep_shape, _all_gather_backward),
    ("group_reduce_scatter", _reduce_scatter, _keep_reduction, _reduce_scatter_backward),
    ("group_all_to_all", _all_to_all, _keep_splits, _all_to_all_backward),
):
    # Another rank may use the result that this one does not use, and waits for the call.
    torch.fx.node.has_side_effect(getattr(operators, _name).default)
    torch.library.register_fake(f"pycollect::{_name}", _fake)
    torch.library.register_fake(f"pycollect::{_name}_", _in_place)
    torch.library.register_autograd(f"pycollect::{_name}", _backward, setup_context=_keep)
