"""The torch.distributed collectives, each with a model in pycollect's one-process API.

Inputs are derived from the case, so every rank can compute the inputs of all ranks. A model takes
rows[rank][block].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dist_pool import OLD_TORCH
from reference import COMPLEX, INTEGERS, MOVED, OPS, allowed, randoms
from torch import Tensor

import pycollect as pc

TORCH_OPS = dict(
    zip(OPS, ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"), strict=True)
)
_PERIOD = 1021  # elements of the pattern; prime, so data shifted by a piece or a row never matches


@dataclasses.dataclass(frozen=True)
class Case:
    collective: str
    dtype: torch.dtype
    op: str = "sum"
    count: int = 7  # elements of a block
    layout: str = "contiguous"

    def __str__(self) -> str:
        return f"{self.collective} {self.dtype} {self.op} {self.count} {self.layout}"


@functools.lru_cache(maxsize=512)
def _pattern(dtype: torch.dtype, seed: int, tame: bool) -> Tensor:
    return randoms(1, (_PERIOD,), dtype, seed=seed, tame=tame)[0]


def block(case: Case, seed: int, tame: bool = False) -> Tensor:
    """Return the case's block for a seed; it repeats one pattern, so large blocks are cheap."""
    pattern = _pattern(case.dtype, seed, tame)
    return pattern.repeat(case.count // _PERIOD + 1)[: case.count]


def rows(case: Case, world: int, tame: bool = False) -> list[list[Tensor]]:
    """Inputs as [rank][block]: as many blocks as the collective takes from a rank."""
    blocks = world if COLLECTIVES[case.collective].many else 1
    return [[block(case, r * world + b, tame) for b in range(blocks)] for r in range(world)]


# --- layouts: the same values in other memory -----------------------------------------------------


def shape(count: int, layout: str) -> tuple[int, ...]:
    if layout in ("contiguous", "sliced"):
        return (count,)
    first = next((n for n in (31, 7, 5, 4, 3, 2) if count % n == 0), 1)
    pair = (first, count // first)
    return (1, pair[0], 1, pair[1]) if layout == "channels_last" else pair


def with_layout(values: Tensor, layout: str) -> Tensor:
    """Copy the values, in logical order, into new memory of the given layout."""
    values = values.view(shape(values.numel(), layout))
    if layout == "transposed":
        return values.new_empty(values.shape[::-1]).t().copy_(values)
    if layout == "channels_last":
        return values.clone(memory_format=torch.channels_last)
    if layout == "sliced":
        base = values.new_empty(2 * values.numel() + 1)
        return base[1::2].copy_(values)
    return values.clone()


LAYOUTS = ("contiguous", "transposed", "channels_last", "sliced")


# --- the calls: this rank's blocks -> this rank's output (None: undefined) ------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    run: Callable[..., Tensor | None]
    model: Callable[..., list[Tensor | None]]
    many: bool = False  # takes a block for every rank
    reduces: bool = False


@dataclasses.dataclass(frozen=True)
class CaseContext:
    """The calling rank, its group, and the case that it runs."""

    group: Any
    rank: int
    world: int
    root: int
    case: Case
    device: str = "cpu"

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, TORCH_OPS[self.case.op])

    def with_layout(self, values: Tensor) -> Tensor:
        return with_layout(values, self.case.layout)

    def outputs(self, blocks: int = 1) -> list[Tensor]:
        """Output tensors, filled with values that no result has."""
        filler = block(self.case, 999).to(self.device)
        return [self.with_layout(filler) for _ in range(blocks)]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _all_reduce(me: CaseContext, mine: list[Tensor]) -> Tensor:
    x = me.with_layout(mine[0])
    dist.all_reduce(x, me.op, me.group)
    return x


def _all_reduce_coalesced(me: CaseContext, mine: list[Tensor]) -> Tensor:
    x, y = me.with_layout(mine[0]), mine[0][: me.case.count // 2].clone()
    dist.all_reduce_coalesced([x, y], me.op, me.group)
    return _flat([x, y])


def _reduce(me: CaseContext, mine: list[Tensor]) -> Tensor | None:
    x = me.with_layout(mine[0])
    dist.reduce(x, me.root, me.op, me.group)
    return x if me.rank == me.root else None


def _broadcast(me: CaseContext, mine: list[Tensor]) -> Tensor:
    x = me.with_layout(mine[0])
    dist.broadcast(x, me.root, me.group)
    return x


def _all_gather(me: CaseContext, mine: list[Tensor]) -> Tensor:
    out = me.outputs(me.world)
    dist.all_gather(out, me.with_layout(mine[0]), me.group)
    return _flat(out)


def _all_gather_into_tensor(me: CaseContext, mine: list[Tensor]) -> Tensor:
    x = me.with_layout(mine[0])
    out = block(dataclasses.replace(me.case, count=me.case.count * me.world), 999)
    out = out.to(me.device, copy=True).view(me.world * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, me.group)
    return out


def _gather(me: CaseContext, mine: list[Tensor]) -> Tensor | None:
    out = me.outputs(me.world) if me.rank == me.root else None
    dist.gather(me.with_layout(mine[0]), out, me.root, me.group)
    return _flat(out) if out is not None else None


def _scatter(me: CaseContext, mine: list[Tensor]) -> Tensor:
    (out,) = me.outputs()
    dist.scatter(
        out, [me.with_layout(b) for b in mine] if me.rank == me.root else None, me.root, me.group
    )
    return out


def _reduce_scatter(me: CaseContext, mine: list[Tensor]) -> Tensor:
    (out,) = me.outputs()
    dist.reduce_scatter(out, [me.with_layout(b) for b in mine], me.op, me.group)
    return out


def _reduce_scatter_tensor(me: CaseContext, mine: list[Tensor]) -> Tensor:
    (out,) = me.outputs()
    dist.reduce_scatter_tensor(out, _stacked(me, mine), me.op, me.group)
    return out


def _all_to_all(me: CaseContext, mine: list[Tensor]) -> Tensor:
    out = me.outputs(me.world)
    dist.all_to_all(out, [me.with_layout(b) for b in mine], me.group)
    return _flat(out)


def _all_to_all_single(me: CaseContext, mine: list[Tensor]) -> Tensor:
    x = _stacked(me, mine)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x, group=me.group)
    return out


def _stacked(me: CaseContext, mine: list[Tensor]) -> Tensor:
    """Concatenate the blocks along dim 0 into one tensor of the case's layout."""
    blocks = [b.view(shape(b.numel(), me.case.layout)) for b in mine]
    whole = torch.cat(blocks)
    if me.case.layout == "channels_last":
        return whole.contiguous(memory_format=torch.channels_last)
    if me.case.layout == "transposed":
        return whole.new_empty(whole.shape[::-1]).t().copy_(whole)
    return me.with_layout(whole)


# --- the models: the blocks of all ranks -> the output of every rank ------------------------------


def _in_place(call: Callable[..., Any], x: list[list[Tensor]], *args: Any) -> list[Tensor]:
    tensors = [row[0].clone() for row in x]
    call(tensors, *args)
    return tensors


def _all_reduce_model(x: list[list[Tensor]], op: str, root: int) -> list[Tensor]:
    return _in_place(pc.all_reduce, x, op)


def _all_reduce_coalesced_model(x: list[list[Tensor]], op: str, root: int) -> list[Tensor]:
    lists = [[row[0].clone(), row[0][: row[0].numel() // 2].clone()] for row in x]
    pc.all_reduce_coalesced(lists, op)
    return [_flat(tensors) for tensors in lists]


def _reduce_model(x: list[list[Tensor]], op: str, root: int) -> list[Tensor | None]:
    folded = _in_place(pc.reduce, x, root, op)
    return [t if r == root else None for r, t in enumerate(folded)]


def _broadcast_model(x: list[list[Tensor]], op: str, root: int) -> list[Tensor]:
    return _in_place(pc.broadcast, x, root)


def _all_gather_model(x: list[list[Tensor]], op: str, root: int) -> list[Tensor]:
    return pc.all_gather([row[0] for row in x])


def _gather_model(x: list[list[Tensor]], op: str, root: int) -> list[Tensor | None]:
    whole = pc.gather([row[0] for row in x])
    return [whole if r == root else None for r in range(len(x))]


def _scatter_model(x: list[list[Tensor]], op: str, root: int) -> list[Tensor]:
    return pc.scatter(_flat(x[root]), f"cpu*{len(x)}")


def _reduce_scatter_model(x: list[list[Tensor]], op: str, root: int) -> list[Tensor]:
    return pc.reduce_scatter([_flat(row) for row in x], op)


def _all_to_all_model(x: list[list[Tensor]], op: str, root: int) -> list[Tensor]:
    return pc.all_to_all([_flat(row) for row in x])


COLLECTIVES = {
    "all_reduce": Call(_all_reduce, _all_reduce_model, reduces=True),
    "all_reduce_coalesced": Call(_all_reduce_coalesced, _all_reduce_coalesced_model, reduces=True),
    "reduce": Call(_reduce, _reduce_model, reduces=True),
    "reduce_scatter": Call(_reduce_scatter, _reduce_scatter_model, many=True, reduces=True),
    "reduce_scatter_tensor": Call(
        _reduce_scatter_tensor, _reduce_scatter_model, many=True, reduces=True
    ),
    "broadcast": Call(_broadcast, _broadcast_model),
    "all_gather": Call(_all_gather, _all_gather_model),
    "all_gather_into_tensor": Call(_all_gather_into_tensor, _all_gather_model),
    "gather": Call(_gather, _gather_model),
    "scatter": Call(_scatter, _scatter_model, many=True),
    "all_to_all": Call(_all_to_all, _all_to_all_model, many=True),
    "all_to_all_single": Call(_all_to_all_single, _all_to_all_model, many=True),
}


def ops(collective: str, dtype: torch.dtype) -> list[str]:
    """The contract's ops that torch.distributed passes on to a backend. Some of its calls hand on
    complex tensors as reals and refuse "prod", which reals cannot express."""
    if not COLLECTIVES[collective].reduces:
        return ["sum"]
    unsupported = (
        ["prod"] if dtype in COMPLEX and not collective.startswith("reduce_scatter") else []
    )
    return [op for op in OPS if allowed(dtype, op) and op not in unsupported]


def gloo_limitation(case: Case) -> str:
    """Why gloo cannot serve as the reference for a case; "" if it can."""
    if case.dtype in (torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, *MOVED[:-1]):
        return "refuses the dtype"
    if COLLECTIVES[case.collective].reduces:
        if case.dtype == torch.bool and case.op not in ("min", "max", "band", "bor", "bxor"):
            return "adds booleans as bytes"
        if case.dtype in INTEGERS and case.op == "avg":
            return "refuses to average integers"
        if case.dtype in COMPLEX and case.op == "prod":
            return "multiplies complex numbers as reals"
    if case.collective == "gather" and case.dtype.is_complex:
        return "refuses complex tensors"
    if case.collective == "all_to_all" and OLD_TORCH:
        return "does not take lists of tensors"
    return "" if case.layout == "contiguous" else "refuses or ignores strides"
