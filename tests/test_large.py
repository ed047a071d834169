"""Sizes at which kernels change their method: many threads, streaming stores, several pieces.

Integers compare quickly, floats show the order, and misaligned tensors have heads and tails.
"""

from __future__ import annotations

import pytest
import torch
from reference import assert_same, expected, left_fold, place, randoms, short, surrounding_bytes

import pycollect as pc

MIB = 2**20


def cheap(world, count, dtype):
    """Values that differ everywhere, generated faster than random ones."""
    kinds = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    step = torch.arange(count, dtype=torch.int32)
    ranks = [(step * (2 * r + 3) + r) % 251 for r in range(world)]
    return [r.to(kinds.get(dtype, dtype)).to(dtype) for r in ranks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=short)
@pytest.mark.parametrize("layout", ["contiguous", "misaligned"])
def test_large_out_of_place(dtype, layout):
    count = 9 * MIB // dtype.itemsize + 13
    tensors = cheap(2, 2 * count, dtype)
    for collective in ("reduce_scatter", "all_to_all", "all_gather"):
        mine = [t[:count].clone() for t in tensors] if collective == "all_gather" else tensors
        wanted = expected(collective, mine)
        assert_same(getattr(pc, collective)(mine), wanted, collective)
        out = [place(torch.zeros_like(w), layout) for w in wanted]
        surroundings = [surrounding_bytes(o) for o in out]
        getattr(pc, collective)(mine, out=out)
        assert_same(out, wanted, f"{collective}, out")
        assert_same([surrounding_bytes(o) for o in out], surroundings, f"{collective}: outside out")


def test_large_columns_and_copies():
    tensor = torch.arange(5 * MIB + 5).view(5, -1)
    for dim in (0, 1):
        chunks = pc.scatter(tensor, "cpu*3", dim=dim)
        assert_same(chunks, tensor.tensor_split(3, dim), f"scatter, dim {dim}")
        assert_same([pc.gather(chunks, dim=dim)], [tensor], f"gather, dim {dim}")
        assert_same(pc.all_gather(chunks, dim=dim), [tensor] * 3, f"all_gather, dim {dim}")
    for copies in pc.replicate([tensor, tensor.flatten()[1:]], "cpu*3"):
        assert_same(copies, [tensor, tensor.flatten()[1:]])
    target = torch.zeros_like(tensor)
    pc.copy_(target, tensor)
    assert_same([target], [tensor])


@pytest.mark.parametrize("algorithm", [None, *pc.algorithms()])
@pytest.mark.parametrize("offset", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_large_in_place(algorithm, offset):
    values = cheap(3, 4 * MIB + 11, torch.int32)
    wanted = left_fold(values, "sum")[offset:]
    pc.all_reduce([v[offset:] for v in values], algorithm=algorithm)
    assert_same([v[offset:] for v in values], [wanted] * 3)


def test_the_order_shows_at_every_size():
    for count in (300_001, 2_000_003):
        values = randoms(3, (count,), torch.float32, seed=count)
        wanted = left_fold(values, "sum")
        tensors = [v.clone() for v in values]
        pc.all_reduce(tensors)
        assert_same(tensors, [wanted] * 3, f"{count} elements")
        scattered = pc.reduce_scatter(values)
        assert_same(scattered, wanted.tensor_split(3), f"{count} elements, reduce_scatter")


def test_large_broadcasts_and_roots():
    values = cheap(3, 6 * MIB + 1, torch.int32)
    for root in range(3):
        tensors = [v.clone() for v in values]
        pc.broadcast(tensors, root)
        assert_same(tensors, [values[root]] * 3, f"src {root}")
        tensors = [v.clone() for v in values]
        pc.reduce(tensors, root)
        assert_same(tensors, expected("reduce", values, root=root), f"dst {root}")
