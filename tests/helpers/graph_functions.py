"""Functions of two tensors that call the list collectives: FULL are one graph, BROKEN break it."""

from __future__ import annotations

import numpy as np
import torch
from reference import randoms

import pycollect as pc
from pycollect import autograd

TWO = "cpu*2"


def computed(a, b):
    return [a * 2, b + 1]


def joined(tensors):
    return sum(t.sum(0) for t in tensors) * 3 + 1


def all_reduce(a, b):
    x = computed(a, b)
    pc.all_reduce(x)
    return [x[0] * x[1] + 1, x[0] - a]


def all_reduce_of_graph_inputs(a, b):
    y = a + b
    pc.all_reduce([a, b], "max")
    return [y * a, b.clone()]


def reduce_op(a, b):
    x = computed(a, b)
    pc.all_reduce(x, torch.distributed.ReduceOp.PRODUCT)
    return x


def reduce(a, b):
    x = computed(a, b)
    pc.reduce(x, dst=1)
    return [x[0] * 2, x[1] * 2]


def broadcast(a, b):
    x = computed(a, b)
    pc.broadcast(x, 1)
    return [x[0] * 2, x[1] * 2]


def coalesced(a, b):
    x, y = computed(a, b), computed(b, a)
    pc.all_reduce_coalesced([x, y], algorithm="two_shot")
    pc.broadcast_coalesced([[x[0], y[1][:1]], [x[1], y[0][:1]]], 1)
    return [x[0] + y[1], x[1] - y[0]]


def out_of_place(a, b):
    x = computed(a, b)
    rows = [[1, 3], [4, 0]]
    results = [pc.all_gather(x), pc.reduce_scatter(x, "avg", dim=1)]
    results += [pc.all_to_all(x), pc.all_to_all(x, split_sizes=rows)]
    return [joined(result) for result in results]


def with_out(a, b):
    x, whole = computed(a, b), a.new_empty(2, 8, 6)
    gathered = pc.all_gather(x, out=list(whole))
    halves = pc.reduce_scatter(gathered, out=[torch.empty_like(a), torch.empty_like(b)])
    pc.gather(halves, out=whole[0])
    pc.scatter(whole[0], TWO, out=halves)
    return [whole, *pc.all_to_all(halves, out=x)]


def scattered(a, b):
    whole = pc.gather(pc.scatter(a * b, TWO, chunk_sizes=[1, 3]))
    copies = pc.replicate([whole + 1, b], TWO)
    pc.copy_(whole, copies[1][0] * 2)
    return [whole, copies[0][0], copies[1][1]]


def viewed(a, b):
    x = a * 2
    pc.all_reduce([x[:2], x[2:]])
    return [x + b]


def transposed(a, b):
    x = pc.all_gather([a.t(), b.t()], dim=1)
    return [x[0].reshape(-1), *pc.scatter((a + b).t()[::2], TWO, dim=1)]


def communicator(a, b):
    x = computed(a, b)
    two = pc.Communicator(TWO)
    two.all_reduce(x)
    return [x[0] + 1, *two.scatter(x[1])]


def in_a_loop(a, b):
    x = computed(a, b)
    for _ in range(3):
        pc.all_reduce(x, "avg")
        x[0] += 1
    return x


def without_gradients(a, b):
    return [*autograd.all_reduce(computed(a, b)), *autograd.replicate([a], TWO)[1]]


FULL = [all_reduce, all_reduce_of_graph_inputs, reduce_op, reduce, broadcast, coalesced]
FULL += [out_of_place, with_out, scattered, viewed, transposed, communicator, in_a_loop]
FULL += [without_gradients]


def async_op(a, b):
    x = computed(a, b)
    work = pc.all_reduce(x, async_op=True)
    z = a - b
    work.wait()
    return [x[0] * z, x[1]]


def on_streams(a, b):
    x = computed(a, b)
    pc.broadcast(x, streams=[None, None])
    return x


def staged(a, b):
    return pc.all_gather(computed(a, b), peer_access=False)


def of_arrays(a, b):
    x = computed(a, b)
    return [*pc.all_gather([np.ones(2, np.float32), np.zeros(3, np.float32)]), x[0] + x[1]]


def with_barrier(a, b):
    x = computed(a, b)
    pc.barrier(TWO)
    return x


BROKEN = [async_op, on_streams, staged, of_arrays, with_barrier]


def inputs():
    return randoms(2, (4, 6), torch.float32, tame=True)


def trained(a, b):
    """A data-parallel loss: every collective that has a gradient takes part in it."""
    shards = autograd.scatter(a, TWO)
    weights = autograd.replicate([b, autograd.copy(b * 2, "cpu")], TWO)
    h = [x @ w[0].t() + w[1].sum() for x, w in zip(shards, weights, strict=True)]
    mean = autograd.all_reduce([t.sum(0, keepdim=True) for t in h], "avg")
    whole = autograd.all_gather(mean)
    parts = autograd.reduce_scatter(whole, dim=1)
    most = autograd.all_reduce([t * 2 for t in whole], "max")
    least = autograd.all_reduce([t * 2 for t in whole], torch.distributed.ReduceOp.MIN)
    product = autograd.all_reduce([t / 9 for t in whole], "prod")
    mixed = autograd.all_to_all(most, split_sizes=[[1, 1], [0, 2]])
    sums = autograd.broadcast([t.sum() for t in parts], 1)
    total = autograd.reduce(product, 1)
    return autograd.gather(mixed).sum() + sums[0] * sums[1] + total.sum() + least[1].sum()


def gradients(function, a, b):
    a, b = (t.clone().requires_grad_() for t in (a, b))
    loss = function(a, b)
    return [loss.detach(), *torch.autograd.grad(loss, (a, b))]
