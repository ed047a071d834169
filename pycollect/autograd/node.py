"""The autograd node of a linear collective: its backward is the transposed collective.

A LinearCollective (linear.py, linear_along_dim.py) describes the collective as data. The node runs
it, and its transpose on the gradients. The transpose is recorded as such a node too, so derivatives
of any order exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class LinearCollective:
    """A linear collective as data: it maps a list of tensors to a list of results.

    Subclasses are frozen dataclasses of devices, sizes and flags, and hold no tensors.
    """

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the collective and return its results in new memory, not recorded by autograd."""
        raise NotImplementedError

    def one(self, tensors: Sequence[Tensor], rank: int) -> Tensor:
        """Compute only the result of `rank`, and record the computation in autograd.

        A collective that has one result, or overrides `some`, need not implement this.
        """
        raise NotImplementedError

    def some(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Compute only the results whose `wanted` is True, and record them in autograd.

        `wanted` has one item per result; the returned list has None for the other results.
        """
        return [self.one(tensors, rank) if want else None for rank, want in enumerate(wanted)]

    def transposed(self) -> LinearCollective:
        """Return the transpose: it maps the results' gradients to the input tensors' gradients."""
        raise NotImplementedError

    def batched(self) -> LinearCollective:
        """Return the same collective for tensors with a batch dimension in front, as under vmap.

        Collectives of whole tensors return themselves; those along a dimension shift it by one.
        """
        return self

    def reached(self, given: Sequence[bool], tensors: int) -> list[bool]:
        """Return for each of `tensors` inputs whether the gradients that exist reach it.

        `given` states for each result whether it has a gradient.
        """
        return [any(given)] * tensors


class _Like(NamedTuple):
    """Shape, dtype and device of the zeros that replace a missing gradient."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def plain(tensor: Tensor) -> Tensor:
    """Return a detached tensor with its values in memory: no lazy conjugate, negative or zero."""
    tensor = tensor.detach()
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_conj().resolve_neg()


class _Linear(torch.autograd.Function):
    """The autograd node of a LinearCollective, one for all ranks.

    A result without a gradient counts as zeros.
    """

    @staticmethod
    def forward(collective: LinearCollective, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(collective.run([plain(t) for t in tensors]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.collective, *tensors = inputs
        ctx.inputs = [_Like(t.shape, t.dtype, t.device) for t in tensors]
        ctx.outputs = [_Like(t.shape, t.dtype, t.device) for t in output]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        collective: LinearCollective = ctx.collective
        # An input's gradient is wanted if autograd needs it and an existing gradient reaches it.
        reached = collective.reached([g is not None for g in grads], len(ctx.inputs))
        wanted = [r and n for r, n in zip(reached, ctx.needs_input_grad[1:], strict=True)]
        if not any(wanted):
            return None, *(None for _ in wanted)
        filled = _filled(grads, ctx.outputs)
        back = collective.transposed()
        return None, *(apply(back, filled) if all(wanted) else back.some(filled, wanted))

    @staticmethod
    def jvp(ctx: Any, _collective: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(apply(ctx.collective, _filled(tangents, ctx.inputs)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], collective: LinearCollective, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        fronted = [
            t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        results = apply(collective.batched(), fronted)
        return tuple(results), (0,) * len(results)


def _filled(values: Sequence[Tensor | None], likes: Sequence[_Like]) -> list[Tensor]:
    """Return the values, with zeros in place of None."""
    return [
        like.zeros() if value is None else value for value, like in zip(values, likes, strict=True)
    ]


def apply(collective: LinearCollective, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run a linear collective, and record it in autograd if a tensor requires grad."""
    results: tuple[Tensor, ...] = cast(Any, _Linear).apply(collective, *tensors)
    return list(results)
