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


def _reduced(tensors: Sequence[Tensor], op: str, algorithm: str | None) -> list[Tensor]:
    results: list[Tensor] = operators.all_reduce(
        [plain(t) for t in tensors], op, algorithm=algorithm
    )
    return results


class Extreme(torch.autograd.Function):
    """Max or min over the ranks; ranks with this value share its gradient, as in torch.amax."""

    @staticmethod
    def forward(op: str, algorithm: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_reduced(tensors, op, algorithm))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors = inputs[2:]
        ctx.devices = tuple(t.device for t in tensors)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, world = ctx.saved_tensors, len(grads)
        values, found = saved[:world], saved[world:]
        here = [_equal(v.detach(), f.detach()) for v, f in zip(values, found, strict=True)]
        total = AllReduce(ctx.devices, mean=False)
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
    def forward(algorithm: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_reduced(tensors, "prod", algorithm))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.algorithm, *tensors = inputs
        ctx.devices = tuple(t.device for t in tensors)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        totals = AllReduce(ctx.devices, mean=False).some(grads, wanted)
        results: list[Tensor | None] = [None]
        for rank, total in enumerate(totals):
            if total is None:
                results.append(None)
                continue
            others = list(values)
            others[rank] = torch.ones_like(values[rank])
            products: tuple[Tensor, ...] = cast(Any, Product).apply(ctx.algorithm, *others)
            results.append(total * products[rank].conj())
        return tuple(results)
