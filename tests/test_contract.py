"""The contract over the product of all parameters, drawn by hypothesis.

These are the matrix's checks with any shape and root, any sizes of splits, and any lists; and with
the sizes and worlds from which on kernels change their method.
"""

from __future__ import annotations

import dataclasses

import matrix
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from matrix_sites import Lists
from reference import (
    COLLECTIVES,
    DTYPES,
    IN_PLACE,
    LAYOUTS,
    OPS,
    allowed,
    assert_same,
    expected,
    place,
    randoms,
)

import pycollect as pc

F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
I16, I32, U8 = torch.int16, torch.int32, torch.uint8
MIB = 2**20
WORLDS = (*range(1, 10), 16)


@dataclasses.dataclass(frozen=True)
class AnyCase(matrix.Case):
    """A case of the matrix with any shape and root instead of those of its axes."""

    dims: tuple[int, ...] = ()
    root_rank: int = 0

    def shape(self, blocks=1):
        return self.dims

    def root_of(self, world):
        return self.root_rank


@st.composite
def cases(draw):
    collective, world = draw(st.sampled_from(COLLECTIVES)), draw(st.sampled_from(WORLDS))
    in_place, dtype = collective in IN_PLACE, draw(st.sampled_from(DTYPES))
    edges = st.sampled_from([0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65])
    if draw(st.booleans()):
        flat = st.sampled_from([127, 1000, 4097, 8193, 20_011])
        dims = (draw(edges | st.integers(0, 130) | flat),)
    else:
        dims = tuple(draw(st.lists(edges, min_size=0 if in_place else 1, max_size=2)))
        dims = (*dims, *draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    algorithms = () if collective == "all_to_all" else pc.algorithms(collective)
    case = AnyCase(
        collective,
        draw(st.sampled_from([op for op in OPS if allowed(dtype, op)])),
        dtype,
        layout=draw(st.sampled_from(LAYOUTS)),
        into="" if in_place else draw(st.sampled_from(["", "contiguous", "misaligned"])),
        async_op=draw(st.booleans()),
        dim=draw(st.integers(-len(dims), len(dims) - 1)),
        algorithm=draw(st.sampled_from([None, *algorithms])),
        dims=dims,
        root_rank=draw(st.integers(0, world - 1)),
    )
    return case, world


@settings(max_examples=600, suppress_health_check=list(HealthCheck))
@given(cases())
@example((AnyCase("all_reduce", "sum", F32, layout="misaligned", dims=(100_003,)), 16))
@example((AnyCase("all_reduce", "avg", BF16, 7, "transposed", algorithm="chain", dims=(65, 3)), 9))
@example((AnyCase("reduce_scatter", "avg", F16, 7, "columns", into="misaligned", dims=(7, 3)), 5))
@example(
    (
        AnyCase(
            "all_to_all", "sum", I8, 7, "every_other", "first", "misaligned", False, -1, dims=(4, 5)
        ),
        9,
    )
)
def test_any_case_keeps_the_contract(drawn):
    assert Lists().differs(*drawn) == []


def large(collective, dtype, *dims, world=3, **more):
    return AnyCase(collective, "sum", dtype, dims=dims, **more), world


# Of several threads, of stores past the caches (results of more than 16 MiB in all), of several
# pieces, and of more ranks than one fold of a kernel has.
LARGE = [
    *[
        large(collective, t, 9 * MIB * blocks // t.itemsize + 13, world=2, into=into)
        for collective, blocks in (("reduce_scatter", 2), ("all_to_all", 2), ("all_gather", 1))
        for t in (F32, BF16, U8)
        for into in ("", "contiguous", "misaligned")
    ],
    *[
        large(c, I32, 5, MIB + 1, dim=d)
        for c in ("scatter", "gather", "all_gather")
        for d in (0, 1)
    ],
    large("copy_", I32, 5, MIB + 1, into="contiguous"),
    large("replicate", I32, 5, MIB + 1),
    *[large(c, I32, 6 * MIB + 1, root_rank=r) for c in ("broadcast", "reduce") for r in range(3)],
    *[large(c, F32, n) for c in ("all_reduce", "reduce_scatter") for n in (300_001, 2_000_003)],
    *[
        large("all_reduce", t, count, world=world, layout="misaligned", algorithm=algorithm)
        for algorithm in (None, *pc.algorithms())
        for t, count, world in ((I32, 4 * MIB + 11, 3), (I16, 130, 65))
    ],
]


@pytest.mark.parametrize(("case", "world"), LARGE, ids=str)
def test_large_cases_keep_the_contract(case, world):
    assert Lists().differs(case, world) == []


@st.composite
def splits(draw):
    world = draw(st.sampled_from(WORLDS))
    sizes = st.lists(st.integers(0, 9), min_size=world, max_size=world)
    rows = draw(st.lists(sizes, min_size=world, max_size=world))
    return rows, draw(st.sampled_from([0, 1, -1])), draw(st.sampled_from(DTYPES))


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(splits())
def test_any_split_sizes(drawn):
    rows, dim, dtype = drawn
    world = len(rows)
    shapes = [(sum(row), 3) if dim == 0 else (3, sum(row)) for row in rows]
    tensors = [randoms(1, s, dtype, seed=i)[0] for i, s in enumerate(shapes)]
    parts = [t.split(row, dim) for t, row in zip(tensors, rows, strict=True)]
    wanted = [torch.cat([p[r] for p in parts], dim) for r in range(world)]
    assert_same(pc.all_to_all(tensors, dim=dim, split_sizes=rows), wanted, "all_to_all")
    assert_same(pc.all_gather(tensors, dim=dim), [torch.cat(tensors, dim)] * world, "all_gather")
    whole = torch.cat(list(parts[0]), dim)
    chunks = pc.scatter(whole, f"cpu*{world}", chunk_sizes=rows[0], dim=dim)
    assert_same(chunks, whole.split(rows[0], dim), "scatter")
    assert_same([pc.gather(chunks, dim=dim)], [whole], "gather")


@st.composite
def coalesced(draw):
    shapes = st.lists(st.integers(0, 20), max_size=3).map(tuple)
    kinds = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=0, max_size=8))
    ops = [op for op in OPS if all(allowed(dtype, op) for _, dtype in kinds)]
    layouts = [draw(st.sampled_from(LAYOUTS)) for _ in kinds]
    return kinds, layouts, draw(st.sampled_from(ops)), draw(st.sampled_from(WORLDS))


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(coalesced())
def test_any_coalesced_lists(drawn):
    kinds, layouts, op, world = drawn
    columns = [randoms(world, shape, dtype, seed=i) for i, (shape, dtype) in enumerate(kinds)]
    placed = zip(columns, layouts, strict=True)
    ranks = list(zip(*([place(v, layout) for v in c] for c, layout in placed), strict=True))
    ranks = ranks or [()] * world
    pc.all_reduce_coalesced(ranks, op)
    for i, column in enumerate(columns):
        got = [mine[i] for mine in ranks]
        assert_same(got, expected("all_reduce", column, op), f"{i} of {drawn}", op)
