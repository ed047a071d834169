"""Calls of the soak: all ranks derive each call from a seed, and check its exact result.

Values repeat one short pattern, so plain torch (reference.py) folds only that pattern. Each rank
chooses the memory layout of its tensors independently.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from dist_cases import THEIRS
from reference import COMPLEX, DTYPES, OPS, allowed, assert_same, left_fold, randoms
from torch import Tensor

import pycollect as pc

_PERIOD = 1021  # elements of a pattern; prime, so data shifted by a piece or a row never matches
_PATTERNS = 64  # patterns per dtype: few enough to cache
_CPU = torch.device("cpu")
Works = Sequence[Any]
Check = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Step:
    """A call, as all ranks of a group derive it."""

    kind: str
    number: int  # index within the group
    seed: int
    later: bool  # async_op
    dtype: torch.dtype
    op: str
    count: int  # elements of a block
    root: int
    odd: int  # the rank that makes the mistake, in steps with a mistake
    world: int

    def own(self, what: object) -> random.Random:
        """A generator for further choices that all ranks make alike."""
        return random.Random(f"{self.seed} {what}")


@dataclasses.dataclass(frozen=True)
class Side:
    """The calling rank and its group."""

    group: Any
    rank: int
    local: random.Random  # for choices that differ between ranks

    def at(self, rank: int) -> int:
        """The global rank of a rank of the group, as torch.distributed calls take it."""
        return dist.get_global_rank(self.group, rank)


# --- values ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2048)
def _pattern(dtype: torch.dtype, seed: int) -> Tensor:
    return randoms(1, (_PERIOD,), dtype, seed=seed)[0]


@functools.lru_cache(maxsize=512)
def _folded(dtype: torch.dtype, op: str, seeds: tuple[int, ...]) -> Tensor:
    return left_fold([_pattern(dtype, s) for s in seeds], op)


def _long(pattern: Tensor, count: int) -> Tensor:
    return pattern.repeat(count // _PERIOD + 1)[:count]


def _seed(step: Step, rank: int, block: int) -> int:
    return (step.seed + 7 * rank + 31 * block) % _PATTERNS


def given(step: Step, rank: int, block: int = 0, count: int | None = None) -> Tensor:
    return _long(
        _pattern(step.dtype, _seed(step, rank, block)), step.count if count is None else count
    )


def fold(step: Step, block: int = 0, count: int | None = None, op: str = "") -> Tensor:
    seeds = tuple(_seed(step, r, block) for r in range(step.world))
    return _long(_folded(step.dtype, op or step.op, seeds), step.count if count is None else count)


def lay(side: Side, values: Tensor, flat: bool = False) -> Tensor:
    """Copy the values into a randomly chosen kind of memory; `flat`: torch needs it contiguous."""
    how = side.local.choice(("own", "own", "placed", "offset") + (() if flat else ("gaps",)))
    count = values.numel()
    if how == "placed":
        return pc.empty(count, dtype=values.dtype, group=side.group).copy_(values)
    if how == "offset":
        return values.new_empty(count + 3)[3:].copy_(values)
    if how == "gaps":
        return values.new_empty(2 * count + 1)[1::2].copy_(values)
    return values.clone()


def room(side: Side, step: Step, count: int | None = None, flat: bool = False) -> Tensor:
    """An output tensor, filled with values that no result has."""
    junk = _pattern(step.dtype, _PATTERNS)
    return lay(side, _long(junk, step.count if count is None else count), flat)


def check(step: Step, pairs: Sequence[tuple[Tensor, Tensor]]) -> Check:
    def run() -> None:
        for place, (actual, wanted) in enumerate(pairs):
            assert_same([actual], [wanted], f"result {place} of {step}", step.op)

    return run


# --- collectives ----------------------------------------------------------------------------------


def _op(step: Step) -> Any:
    return getattr(dist.ReduceOp, THEIRS[step.op])


def all_reduce(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    x = lay(side, given(step, side.rank))
    return [dist.all_reduce(x, _op(step), **how)], check(step, [(x, fold(step))])


def reduce(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    x = lay(side, given(step, side.rank))
    work = dist.reduce(x, side.at(step.root), _op(step), **how)
    return [work], check(step, [(x, fold(step))] if side.rank == step.root else [])


def broadcast(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    x = lay(side, given(step, side.rank))
    work = dist.broadcast(x, side.at(step.root), **how)
    return [work], check(step, [(x, given(step, step.root))])


def all_gather(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    """all_gather of tensors whose sizes differ between ranks."""
    counts = [step.own(r).choice((step.count, step.count // 2)) for r in range(step.world)]
    out = [room(side, step, n) for n in counts]
    mine = lay(side, given(step, side.rank, count=counts[side.rank]))
    wanted = [given(step, r, count=n) for r, n in enumerate(counts)]
    work = dist.all_gather(out, mine, **how)
    return [work], check(step, list(zip(out, wanted, strict=True)))


def all_gather_into_tensor(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    out = room(side, step, step.count * step.world, flat=True)
    mine = lay(side, given(step, side.rank))
    if step.count and side.local.random() < 0.2:  # in place
        mine = out[step.count * side.rank :][: step.count].copy_(mine)
    wanted = torch.cat([given(step, r) for r in range(step.world)])
    return [dist.all_gather_into_tensor(out, mine, **how)], check(step, [(out, wanted)])


def gather(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    ranks = range(step.world)
    out = [room(side, step) for _ in ranks] if side.rank == step.root else None
    work = dist.gather(lay(side, given(step, side.rank)), out, side.at(step.root), **how)
    return [work], check(step, list(zip(out or [], [given(step, r) for r in ranks], strict=False)))


def scatter(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    blocks = [lay(side, given(step, side.rank, b)) for b in range(step.world)]
    out = room(side, step)
    source = side.at(step.root)
    work = dist.scatter(out, blocks if side.rank == step.root else None, source, **how)
    return [work], check(step, [(out, given(step, step.root, side.rank))])


def reduce_scatter(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    blocks = [lay(side, given(step, side.rank, b)) for b in range(step.world)]
    out = room(side, step)
    work = dist.reduce_scatter(out, blocks, _op(step), **how)
    return [work], check(step, [(out, fold(step, side.rank))])


def reduce_scatter_tensor(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    whole = lay(side, torch.cat([given(step, side.rank, b) for b in range(step.world)]))
    out = room(side, step)
    work = dist.reduce_scatter_tensor(out, whole, _op(step), **how)
    return [work], check(step, [(out, fold(step, side.rank))])


def _shares(step: Step, source: int) -> list[int]:
    """Elements that rank `source` sends to each rank."""
    return [step.own((source, to)).randint(0, step.count) for to in range(step.world)]


def all_to_all(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    ranks = range(step.world)
    mine = [
        lay(side, given(step, side.rank, to, n)) for to, n in enumerate(_shares(step, side.rank))
    ]
    wanted = [given(step, r, side.rank, _shares(step, r)[side.rank]) for r in ranks]
    out = [room(side, step, w.numel()) for w in wanted]
    work = dist.all_to_all(out, mine, **how)
    return [work], check(step, list(zip(out, wanted, strict=True)))


def all_to_all_single(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    sent = _shares(step, side.rank)
    wanted = [given(step, r, side.rank, _shares(step, r)[side.rank]) for r in range(step.world)]
    x = lay(side, torch.cat([given(step, side.rank, to, n) for to, n in enumerate(sent)]))
    out = room(side, step, sum(w.numel() for w in wanted))
    work = dist.all_to_all_single(out, x, [w.numel() for w in wanted], sent, **how)
    return [work], check(step, [(out, torch.cat(wanted))])


def barrier(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    return [dist.barrier(**how)], check(step, [])


def all_reduce_coalesced(side: Side, step: Step, **how: Any) -> tuple[Works, Check]:
    parts = [step.count, step.count // 3, 1]
    xs = [lay(side, given(step, side.rank, b, n)) for b, n in enumerate(parts)]
    work = dist.all_reduce_coalesced(xs, _op(step), **how)
    return [work], check(step, [(x, fold(step, b, x.numel())) for b, x in enumerate(xs)])


ROOTED = (reduce, broadcast, gather, scatter)
COLLECTIVES = {call.__name__: call for call in (
    all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter,
    reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single, barrier,
    all_reduce_coalesced)}  # fmt: skip


def ops(kind: str, dtype: torch.dtype) -> list[str]:
    """The contract's ops that torch.distributed passes on to a backend."""
    lacks = ["prod"] if dtype in COMPLEX and not kind.startswith("reduce_scatter") else []
    return [op for op in OPS if allowed(dtype, op) and op not in lacks]


def draw(kind: str, number: int, seed: int, world: int) -> Step:
    """Draw a call of this kind; most are small, 4 % have 1 to 4 MiB."""
    rng = random.Random(f"{seed} {number} {kind}")
    dtype = rng.choice(DTYPES)
    nbytes = rng.choice((0, 8, 60, 700, 5000, 40_000, 70_000, 300_000))
    nbytes = (
        rng.randint(2**20, 4 * 2**20) if rng.random() < 0.04 else rng.randint(nbytes // 2, nbytes)
    )
    return Step(
        kind, number, rng.randrange(2**30), rng.random() < 0.6, dtype, rng.choice(ops(kind, dtype)),
        nbytes // dtype.itemsize // world, rng.randrange(world), rng.randrange(world), world,
    )  # fmt: skip
