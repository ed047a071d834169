"""The list collectives with gradients: the backward pass of each is a collective as well.

The functions of ``pycollect`` itself work outside of autograd and reject tensors that require grad.
These return new tensors and pass gradients to every rank. The backward of all_gather is
reduce_scatter, that of broadcast is reduce, that of scatter is gather, and vice versa. A call is a
single node of the graph, with one tensor per rank on each side, so the gradients of all ranks'
outputs must be computed in **one** backward pass: ``torch.autograd.backward(losses)`` instead of
``losses[0].backward()``, ``losses[1].backward()``, and so on. An output without a gradient counts
as zeros, and an input that does not require grad costs nothing.

``tensors`` is a list with one torch.Tensor per rank. Shapes, dtypes, ``dim``, ``algorithm`` and
``order``, which is also that of the gradient's sums, are those of the function of the same name in
``pycollect``. ``dst`` and ``src`` are ranks, 0 (default)
to W - 1 for W ranks. ``op`` is "sum" (default) or "avg"; all_reduce also has "max", "min" and
"prod". These three have backward derivatives of any order. All others also have
forward derivatives (jvp) of any order, and work under torch.func (grad, vmap, jacrev). Complex
gradients are conjugated as in torch. Invalid arguments raise in the call, before any data moves:
TypeError for an argument of the wrong type or an unsupported dtype, ValueError for everything else,
such as different shapes, a rank or ``dim`` out of range, or an ``op`` without a gradient.

>>> import torch
>>> from pycollect import autograd
>>> x = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
>>> y = autograd.all_reduce(x)
>>> torch.autograd.backward([y[0].sum(), 2 * y[1].sum()]); x[0].grad
tensor([3., 3.])
"""

from .functions import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    copy,
    gather,
    reduce,
    reduce_scatter,
    replicate,
    scatter,
    tree_sum,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "copy",
    "gather",
    "reduce",
    "reduce_scatter",
    "replicate",
    "scatter",
    "tree_sum",
]
