"""Memory that the matrix does not have: any alignment, more dims, views of one tensor, scalars."""

from __future__ import annotations

import pytest
import torch
from reference import (
    DTYPES,
    IN_PLACE,
    assert_same,
    expected,
    left_fold,
    randoms,
    short,
    surrounding_bytes,
)

import pycollect as pc

OUT_OF_PLACE = ("all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_every_misalignment(dtype):
    for count in (1, 5, 33, 100):
        values = randoms(4, (count,), dtype, seed=count)
        for offsets in ([0, 1, 2, 3], [1, 1, 1, 1], [7, 5, 3, 1], [15, 0, 9, 31]):
            base = [torch.ones(200, dtype=torch.uint8).to(dtype) for _ in range(4)]
            tensors = [
                r[o : o + count].copy_(v) for r, o, v in zip(base, offsets, values, strict=True)
            ]
            surroundings = [surrounding_bytes(t) for t in tensors]
            pc.all_reduce(tensors)
            assert_same(tensors, [left_fold(values, "sum")] * 4, offsets)
            assert_same([surrounding_bytes(t) for t in tensors], surroundings, "outside the view")


def test_strided_views_in_four_dimensions():
    values = randoms(2, (3, 4, 5, 6), torch.int64)
    tensors = [
        torch.ones(6, 8, 5, 13, dtype=torch.int64)[::2, 1:5, :, 1::2].copy_(v) for v in values
    ]
    surroundings = [surrounding_bytes(t) for t in tensors]
    pc.all_reduce(tensors, "bxor")
    assert_same(tensors, [left_fold(values, "bxor")] * 2)
    assert_same([surrounding_bytes(t) for t in tensors], surroundings)


def channels_last(values):
    return [v.to(memory_format=torch.channels_last) for v in values]


@pytest.mark.parametrize("collective", OUT_OF_PLACE)
def test_channels_last_out_of_place(collective):
    values = randoms(3, (4, 5, 4, 3), torch.float32)
    for dim in range(-4, 4):
        wanted = expected(collective, values, dim=dim)
        assert_same(getattr(pc, collective)(channels_last(values), dim=dim), wanted, f"dim {dim}")
        mixed = [values[0], *channels_last(values[1:])]
        assert_same(getattr(pc, collective)(mixed, dim=dim), wanted, f"dim {dim}, mixed")
        out = channels_last([torch.zeros_like(w) for w in wanted])
        assert_same(getattr(pc, collective)(values, dim=dim, out=out), wanted, f"dim {dim}, out")


def test_strides_of_dims_of_one_element_do_not_matter():
    values = randoms(2, (1, 7, 1), torch.int16)
    tensors = [values[0].clone(), values[1].clone().as_strided((1, 7, 1), (3, 1, 99))]
    pc.all_reduce(tensors)
    assert_same(tensors, [left_fold(values, "sum")] * 2)


def test_expanded_inputs_are_read():
    row = randoms(3, (1, 4), torch.float32)
    values = [r.expand(6, 4) for r in row]
    for collective in OUT_OF_PLACE:
        wanted = expected(collective, values)
        assert_same(getattr(pc, collective)(values), wanted, collective)
    assert_same(pc.scatter(values[0], "cpu*3"), list(values[0].tensor_split(3)))
    assert_same(pc.replicate([values[0]], "cpu*2")[1], [values[0]])


def test_one_tensor_may_be_read_for_several_ranks():
    x = randoms(1, (6, 4), torch.float32)[0]
    kept = x.clone()
    for collective in OUT_OF_PLACE:
        assert_same(getattr(pc, collective)([x] * 3), expected(collective, [kept] * 3), collective)
    assert_same([pc.gather([x, x[1:], x[::2]])], [torch.cat([x, x[1:], x[::2]])])
    assert_same(pc.replicate([x, x], "cpu*2")[1], [x, x])


def test_columns_of_one_tensor_are_reduced_or_refused():
    whole = torch.arange(24.0).view(6, 4)
    kept = whole.clone()
    try:
        pc.all_reduce([whole[:, :2], whole[:, 2:]])
    except ValueError:
        assert_same([whole], [kept])
    else:
        assert_same([whole], [(kept[:, :2] + kept[:, 2:]).repeat(1, 2)])


def test_rows_of_one_tensor_may_be_the_ranks():
    whole = torch.arange(24.0).view(6, 4)
    kept = whole.clone()
    pc.all_reduce(list(whole))
    assert_same([whole], [left_fold(list(kept), "sum").expand(6, 4)])


def test_strides_of_empty_tensors_do_not_matter():
    pc.all_reduce([torch.zeros(0, 3), torch.zeros(3, 0).t()])


@pytest.mark.parametrize("collective", IN_PLACE)
def test_scalars(collective):
    for algorithm in (None, *pc.algorithms(collective)):
        for world in (1, 2, 3, 8):
            tensors = randoms(world, (), torch.int64, seed=world)
            wanted = expected(collective, tensors)
            getattr(pc, collective)(tensors, algorithm=algorithm)
            assert_same(tensors, wanted, f"{algorithm}, world {world}")
