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
from matrix import TORCH_OPS
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
    async_op: bool
    dtype: torch.dtype
    op: str
    count: int  # elements of a block
    root: int
    odd: int  # the rank that makes the mistake, in steps with a mistake
    world: int

    def rng(self, what: object) -> random.Random:
        """A generator for further choices that all ranks make alike."""
        return random.Random(f"{self.seed} {what}")


@dataclasses.dataclass(frozen=True)
class GroupRank:
    """The calling rank of a group, with its own random choices."""

    group: Any
    rank: int
    local: random.Random  # for choices that differ between ranks

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of the group, as torch.distributed calls take it."""
        return dist.get_global_rank(self.group, rank)


# --- values ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2048)
def _pattern(dtype: torch.dtype, seed: int) -> Tensor:
    return randoms(1, (_PERIOD,), dtype, seed=seed)[0]


@functools.lru_cache(maxsize=512)
def _folded(dtype: torch.dtype, op: str, seeds: tuple[int, ...]) -> Tensor:
    return left_fold([_pattern(dtype, s) for s in seeds], op)


def _repeated(pattern: Tensor, count: int) -> Tensor:
    return pattern.repeat(count // _PERIOD + 1)[:count]


def _seed(step: Step, rank: int, block: int) -> int:
    return (step.seed + 7 * rank + 31 * block) % _PATTERNS


def input_block(step: Step, rank: int, block: int = 0, count: int | None = None) -> Tensor:
    return _repeated(
        _pattern(step.dtype, _seed(step, rank, block)), step.count if count is None else count
    )


def fold(step: Step, block: int = 0, count: int | None = None, op: str = "") -> Tensor:
    seeds = tuple(_seed(step, r, block) for r in range(step.world))
    return _repeated(
        _folded(step.dtype, op or step.op, seeds), step.count if count is None else count
    )


def in_random_layout(me: GroupRank, values: Tensor, flat: bool = False) -> Tensor:
    """Copy the values into a randomly chosen kind of memory; `flat`: torch needs it contiguous."""
    layout = me.local.choice(("own", "own", "symmetric", "offset") + (() if flat else ("gaps",)))
    count = values.numel()
    if layout == "symmetric":
        return pc.symmetric_empty(count, dtype=values.dtype, group=me.group).copy_(values)
    if layout == "offset":
        return values.new_empty(count + 3)[3:].copy_(values)
    if layout == "gaps":
        return values.new_empty(2 * count + 1)[1::2].copy_(values)
    return values.clone()


def output_tensor(
    me: GroupRank, step: Step, count: int | None = None, flat: bool = False
) -> Tensor:
    """An output tensor, filled with values that no result has."""
    filler = _pattern(step.dtype, _PATTERNS)
    return in_random_layout(me, _repeated(filler, step.count if count is None else count), flat)


def check(step: Step, pairs: Sequence[tuple[Tensor, Tensor]]) -> Check:
    def run() -> None:
        for place, (actual, wanted) in enumerate(pairs):
            assert_same([actual], [wanted], f"result {place} of {step}", step.op)

    return run


# --- collectives ----------------------------------------------------------------------------------


def _op(step: Step) -> Any:
    return getattr(dist.ReduceOp, TORCH_OPS[step.op])


def all_reduce(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    x = in_random_layout(me, input_block(step, me.rank))
    return [dist.all_reduce(x, _op(step), **options)], check(step, [(x, fold(step))])


def reduce(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    x = in_random_layout(me, input_block(step, me.rank))
    work = dist.reduce(x, me.global_rank(step.root), _op(step), **options)
    return [work], check(step, [(x, fold(step))] if me.rank == step.root else [])


def broadcast(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    x = in_random_layout(me, input_block(step, me.rank))
    work = dist.broadcast(x, me.global_rank(step.root), **options)
    return [work], check(step, [(x, input_block(step, step.root))])


def all_gather(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    """all_gather of tensors whose sizes differ between ranks."""
    counts = [step.rng(r).choice((step.count, step.count // 2)) for r in range(step.world)]
    out = [output_tensor(me, step, n) for n in counts]
    mine = in_random_layout(me, input_block(step, me.rank, count=counts[me.rank]))
    wanted = [input_block(step, r, count=n) for r, n in enumerate(counts)]
    work = dist.all_gather(out, mine, **options)
    return [work], check(step, list(zip(out, wanted, strict=True)))


def all_gather_into_tensor(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    out = output_tensor(me, step, step.count * step.world, flat=True)
    mine = in_random_layout(me, input_block(step, me.rank))
    if step.count and me.local.random() < 0.2:  # in place
        mine = out[step.count * me.rank :][: step.count].copy_(mine)
    wanted = torch.cat([input_block(step, r) for r in range(step.world)])
    return [dist.all_gather_into_tensor(out, mine, **options)], check(step, [(out, wanted)])


def gather(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    ranks = range(step.world)
    out = [output_tensor(me, step) for _ in ranks] if me.rank == step.root else None
    work = dist.gather(
        in_random_layout(me, input_block(step, me.rank)), out, me.global_rank(step.root), **options
    )
    return [work], check(
        step, list(zip(out or [], [input_block(step, r) for r in ranks], strict=False))
    )


def scatter(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    blocks = [in_random_layout(me, input_block(step, me.rank, b)) for b in range(step.world)]
    out = output_tensor(me, step)
    source = me.global_rank(step.root)
    work = dist.scatter(out, blocks if me.rank == step.root else None, source, **options)
    return [work], check(step, [(out, input_block(step, step.root, me.rank))])


def reduce_scatter(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    blocks = [in_random_layout(me, input_block(step, me.rank, b)) for b in range(step.world)]
    out = output_tensor(me, step)
    work = dist.reduce_scatter(out, blocks, _op(step), **options)
    return [work], check(step, [(out, fold(step, me.rank))])


def reduce_scatter_tensor(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    whole = in_random_layout(
        me, torch.cat([input_block(step, me.rank, b) for b in range(step.world)])
    )
    out = output_tensor(me, step)
    work = dist.reduce_scatter_tensor(out, whole, _op(step), **options)
    return [work], check(step, [(out, fold(step, me.rank))])


def _send_counts(step: Step, source: int) -> list[int]:
    """Elements that rank `source` sends to each rank."""
    return [step.rng((source, to)).randint(0, step.count) for to in range(step.world)]


def all_to_all(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    ranks = range(step.world)
    mine = [
        in_random_layout(me, input_block(step, me.rank, to, n))
        for to, n in enumerate(_send_counts(step, me.rank))
    ]
    wanted = [input_block(step, r, me.rank, _send_counts(step, r)[me.rank]) for r in ranks]
    out = [output_tensor(me, step, w.numel()) for w in wanted]
    work = dist.all_to_all(out, mine, **options)
    return [work], check(step, list(zip(out, wanted, strict=True)))


def all_to_all_single(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    sent = _send_counts(step, me.rank)
    wanted = [
        input_block(step, r, me.rank, _send_counts(step, r)[me.rank]) for r in range(step.world)
    ]
    x = in_random_layout(
        me, torch.cat([input_block(step, me.rank, to, n) for to, n in enumerate(sent)])
    )
    out = output_tensor(me, step, sum(w.numel() for w in wanted))
    work = dist.all_to_all_single(out, x, [w.numel() for w in wanted], sent, **options)
    return [work], check(step, [(out, torch.cat(wanted))])


def barrier(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    return [dist.barrier(**options)], check(step, [])


def all_reduce_coalesced(me: GroupRank, step: Step, **options: Any) -> tuple[Works, Check]:
    parts = [step.count, step.count // 3, 1]
    xs = [in_random_layout(me, input_block(step, me.rank, b, n)) for b, n in enumerate(parts)]
    work = dist.all_reduce_coalesced(xs, _op(step), **options)
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
