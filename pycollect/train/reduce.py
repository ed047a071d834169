"""Reductions: functions that sum the gradients of all ranks.

A reduction takes `gradients[rank][parameter]` and leaves the sum over the ranks in every rank, in
place. Both reductions of this module add in rank order, so they give the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

import pycollect as pc

Gradients: TypeAlias = Sequence[Sequence[Tensor]]
Reduction: TypeAlias = Callable[[Gradients], None]


def naive_all_reduce(data: Sequence[Tensor]) -> None:
    """Sum one tensor per rank as Dive into Deep Learning does: into the first, then copy back.

    >>> data = [torch.ones(2), 2 * torch.ones(2)]; naive_all_reduce(data)
    >>> data
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def reduce_gradients_naive(gradients: Gradients) -> None:
    """Reduce the gradients one parameter after the other with `naive_all_reduce`.

    >>> g = [[torch.ones(2)], [torch.ones(2)]]; reduce_gradients_naive(g)
    >>> g[1]
    [tensor([2., 2.])]
    """
    for parameter in zip(*gradients, strict=True):
        naive_all_reduce(parameter)


def reduce_gradients_coalesced(gradients: Gradients) -> None:
    """Reduce all gradients of all ranks in one collective.

    >>> g = [[torch.ones(2)], [torch.ones(2)]]; reduce_gradients_coalesced(g)
    >>> g[1]
    [tensor([2., 2.])]
    """
    pc.all_reduce_coalesced(gradients)


def start(reduction: Reduction, gradients: Gradients) -> pc.Work | None:
    """Start a reduction; return its Work to wait for, or None if it has already finished.

    >>> g = [[torch.ones(2)], [torch.ones(2)]]; work = start(reduce_gradients_coalesced, g)
    >>> work.wait(); g[1]
    [tensor([2., 2.])]
    """
    if reduction is reduce_gradients_coalesced:
        return pc.all_reduce_coalesced(gradients, async_op=True)
    reduction(gradients)
    return None


def matching_gradients(parameters: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return the gradients of `parameters[rank][i]`, zeros where only other ranks have one.

    Parameters without a gradient on any rank are left out. Raises ValueError for sparse gradients.

    >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> a.sum().backward(); matching_gradients([[a], [b]])
    [[tensor([1., 1.])], [tensor([0., 0.])]]
    """
    gradients: list[list[Tensor]] = [[] for _ in parameters]
    for same in zip(*parameters, strict=True):
        if all(param.grad is None for param in same):
            continue
        for mine, param in zip(gradients, same, strict=True):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            if param.grad.layout != torch.strided:
                raise ValueError("a gradient is sparse: make the layer with sparse=False")
            mine.append(param.grad)
    return gradients


GRADIENT_REDUCTIONS: Mapping[str, Reduction] = MappingProxyType(
    {"pycollect": reduce_gradients_coalesced, "naive": reduce_gradients_naive}
)
