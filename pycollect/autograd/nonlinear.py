"""The all-reduces that are not linear: max and min, and the product.

Their gradients consist of linear collectives and products, so derivatives of any order exist. The
forward pass saves the values that the gradients depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .linear import AllReduce, operators
from .node import apply, plain

How = dict[str, Any]  # arguments of an all-reduce: algorithm and order


def _reduced(tensors: Sequence[Tensor], op: str, how: How) -> list[Tensor]:
    results: list[Tensor] = operators.all_reduce([plain(t) for t in tensors], op, **how)
    return results


class Extreme(torch.autograd.Function):
    """Max or min over the ranks; ranks with this value share its gradient, as in torch.amax."""

    @staticmethod
    def forward(op: str, how: How, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_reduced(tensors, op, how))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.how, *tensors = inputs
        ctx.devices = tuple(t.device for t in tensors)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, world = ctx.saved_tensors, len(grads)
        values, found = saved[:world], saved[world:]
        here = [_equal(v.detach(), f.detach()) for v, f in zip(values, found, strict=True)]
        total = AllReduce(ctx.devices, mean=False, order=ctx.how["order"])
        sharing = apply(total, [h.to(g.dtype) for h, g in zip(here, grads, strict=True)])
        totals = total.some(grads, ctx.needs_input_grad[2:])
        parts = zip(totals, here, sharing, strict=True)
        return None, None, *(None if t is None else t * h / s for t, h, s in parts)


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


class Product(torch.autograd.Function):
    """The product over the ranks; a rank's gradient has the product of the others as its factor.

    This factor is computed by one reduction for each rank that needs a gradient. A division of the
    product would be wrong for a rank with a zero.
    """

    @staticmethod
    def forward(how: How, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_reduced(tensors, "prod", how))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.how, *tensors = inputs
        ctx.devices = tuple(t.device for t in tensors)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        total = AllReduce(ctx.devices, mean=False, order=ctx.how["order"])
        totals = total.some(grads, wanted)
        results: list[Tensor | None] = [None]
        for rank, grad in enumerate(totals):
            if grad is None:
                results.append(None)
                continue
            others = list(values)
            others[rank] = torch.ones_like(values[rank])
            products: tuple[Tensor, ...] = cast(Any, Product).apply(ctx.how, *others)
            results.append(grad * products[rank].conj())
        return tuple(results)
