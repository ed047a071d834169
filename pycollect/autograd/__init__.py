"""The list collectives, recorded by autograd: the backward pass of each is a collective again.

Those of ``pycollect`` work in place or outside of autograd and refuse tensors that require grad;
these return new tensors, and gradients flow through them to every rank: back through an all_gather
by a reduce_scatter, through a broadcast by a reduce, through a scatter by a gather, and the other
way about. A call is one node of the graph with a tensor per rank on either side, so the gradients
of all ranks' outputs belong into **one** backward pass: ``torch.autograd.backward(losses)``, not
``losses[0].backward()`` and then the next. An output without a gradient counts as zeros, and an
input that needs none costs nothing.

``tensors`` is a list with a torch.Tensor per rank. ``op`` is "sum" or "avg"; all_reduce has "max",
"min" and "prod" as well. Everything but those three can be differentiated any number of times,
forward (jvp) and under torch.func (grad, vmap, jacrev); those three any number of times backward.
Complex gradients are conjugated as torch's. Bad arguments are TypeError or ValueError, as there.

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
]
