"""Mismatched collective calls: every rank raises an error that names the difference.

No output is written, no rank hangs, and the group stays usable. If one rank refuses its own
arguments, its peers raise, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import (
    BACKEND,
    OLD_TORCH,
    OURS,
    Caught,
    RankContext,
    caught,
)

pytestmark = pytest.mark.skipif(
    not OURS, reason=f"{BACKEND} hangs, aborts or gives wrong results where ranks disagree"
)
WORLD = 3
MAX = dist.ReduceOp.MAX


def ones(count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def rows(count: int = 6, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [ones(count, dtype) for _ in range(WORLD)]


def splits(more: int) -> None:
    """Send two elements to each rank, and `more` unexpected ones to the next rank."""
    rank, sent = dist.get_rank(), [2] * WORLD
    sent[(rank + 1) % WORLD] += more
    dist.all_to_all_single(ones(2 * WORLD), ones(sum(sent)), [2] * WORLD, sent)


def parts(own: int) -> None:
    """All-gather of six elements per rank, but `own` elements from this rank."""
    out = rows()
    out[dist.get_rank()] = ones(own)
    dist.all_gather(out, ones(own))


def broadcast(tensors: list[torch.Tensor]) -> None:
    dist.group.WORLD.broadcast(tensors, dist.BroadcastOptions()).wait()


RankCall = Callable[[], Any]
# The call of most ranks, the call of the odd rank, and words that the error must contain.
DISAGREEMENTS: dict[str, tuple[RankCall, RankCall, tuple[str, ...]]] = {
    "collective": (
        lambda: dist.all_reduce(ones()),
        lambda: dist.broadcast(ones(), 0),
        ("all_reduce", "broadcast"),
    ),
    "barrier": (lambda: dist.all_reduce(ones()), dist.barrier, ("all_reduce", "barrier")),
    "gather or scatter": (
        lambda: dist.all_gather(rows(), ones()),
        lambda: dist.reduce_scatter(ones(), rows()),
        ("all_gather", "reduce_scatter"),
    ),
    "count": (lambda: dist.all_reduce(ones(6)), lambda: dist.all_reduce(ones(7)), ("6", "7")),
    "nothing": (lambda: dist.all_reduce(ones(6)), lambda: dist.all_reduce(ones(0)), ("6", "0")),
    "large count": (
        lambda: dist.all_reduce(ones(1_000_000)),
        lambda: dist.all_reduce(ones(3)),
        ("1000000", "3"),
    ),
    "count, broadcast": (
        lambda: dist.broadcast(ones(6), 0),
        lambda: dist.broadcast(ones(5), 0),
        ("6", "5"),
    ),
    "count, reduce_scatter": (
        lambda: dist.reduce_scatter_tensor(ones(2), ones(6)),
        lambda: dist.reduce_scatter_tensor(ones(3), ones(9)),
        ("reduce_scatter",),
    ),
    "dtype": (
        lambda: dist.all_reduce(ones()),
        lambda: dist.all_reduce(ones(6, torch.float64)),
        ("float32", "float64"),
    ),
    "dtype of one size": (
        lambda: dist.all_gather(rows(), ones()),
        lambda: dist.all_gather(rows(6, torch.int32), ones(6, torch.int32)),
        ("float32", "int32"),
    ),
    "dtype that only moves": (
        lambda: dist.broadcast(ones(6, torch.uint16), 0),
        lambda: dist.broadcast(ones(6, torch.bfloat16), 0),
        ("uint16", "bfloat16"),
    ),
    "dtypes that only move": (
        lambda: dist.all_gather(rows(6, torch.float8_e8m0fnu), ones(6, torch.float8_e8m0fnu)),
        lambda: dist.all_gather(rows(6, torch.float8_e4m3fnuz), ones(6, torch.float8_e4m3fnuz)),
        ("float8_e8m0fnu", "float8_e4m3fnuz"),
    ),
    "dtype and its stand-in, by splits": (
        lambda: dist.all_to_all_single(ones(6, torch.uint64), ones(6, torch.uint64)),
        lambda: dist.all_to_all_single(ones(6, torch.int64), ones(6, torch.int64)),
        ("uint64", "int64"),
    ),
    "dtypes in another order": (
        lambda: broadcast([ones(6, torch.uint16), ones(6, torch.int16)]),
        lambda: broadcast([ones(6, torch.int16), ones(6, torch.uint16)]),
        (" uint16", " int16", "part 1 of 2"),
    ),
    "op": (
        lambda: dist.all_reduce(ones()),
        lambda: dist.all_reduce(ones(), MAX),
        ("sum", "max"),
    ),
    "root": (
        lambda: dist.broadcast(ones(), 0),
        lambda: dist.broadcast(ones(), 2),
        ("0", "2"),
    ),
    "dst": (lambda: dist.reduce(ones(), 0), lambda: dist.reduce(ones(), 1), ("0", "1")),
    "number of tensors": (
        lambda: dist.all_reduce_coalesced([ones(3), ones(3)]),
        lambda: dist.all_reduce_coalesced([ones(6)]),
        (),
    ),
    "splits": (lambda: splits(0), lambda: splits(1), ("2", "3")),
    "fewer by splits": (lambda: splits(0), lambda: splits(-1), ("sends 1", "room for 2")),
    "gathered parts": (lambda: parts(6), lambda: parts(5), ("6", "5")),
}


def disagree(me: RankContext, kind: str, odd: int) -> tuple[Caught, Caught]:
    """The odd rank makes another call, twice, between matching calls, which stay correct."""
    most, one, _ = DISAGREEMENTS[kind]
    errors = []
    for _ in range(2):
        x = torch.full((1000,), float(me.rank))
        dist.all_reduce(x)
        errors.append(caught(one if me.rank == odd else most))
        y = torch.full((70_000,), float(me.rank))
        dist.broadcast(y, 2)
        assert y.eq(2).all()
        assert x.eq(sum(range(me.world))).all()
    return errors[0], errors[1]


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_mismatched_calls_raise_on_every_rank(pools, kind, odd):
    found = pools(WORLD).run(disagree, kind, odd)
    words = DISAGREEMENTS[kind][2]
    for errors in found:
        for error in errors:
            assert error.kinds[:1] == ("ValueError",), error
            assert all(word in error.text for word in words), error
            assert f"rank {odd}" in error.text, error
    assert len({errors[0].text for errors in found}) == 1, "all ranks raise the same message"


def asynchronous(me: RankContext) -> list[Caught]:
    """A mismatch of queued calls, between matching calls: only its own Work has an error."""
    good = [torch.ones(5), torch.ones(5)]
    works = [dist.all_reduce(good[0], async_op=True)]
    works.append(dist.all_reduce(ones(6 + me.rank), async_op=True))
    works.append(dist.all_reduce(good[1], async_op=True))
    errors = [caught(work.wait) for work in works]
    future = works[1].get_future()
    errors.append(caught(future.wait))
    assert OLD_TORCH or works[1].exception() is not None  # old torch cannot convert it to Python
    assert not works[1].is_success()
    assert [t[0].item() for t in good] == [WORLD, WORLD]
    return errors


def test_mismatched_asynchronous_calls_raise(pools):
    for errors in pools(WORLD).run(asynchronous):
        assert [e.kind for e in errors[:3]] == ["", "ValueError", ""], errors
        assert "6" in errors[1].text
        assert "7" in errors[1].text or "8" in errors[1].text  # the first host that differs
        assert errors[3].kind, errors


def untouched(me: RankContext) -> list[bool]:
    """Whether refused calls leave their outputs unchanged, for small and large tensors."""
    same = []
    for count in (6, 400_000):
        x = torch.full((count + me.rank,), 3.0)
        caught(dist.all_reduce, x)
        out = [torch.full((count,), 5.0) for _ in range(me.world)]
        dtype = torch.int32 if me.rank else torch.float32
        caught(dist.all_gather, [t.to(dtype) for t in out], ones(count, dtype))
        y = torch.full((count,), 7.0)
        caught(dist.broadcast, y, min(me.rank, 1))
        same.append(bool(x.eq(3).all() and y.eq(7).all() and all(t.eq(5).all() for t in out)))
    return same


def test_refused_calls_write_nothing(pools):
    for same in pools(WORLD).run(untouched):
        assert all(same)


# --- invalid calls of one rank --------------------------------------------------------------------

MISTAKES: dict[str, tuple[RankCall, RankCall, str, str]] = {
    "op": (
        lambda: dist.all_reduce(ones()),
        lambda: dist.all_reduce(ones(), dist.ReduceOp.BAND),
        "TypeError",
        "band",
    ),
    "dtype": (
        lambda: dist.all_reduce(ones()),
        lambda: dist.all_reduce(ones(6).to(torch.uint16)),
        "TypeError",
        "uint16",
    ),
    "dtype of one part": (
        lambda: dist.reduce_scatter(ones(), rows()),
        lambda: dist.reduce_scatter(ones(6, torch.uint16), rows(6, torch.uint16)),
        "TypeError",
        "uint16",
    ),
    "shape": (
        lambda: dist.all_gather_into_tensor(ones(18), ones(6)),
        lambda: dist.all_gather_into_tensor(ones(17), ones(6)),
        "ValueError",
        "17",
    ),
    "rows of all ranks": (
        lambda: dist.all_to_all_single(ones(6), ones(6)),
        lambda: dist.all_to_all_single(ones(7), ones(7)),
        "ValueError",
        "7",
    ),
    "factor": (
        lambda: dist.all_reduce(ones(6, torch.int32)),
        lambda: dist.all_reduce(ones(6, torch.int32), dist._make_nccl_premul_sum(1.5)),
        "TypeError",
        "1.5",
    ),
    "list": (
        lambda: dist.all_gather(rows(), ones()),
        lambda: dist.all_gather(rows()[:2], ones()),
        "ValueError",
        "2",
    ),
    "parts": (
        lambda: dist.reduce_scatter(ones(), rows()),
        lambda: dist.reduce_scatter(ones(5), rows()),
        "ValueError",
        "5",
    ),
}


def mistake(me: RankContext, kind: str, odd: int) -> Caught:
    right, wrong, _, _ = MISTAKES[kind]
    error = caught(wrong if me.rank == odd else right)
    x = ones()
    dist.all_reduce(x)
    assert x.eq(me.world).all()
    return error


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("kind", MISTAKES)
def test_an_invalid_call_of_one_rank_raises_on_all(pools, kind, odd):
    _, _, own, word = MISTAKES[kind]
    for rank, error in enumerate(pools(WORLD).run(mistake, kind, odd)):
        assert error.kind == (own if rank == odd else "ValueError"), error
        assert word in error.text, error
        assert rank == odd or f"rank {odd}" in error.text, error
