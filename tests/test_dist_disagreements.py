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
from dist_pool import BACKEND, OLD_TORCH, OURS, Caught, RankContext, caught

pytestmark = pytest.mark.skipif(
    not OURS, reason=f"{BACKEND} hangs, aborts or gives wrong results where ranks disagree"
)
WORLD = 3

# --- calls: each of these functions returns a call of one rank ------------------------------------

F32, F64, I32, I64 = torch.float32, torch.float64, torch.int32, torch.int64
U16, U64, BF16 = torch.uint16, torch.uint64, torch.bfloat16
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fnuz
SUM, MAX, BAND = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.BAND
RankCall = Callable[[], Any]


def ones(count: int = 6, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def rows(count: int = 6, dtype: torch.dtype = F32, number: int = WORLD) -> list[torch.Tensor]:
    return [ones(count, dtype) for _ in range(number)]


def reduced(count: int = 6, dtype: torch.dtype = F32, op: Any = SUM) -> RankCall:
    return lambda: dist.all_reduce(ones(count, dtype), op)


def sent(count: int = 6, root: int = 0, dtype: torch.dtype = F32) -> RankCall:
    return lambda: dist.broadcast(ones(count, dtype), root)


def sent_together(*dtypes: torch.dtype) -> RankCall:
    options = dist.BroadcastOptions()
    return lambda: dist.group.WORLD.broadcast([ones(6, t) for t in dtypes], options).wait()


def reduced_together(*counts: int) -> RankCall:
    return lambda: dist.all_reduce_coalesced([ones(count) for count in counts])


def gathered(dtype: torch.dtype = F32, number: int = WORLD) -> RankCall:
    return lambda: dist.all_gather(rows(6, dtype, number), ones(6, dtype))


def gathered_whole(count: int) -> RankCall:
    return lambda: dist.all_gather_into_tensor(ones(count), ones())


def scattered(count: int = 6, dtype: torch.dtype = F32) -> RankCall:
    """Reduce-scatter of rows of six elements."""
    return lambda: dist.reduce_scatter(ones(count, dtype), rows(6, dtype))


def scattered_unevenly(*counts: int) -> RankCall:
    """Reduce-scatter of rows of these sizes."""
    return lambda: dist.reduce_scatter(ones(counts[dist.get_rank()]), [*map(ones, counts)])


def scattered_whole(count: int) -> RankCall:
    return lambda: dist.reduce_scatter_tensor(ones(count), ones(WORLD * count))


def exchanged(count: int = 6, dtype: torch.dtype = F32) -> RankCall:
    return lambda: dist.all_to_all_single(ones(count, dtype), ones(count, dtype))


def splits(more: int) -> RankCall:
    """Send two elements to each rank, and `more` unexpected ones to the next rank."""

    def call() -> None:
        rank, sizes = dist.get_rank(), [2] * WORLD
        sizes[(rank + 1) % WORLD] += more
        dist.all_to_all_single(ones(2 * WORLD), ones(sum(sizes)), [2] * WORLD, sizes)

    return call


def parts(own: int) -> RankCall:
    """All-gather of six elements per rank, but `own` elements from this rank."""

    def call() -> None:
        out = rows()
        out[dist.get_rank()] = ones(own)
        dist.all_gather(out, ones(own))

    return call


# --- ranks that differ ----------------------------------------------------------------------------

# The call of most ranks, the call of the odd rank, and words that the error must contain.
DISAGREEMENTS: dict[str, tuple[RankCall, RankCall, tuple[str, ...]]] = {
    "collective": (reduced(), sent(), ("all_reduce", "broadcast")),
    "barrier": (reduced(), dist.barrier, ("all_reduce", "barrier")),
    "gather or scatter": (gathered(), scattered(), ("all_gather", "reduce_scatter")),
    "count": (reduced(6), reduced(7), ("6", "7")),
    "nothing": (reduced(6), reduced(0), ("6", "0")),
    "large count": (reduced(1_000_000), reduced(3), ("1000000", "3")),
    "count, broadcast": (sent(6), sent(5), ("6", "5")),
    "count, reduce_scatter": (scattered_whole(2), scattered_whole(3), ("reduce_scatter",)),
    "rows of one sum": (
        scattered_unevenly(5, 5, 5),
        scattered_unevenly(6, 4, 5),
        ("reduce_scatter", "different sizes"),
    ),
    "dtype": (reduced(), reduced(dtype=F64), ("float32", "float64")),
    "dtype of one size": (gathered(), gathered(I32), ("float32", "int32")),
    "dtype that only moves": (sent(dtype=U16), sent(dtype=BF16), ("uint16", "bfloat16")),
    "dtypes that only move": (
        gathered(E8M0),
        gathered(E4M3),
        ("float8_e8m0fnu", "float8_e4m3fnuz"),
    ),
    "dtype and stand-in, by splits": (
        exchanged(dtype=U64),
        exchanged(dtype=I64),
        ("uint64", "int64"),
    ),
    "dtypes in another order": (
        sent_together(U16, torch.int16),
        sent_together(torch.int16, U16),
        (" uint16", " int16", "part 1 of 2"),
    ),
    "op": (reduced(), reduced(op=MAX), ("sum", "max")),
    "root": (sent(root=0), sent(root=2), ("0", "2")),
    "dst": (lambda: dist.reduce(ones(), 0), lambda: dist.reduce(ones(), 1), ("0", "1")),
    "number of tensors": (reduced_together(3, 3), reduced_together(6), ()),
    "splits": (splits(0), splits(1), ("2", "3")),
    "fewer by splits": (splits(0), splits(-1), ("sends 1", "room for 2")),
    "gathered parts": (parts(6), parts(5), ("6", "5")),
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

FACTOR = dist._make_nccl_premul_sum(1.5)
# The call of most ranks, the invalid one, the error of its rank, and a word of all errors.
MISTAKES: dict[str, tuple[RankCall, RankCall, str, str]] = {
    "op": (reduced(), reduced(op=BAND), "TypeError", "band"),
    "dtype": (reduced(), reduced(dtype=U16), "TypeError", "uint16"),
    "dtype of one part": (scattered(), scattered(dtype=U16), "TypeError", "uint16"),
    "shape": (gathered_whole(18), gathered_whole(17), "ValueError", "17"),
    "rows of all ranks": (exchanged(6), exchanged(7), "ValueError", "7"),
    "factor": (reduced(dtype=I32), reduced(dtype=I32, op=FACTOR), "TypeError", "1.5"),
    "list": (gathered(), gathered(number=2), "ValueError", "2"),
    "parts": (scattered(), scattered(5), "ValueError", "5"),
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
