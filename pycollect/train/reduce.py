"""Reductions: functions that sum the gradients of all ranks.

A reduction takes `gradients[rank][parameter]` and leaves the sum over the ranks in every rank, in
place. Both reductions of this module add in rank order. They give the same bits for float32 and
float64; of float16 and bfloat16 the naive one rounds every partial sum, the other only the result.
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
    """Sum one tensor per rank in place, by the loop `allreduce` of Dive into Deep Learning.

    `data[rank]` have one shape and dtype; they may be on different devices. The loop adds the other
    tensors to the first in rank order, and copies the sum to all. Every addition rounds to the
    dtype, and every copy between devices is a call of `.to()`. Raises torch's RuntimeError for
    shapes that differ.

    >>> data = [torch.ones(2), 2 * torch.ones(2)]; naive_all_reduce(data)
    >>> data
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    for i in range(1, len(data)):
        data[0][...] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][...] = data[0].to(data[i].device)


def reduce_gradients_naive(gradients: Gradients) -> None:
    """Sum `gradients[rank][i]` over the ranks in place, one parameter after the other.

    The sum of each parameter is that of `naive_all_reduce`, with its shapes, dtypes and errors.
    Raises ValueError if the ranks have different numbers of gradients. It is
    `GRADIENT_REDUCTIONS["naive"]`, the baseline of `compare_reductions`.

    >>> g = [[torch.ones(2)], [torch.ones(2)]]; reduce_gradients_naive(g)
    >>> g[1]
    [tensor([2., 2.])]
    """
    for parameter in zip(*gradients, strict=True):
        naive_all_reduce(parameter)


def reduce_gradients_coalesced(gradients: Gradients) -> None:
    """Sum `gradients[rank][i]` over the ranks in place, all in one collective.

    The collective is `pycollect.all_reduce_coalesced`: it adds in rank order, in float32 or wider,
    and rounds once. Shapes and dtypes may differ between i, but not between ranks. Raises
    ValueError for no rank, for ranks that differ in number, shape or dtype, for sparse tensors, for
    tensors that require grad outside of `torch.no_grad()`, and for tensors that share memory. It is
    `GRADIENT_REDUCTIONS["pycollect"]`, the default.

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
"""The reductions by the name that `train(reduce=...)` takes, and `compare_reductions(names=...)`.

The mapping is read-only. Each is a function of `gradients[rank][parameter]`, which sums over the
ranks in place.
"""
