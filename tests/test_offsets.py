"""Chunks bound to elements: even cuts, uneven blocks, all-to-all-v, and aligned pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycollect import _C


def empty(world: int, chunks: int) -> _C.Plan:
    return _C.Plan(world, chunks, [])


def sizes(o: _C.PlanOffsets, rank: int, buffer: str, chunks: int) -> list[int]:
    return [o.count((rank, buffer, c, 1)) for c in range(chunks)]


@given(
    blocks=st.lists(st.integers(0, 200), min_size=1, max_size=6),
    pieces=st.integers(1, 9),
    align=st.integers(1, 40),
)
def test_pieces_cover_their_block_evenly_and_aligned(
    blocks: list[int], pieces: int, align: int
) -> None:
    chunks = len(blocks) * pieces
    o = _C.PlanOffsets(empty(2, chunks), blocks, align)
    assert o.total(1, "tmp") == sum(blocks)
    starts = list(itertools.accumulate(blocks, initial=0))
    for b, block in enumerate(blocks):
        at = [(1, "out", c, 1) for c in range(b * pieces, (b + 1) * pieces)]
        counts = [o.count(s) for s in at]
        begins = [o.begin(s) for s in at]
        assert begins == list(itertools.accumulate(counts, initial=starts[b]))[:-1]
        assert sum(counts) == block
        assert all((begin - starts[b]) % align == 0 or begin == starts[b + 1] for begin in begins)
        assert max(counts) - min(counts) < 2 * align
        assert o.count((0, "in", b * pieces, pieces)) == block


def test_one_block_is_cut_into_all_chunks() -> None:
    o = _C.PlanOffsets(empty(3, 4), [10])
    assert sizes(o, 2, "in", 4) == [2, 3, 2, 3]
    assert sizes(_C.PlanOffsets(empty(3, 4), [0]), 0, "out", 4) == [0, 0, 0, 0]
    assert sizes(_C.PlanOffsets(empty(3, 4), [10], 4), 0, "out", 4) == [0, 4, 4, 2]


def test_a_buffer_of_one_rank_may_differ() -> None:
    o = _C.PlanOffsets(empty(2, 2), [3, 4])
    o.set(1, "out", [0, 4])
    assert sizes(o, 1, "out", 2) == [0, 4]
    assert o.begin((1, "out", 1, 1)) == 0
    assert (o.total(1, "out"), o.total(1, "in"), o.total(0, "out")) == (4, 7, 7)
    o.set(1, "out", [5, 6])
    assert o.total(1, "out") == 11


def test_sources_and_destinations_of_a_step_must_have_equal_sizes() -> None:
    plan = _C.find_algorithm("all_to_all", "direct").plan(2)
    o = _C.PlanOffsets(plan, [1, 2])
    with pytest.raises(ValueError, match=r"differ in size: in step 2 chunk 0 of rank 1 has 1"):
        o.check(plan)
    fold = _C.Plan(2, 2, [(((0, "out", 0, 2),), ((1, "in", 0, 2),), -1)])
    swapped = _C.PlanOffsets(fold, [1, 2])
    swapped.set(1, "in", [2, 1])  # as many elements, but not chunk by chunk
    with pytest.raises(ValueError, match="chunks of one step differ in size"):
        swapped.check(fold)


def test_sizes_that_do_not_fit_the_plan_are_refused() -> None:
    plan = empty(2, 4)
    with pytest.raises(ValueError, match="4 chunks cannot be cut from 3 blocks"):
        _C.PlanOffsets(plan, [1, 1, 1])
    with pytest.raises(ValueError, match="cannot be cut from 0 blocks"):
        _C.PlanOffsets(plan, [])
    with pytest.raises(ValueError, match="at least one element, not 0"):
        _C.PlanOffsets(plan, [1], 0)
    o = _C.PlanOffsets(plan, [8])
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"no rank {rank} in a world of 2"):
            o.set(rank, "in", [8])
    with pytest.raises(ValueError, match="cannot be cut from 3 blocks"):
        o.set(0, "in", [1, 2, 3])
    with pytest.raises(ValueError, match="bound to a plan of 2 ranks and 4 chunks, not 3 and 4"):
        o.check(empty(3, 4))
