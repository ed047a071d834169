"""Memory layout changes nothing: every layout gives the values of the contiguous one.

The memory around a view must not change, either.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from reference import (
    DTYPES,
    LAYOUTS,
    assert_same,
    expected,
    left_fold,
    place,
    randoms,
    short,
    surrounding_bytes,
)

import pycollect as pc

IN_PLACE = ("all_reduce", "reduce", "broadcast")
OUT_OF_PLACE = ("all_gather", "reduce_scatter", "all_to_all")
SHAPES = ((3, 4, 5), (6, 4), (7,), (1, 9), (5, 1), (2, 1, 3, 4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("collective", IN_PLACE)
def test_in_place(collective, layout):
    for algorithm in (None, *pc.algorithms(collective)):
        for shape in SHAPES:
            values = randoms(3, shape, torch.int32)
            tensors = [place(v, layout) for v in values]
            surroundings = [surrounding_bytes(t) for t in tensors]
            getattr(pc, collective)(tensors, algorithm=algorithm)
            why = f"{algorithm}, {shape}"
            assert_same(tensors, expected(collective, values), why)
            assert_same(
                [surrounding_bytes(t) for t in tensors], surroundings, f"{why}: outside the view"
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("collective", OUT_OF_PLACE)
def test_out_of_place(collective, layout):
    for shape in SHAPES:
        values = randoms(3, shape, torch.int32)
        for dim in range(-len(shape), len(shape)):
            wanted = expected(collective, values, dim=dim)
            tensors = [place(v, layout) for v in values]
            why = f"{shape}, dim {dim}"
            assert_same(getattr(pc, collective)(tensors, dim=dim), wanted, why)
            out = [place(torch.zeros_like(w), layout) for w in wanted]
            surroundings = [surrounding_bytes(o) for o in out]
            call = partial(getattr(pc, collective), tensors, dim=dim, out=out)
            if layout in ("columns", "every_other"):  # no order of dims serves such outputs
                try:
                    call()
                except ValueError:
                    continue
            else:
                call()
            assert_same(out, wanted, f"{why}, out")
            assert_same([surrounding_bytes(o) for o in out], surroundings, f"{why}: outside out")


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


def test_large_strided_views():
    for layout in ("transposed", "columns", "every_other"):
        values = randoms(3, (301, 403), torch.float32)
        tensors = [place(v, layout) for v in values]
        surroundings = [surrounding_bytes(t) for t in tensors]
        pc.all_reduce(tensors)
        assert_same(tensors, [left_fold(values, "sum")] * 3, layout)
        assert_same([surrounding_bytes(t) for t in tensors], surroundings, layout)


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


def test_channels_last_in_place():
    for collective in IN_PLACE:
        values = randoms(3, (2, 5, 4, 3), torch.float32)
        tensors = channels_last(values)
        getattr(pc, collective)(tensors)
        assert_same(tensors, expected(collective, values), collective)
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)


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


def test_channels_last_is_scattered_and_gathered():
    image = randoms(1, (4, 5, 4, 3), torch.float16)[0]
    for dim in range(4):
        chunks = pc.scatter(*channels_last([image]), "cpu*3", dim=dim)
        assert_same(chunks, list(image.tensor_split(3, dim)), f"dim {dim}")
        assert_same([pc.gather(channels_last(chunks), dim=dim)], [image], f"dim {dim}")


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


# --- no elements, one rank, fewer elements than ranks ---------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)], ids=str)
def test_no_elements(shape):
    for collective in IN_PLACE:
        for algorithm in (None, *pc.algorithms(collective)):
            tensors = randoms(3, shape, torch.float32)
            getattr(pc, collective)(tensors, algorithm=algorithm)
            assert_same(tensors, randoms(3, shape, torch.float32))
    for collective in OUT_OF_PLACE:
        for dim in range(-len(shape), len(shape)):
            tensors = randoms(3, shape, torch.float32)
            wanted = expected(collective, tensors, dim=dim)
            assert_same(getattr(pc, collective)(tensors, dim=dim), wanted, f"{collective} {dim}")
    tensors = randoms(3, shape, torch.float32)
    assert_same([pc.gather(tensors)], [torch.cat(tensors)])
    assert_same(pc.scatter(tensors[0], "cpu*4"), list(tensors[0].tensor_split(4)))
    assert_same(pc.replicate(tensors, "cpu*2")[1], tensors)
    pc.copy_(tensors[0], tensors[1])


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


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_one_rank_keeps_its_values(dtype):
    values = randoms(1, (5, 6), dtype)
    for collective in IN_PLACE:
        tensors = [values[0].clone()]
        getattr(pc, collective)(tensors)
        assert_same(tensors, values, collective)
    for collective in OUT_OF_PLACE:
        got = getattr(pc, collective)(values)
        assert_same(got, values, collective)
        assert got[0].data_ptr() != values[0].data_ptr()


def test_fewer_elements_than_ranks():
    for collective in (*IN_PLACE, *OUT_OF_PLACE):
        for algorithm in [None] + pc.algorithms(collective) * (collective != "all_to_all"):
            options = {} if algorithm is None else {"algorithm": algorithm}
            for count in (1, 2, 8):
                tensors = randoms(9, (count, 2), torch.int32, seed=count)
                wanted = expected(collective, tensors)
                got = getattr(pc, collective)(tensors, **options)
                got = tensors if collective in IN_PLACE else got
                assert_same(got, wanted, f"{collective}, {algorithm}, {count} rows")


def test_ranks_with_different_numbers_of_rows():
    tensors = [torch.arange(n * 2).view(n, 2) for n in (3, 0, 5)]
    assert_same(pc.all_gather(tensors), [torch.cat(tensors)] * 3)
    wide = [t.t().contiguous() for t in tensors]
    assert_same(pc.all_gather(wide, dim=1), [torch.cat(wide, 1)] * 3)
    assert_same([pc.gather(wide, dim=-1)], [torch.cat(wide, 1)])
