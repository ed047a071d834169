"""Static result types for each `async_op`, checked by mypy only: this file is never run."""

from typing import Literal

import torch
from typing_extensions import assert_type

import pycollect as pc

Tensors = list[torch.Tensor]


def functions(x: Tensors, later: bool) -> None:
    assert_type(pc.all_reduce(x, "avg", async_op=True), pc.Work)
    assert_type(pc.all_reduce_coalesced([x], "avg", async_op=True, algorithm="chain"), pc.Work)
    assert_type(pc.reduce(x, 1, "max", async_op=True, streams=None), pc.Work)
    assert_type(pc.broadcast(x, src=1, async_op=True), pc.Work)
    assert_type(pc.broadcast_coalesced([x], 1, async_op=True), pc.Work)
    assert_type(pc.copy_(x[0], x[1], async_op=True), pc.Work)
    assert_type(pc.all_gather(x, async_op=True, dim=1), pc.Work)
    assert_type(pc.reduce_scatter(x, "sum", async_op=True, out=x), pc.Work)
    assert_type(pc.all_to_all(x, async_op=True, split_sizes=[1, 2]), pc.Work)
    assert_type(pc.scatter(x[0], "cpu*2", async_op=True, chunk_sizes=[1, 2]), pc.Work)
    assert_type(pc.all_reduce(x, async_op=later), pc.Work | None)
    assert_type(pc.all_reduce_coalesced([x], async_op=later), pc.Work | None)
    assert_type(pc.reduce(x, async_op=later), pc.Work | None)
    assert_type(pc.broadcast(x, async_op=later), pc.Work | None)
    assert_type(pc.broadcast_coalesced([x], async_op=later), pc.Work | None)
    assert_type(pc.copy_(x[0], x[1], async_op=later), pc.Work | None)
    assert_type(pc.all_gather(x, async_op=later), Tensors | pc.Work)
    assert_type(pc.reduce_scatter(x, async_op=later), Tensors | pc.Work)
    assert_type(pc.all_to_all(x, async_op=later), Tensors | pc.Work)
    assert_type(pc.scatter(x[0], "cpu*2", async_op=later), Tensors | pc.Work)
    assert_type(pc.all_gather(x), Tensors)
    assert_type(pc.reduce_scatter(x, async_op=False), Tensors)
    assert_type(pc.all_to_all(x, dim=1), Tensors)
    assert_type(pc.scatter(x[0], "cpu*2"), Tensors)
    assert_type(pc.gather(x), torch.Tensor)
    assert_type(pc.replicate(x, "cpu*2"), list[Tensors])


def methods(two: pc.Communicator, x: Tensors, later: bool) -> None:
    assert_type(two.all_reduce(x, "avg", async_op=True), pc.Work)
    assert_type(two.all_reduce_coalesced([x], "avg", async_op=True, algorithm="chain"), pc.Work)
    assert_type(two.reduce(x, 1, "max", async_op=True, streams=None), pc.Work)
    assert_type(two.broadcast(x, src=1, async_op=True), pc.Work)
    assert_type(two.broadcast_coalesced([x], 1, async_op=True), pc.Work)
    assert_type(two.copy_(x[0], x[1], async_op=True), pc.Work)
    assert_type(two.all_gather(x, async_op=True, dim=1), pc.Work)
    assert_type(two.reduce_scatter(x, "sum", async_op=True, out=x), pc.Work)
    assert_type(two.all_to_all(x, async_op=True, split_sizes=[1, 2]), pc.Work)
    assert_type(two.scatter(x[0], async_op=True, chunk_sizes=[1, 2]), pc.Work)
    assert_type(two.all_reduce(x, async_op=later), pc.Work | None)
    assert_type(two.copy_(x[0], x[1], async_op=later), pc.Work | None)
    assert_type(two.all_gather(x, async_op=later), Tensors | pc.Work)
    assert_type(two.scatter(x[0], async_op=later), Tensors | pc.Work)
    assert_type(two.all_gather(x), Tensors)
    assert_type(two.reduce_scatter(x), Tensors)
    assert_type(two.all_to_all(x), Tensors)
    assert_type(two.scatter(x[0]), Tensors)
    assert_type(two.gather(x), torch.Tensor)
    assert_type(two.replicate(x), list[Tensors])


def nothing(two: pc.Communicator, x: Tensors) -> None:
    now: Literal[False] = False
    assert_type(pc.all_reduce(x), None)
    assert_type(pc.all_reduce_coalesced([x], async_op=now), None)
    assert_type(pc.reduce(x), None)
    assert_type(pc.broadcast(x, 1), None)
    assert_type(pc.broadcast_coalesced([x]), None)
    assert_type(pc.copy_(x[0], x[1], async_op=False), None)
    assert_type(two.all_reduce(x), None)
    assert_type(two.copy_(x[0], x[1]), None)
