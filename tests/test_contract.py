"""The contract over the product of all parameters, drawn by hypothesis.

collective x algorithm x world x dtype x op x shape x layout x in or out of place: the values are
always those of reference.py, and neither read-only inputs nor the memory around a view change.
"""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from reference import (
    COLLECTIVES,
    DTYPES,
    IN_PLACE,
    LAYOUTS,
    NARROW,
    OPS,
    REDUCING,
    allowed,
    assert_close,
    assert_same,
    depends_on_order,
    expected,
    place,
    randoms,
    surrounding_bytes,
)

import pycollect as pc

WORLDS = (*range(1, 10), 16)


@dataclasses.dataclass
class Case:
    collective: str
    algorithm: str | None
    world: int
    dtype: torch.dtype
    op: str
    shape: tuple[int, ...]
    layout: str
    into: str | None = None  # the layout of `out`, if the caller passes it
    root: int = 0
    dim: int = 0
    async_op: bool = False
    seed: int = 0

    @property
    def exact(self):
        """True if the bits are guaranteed: by the default algorithm, and by exact ones or, for wide
        dtypes, native ones."""
        reducing = self.collective in REDUCING and depends_on_order(self.dtype, self.op)
        if self.algorithm is None or self.world == 1 or not reducing:
            return True
        order = pc.plan(self.collective, self.world, algorithm=self.algorithm).order
        return order == "exact" or (order == "native" and self.dtype not in NARROW)

    def options(self):
        given = {"async_op": self.async_op, "algorithm": self.algorithm}
        if self.collective in REDUCING:
            given["op"] = self.op
        if self.collective not in IN_PLACE:
            given["dim"] = self.dim
        if self.collective in ("reduce", "broadcast"):
            given["dst" if self.collective == "reduce" else "src"] = self.root
        if self.collective == "all_to_all":
            del given["algorithm"]
        return given


@st.composite
def cases(draw):
    collective = draw(st.sampled_from(COLLECTIVES))
    in_place = collective in IN_PLACE
    dtype = draw(st.sampled_from(DTYPES))
    world = draw(st.sampled_from(WORLDS))
    edges = st.sampled_from([0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65])
    if draw(st.booleans()):
        flat = st.sampled_from([127, 1000, 4097, 8193, 20_011])
        shape = (draw(edges | st.integers(0, 130) | flat),)
    else:
        shape = tuple(draw(st.lists(edges, min_size=0 if in_place else 1, max_size=2)))
        shape = (*shape, *draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    dims = len(shape)
    return Case(
        collective,
        draw(st.sampled_from([None, *pc.algorithms(collective)])),
        world,
        dtype,
        draw(st.sampled_from([op for op in OPS if allowed(dtype, op)])),
        shape,
        draw(st.sampled_from(LAYOUTS)),
        None if in_place else draw(st.sampled_from([None, "contiguous", "misaligned"])),
        draw(st.integers(0, world - 1)),
        draw(st.integers(-dims, dims - 1)),
        draw(st.booleans()),
        draw(st.integers(0, 2**32)),
    )


@settings(max_examples=600, suppress_health_check=list(HealthCheck))
@given(cases())
@example(Case("all_reduce", None, 16, torch.float32, "sum", (100_003,), "misaligned"))
@example(Case("all_reduce", "chain", 9, torch.bfloat16, "avg", (65, 3), "transposed"))
@example(Case("reduce_scatter", None, 5, torch.float16, "avg", (7, 3), "columns", "misaligned"))
@example(Case("all_to_all", None, 9, torch.int8, "sum", (4, 5), "every_other", "misaligned", 0, -1))
def test_any_case_keeps_the_contract(case):
    values = randoms(case.world, case.shape, case.dtype, case.seed, tame=not case.exact)
    wanted = expected(case.collective, values, case.op, case.root, case.dim)
    tensors = [place(v, case.layout) for v in values]
    options = case.options()
    if case.into is not None:
        options["out"] = [place(torch.zeros_like(w), case.into) for w in wanted]
    watched = [*tensors, *options.get("out", ())]
    surroundings = [surrounding_bytes(t) for t in watched]

    got = getattr(pc, case.collective)(tensors, **options)
    got = got.wait() if case.async_op else got

    assert_same(
        [surrounding_bytes(t) for t in watched], surroundings, "memory around a view has changed"
    )
    if case.collective in IN_PLACE:
        assert got is None
        got = tensors
    else:
        assert_same(tensors, values, "an input has changed")
        assert "out" not in options or all(g is o for g, o in zip(got, options["out"], strict=True))
    if case.exact:
        assert_same(got, wanted, case, case.op if case.collective in REDUCING else "")
    else:
        assert_close(got, wanted, case)


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
