"""Reference results of every collective, in plain torch on the CPU: one simple loop per promise.

Does not import pycollect, so that tests compare two independent implementations. Results are
compared bit by bit: NaN equals NaN, and -0.0 differs from +0.0 (except after `min` and `max`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WIDE = (torch.float64, torch.float32)
NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*WIDE, *NARROW, *INTEGERS, torch.bool, *COMPLEX)
MOVED = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
MOVED += (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex32)  # never reduced
OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor")
BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOGICAL = {
    "sum": torch.logical_or,
    "max": torch.logical_or,
    "bor": torch.logical_or,
    "prod": torch.logical_and,
    "min": torch.logical_and,
    "band": torch.logical_and,
    "bxor": torch.logical_xor,
}
_BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
_EXTREMA = {"min": torch.minimum, "max": torch.maximum}


def allowed(dtype: torch.dtype, op: str) -> bool:
    """Whether the contract defines this reduction."""
    if dtype not in DTYPES:
        return False
    if dtype == torch.bool:
        return op != "avg"
    if dtype in INTEGERS:
        return True
    return op not in _BITWISE and not (dtype in COMPLEX and op in _EXTREMA)


def short(value: object) -> str:
    """A short test id: "float32" for torch.float32."""
    return str(value).removeprefix("torch.")


# --- inputs ---------------------------------------------------------------------------------------


def randoms(
    world: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0, tame: bool = False
) -> list[Tensor]:
    """One random tensor per rank. Unless tame: signed zeros, infinities, NaN, subnormals, extreme
    values, and mixed magnitudes, so that the order of additions changes the bits. Tame floats lie
    in [0.75, 1.25], so that every order gives nearly the same; integers and bools are arbitrary.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_random(tuple(shape), dtype, generator, tame) for _ in range(world)]


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, tame: bool
) -> Tensor:
    if dtype not in DTYPES:
        return _random(shape, BITS_OF[dtype.itemsize], generator, tame).view(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        whole = torch.randint(-(2**62), 2**62, shape, generator=generator) * 2
        whole += torch.rand(shape, generator=generator) < 0.9  # mostly odd: products stay nonzero
        extreme = torch.rand(shape, generator=generator) < 0.05
        return torch.where(extreme, limits.min, whole).to(dtype)
    if dtype in COMPLEX:
        parts = _random((*shape, 2), torch.float32, generator, tame).to(dtype.to_real())
        return torch.view_as_complex(parts)
    if tame:
        return (torch.rand(shape, generator=generator) * 0.5 + 0.75).to(dtype)
    limits = torch.finfo(dtype)
    spread = torch.rand(shape, generator=generator, dtype=torch.float64) * 12 - 8
    mixed = torch.randn(shape, generator=generator, dtype=torch.float64) * torch.exp2(spread)
    infinity, tiny = float("inf"), limits.smallest_normal
    special = [0.0, -0.0, infinity, -infinity, float("nan"), limits.max, limits.min]
    special += [tiny / 2, -tiny / 4, 1.0, -1.0, 3e7, -3e7]
    pick = torch.randint(len(special), shape, generator=generator)
    picked = torch.tensor(special, dtype=torch.float64)[pick]
    return torch.where(torch.rand(shape, generator=generator) < 0.15, picked, mixed).to(dtype)


def place(values: Tensor, layout: str) -> Tensor:
    """Copy the values into new memory of a layout; memory around a view is filled, see `around`."""
    shape = list(values.shape)
    if layout == "contiguous" or not shape:
        return values.clone(memory_format=torch.contiguous_format)
    if layout == "misaligned":
        view = _filled([values.numel() + 5], values.dtype)[3 : 3 + values.numel()].view(shape)
    elif layout == "transposed":
        view = _filled(shape[::-1], values.dtype).permute(*range(len(shape))[::-1])
    elif layout == "columns":
        view = _filled([*shape[:-1], shape[-1] + 2], values.dtype)[..., 1 : 1 + shape[-1]]
    else:
        assert layout == "every_other"
        view = _filled([*shape[:-1], 2 * shape[-1] + 1], values.dtype)[..., 1::2]
    return view.copy_(values)


LAYOUTS = ("contiguous", "misaligned", "transposed", "columns", "every_other")


def _filled(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = int(torch.Size(shape).numel())
    return torch.ones(count * dtype.itemsize, dtype=torch.uint8).view(dtype).clone().view(*shape)


def as_bits(tensor: Tensor) -> Tensor:
    """The tensor as integers if torch does not copy, join or fill all of its type."""
    return tensor.view(BITS_OF[tensor.itemsize]) if tensor.dtype in MOVED else tensor


def whole_memory(tensor: Tensor) -> Tensor:
    """The bytes of the tensor's storage."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def viewed_as(whole: Tensor, tensor: Tensor) -> Tensor:
    """The part of a copy of `whole_memory` that the tensor is of the original."""
    count = whole.numel() // tensor.itemsize
    typed = whole.as_strided((count * tensor.itemsize,), (1,)).view(tensor.dtype)
    view = typed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


def surrounding_bytes(view: Tensor) -> Tensor:
    """The bytes of a view's storage, with those of the view zeroed; none if it has all of them."""
    whole = whole_memory(view)
    if view.numel() * view.itemsize == whole.numel():
        return whole[:0].cpu()
    copy = whole.clone()
    as_bits(viewed_as(copy, view)).zero_()
    return copy.cpu()


# --- the contract ---------------------------------------------------------------------------------


Step = Callable[[Any, Any], Any]


def tree(values: Sequence[Any], step: Step) -> Any:
    """The balanced tree: the left operand is that of the largest power of two of values below."""
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return step(tree(values[:half], step), tree(values[half:], step))


def fold(tensors: Sequence[Tensor], op: str, order: str = "rank") -> Tensor:
    """((x0 op x1) op x2) op ..., or the tree, in the contract's accumulator type, rounded once."""
    dtype, world = tensors[0].dtype, len(tensors)
    combined = functools.partial(tree if order == "tree" else _left, step=_step(dtype, op))
    if dtype in COMPLEX:
        re, im = combined([torch.view_as_real(x).unbind(-1) for x in tensors])
        scale = 1 / world if op == "avg" else 1
        return torch.view_as_complex(torch.stack([re * scale, im * scale], -1))
    acc = combined([x.float() if dtype in NARROW else x.clone() for x in tensors])
    if op == "avg":
        floating = dtype.is_floating_point
        acc = acc * (1 / world) if floating else torch.div(acc, world, rounding_mode="trunc")
    return acc.to(dtype)


def left_fold(tensors: Sequence[Tensor], op: str) -> Tensor:
    return fold(tensors, op)


def _left(values: Sequence[Any], step: Step) -> Any:
    return functools.reduce(step, values)


def _step(dtype: torch.dtype, op: str) -> Step:
    if dtype in COMPLEX:
        return _complex_product if op == "prod" else lambda x, y: (x[0] + y[0], x[1] + y[1])
    if dtype == torch.bool:
        return _LOGICAL[op]
    if op in ("sum", "avg"):
        return torch.add
    return torch.mul if op == "prod" else (_BITWISE | _EXTREMA)[op]


def _complex_product(x: Any, y: Any) -> Any:
    """Of real and imaginary parts; the loop tails of torch's own may contract into FMAs."""
    (a, b), (c, d) = x, y
    return a * c - b * d, a * d + b * c


IN_PLACE = ("all_reduce", "reduce", "broadcast")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
COLLECTIVES = (*IN_PLACE, "all_gather", "reduce_scatter", "all_to_all")


def expected(
    collective: str,
    tensors: Sequence[Tensor],
    op: str = "sum",
    root: int = 0,
    dim: int = 0,
    order: str = "rank",
) -> list[Tensor]:
    """The result of every rank."""
    ranks = range(len(tensors))
    folded = fold(tensors, op, order) if collective in REDUCING else None
    if collective == "all_reduce":
        return [folded for _ in ranks]
    if collective == "reduce":
        return [folded if r == root else tensors[r].clone() for r in ranks]
    if collective == "broadcast":
        return [tensors[root].clone() for _ in ranks]
    if collective == "all_gather":
        return [torch.cat(list(tensors), dim) for _ in ranks]
    if collective == "reduce_scatter":
        return list(folded.tensor_split(len(tensors), dim))
    assert collective == "all_to_all"
    parts = [t.tensor_split(len(tensors), dim) for t in tensors]
    return [torch.cat([row[r] for row in parts], dim) for r in ranks]


# --- comparisons ----------------------------------------------------------------------------------


def bits(t: Tensor, zeros_equal: bool = False) -> Tensor:
    """The bits of every real number as integers, with one pattern for all NaNs."""
    if t.dtype not in DTYPES:
        return t.view(BITS_OF[t.element_size()])
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    t = torch.view_as_real(t) if t.is_complex() else t
    if not t.is_floating_point():
        return t
    whole = t.clone().view(BITS_OF[t.element_size()])
    wide = t.float() if t.dtype in NARROW else t
    whole[wide.isnan()] = 255 if whole.dtype == torch.uint8 else -1
    if zeros_equal:
        whole[wide == 0] = 0
    return whole


def assert_same(
    actual: Sequence[Tensor], wanted: Sequence[Tensor], why: object = "", op: str = ""
) -> None:
    """Assert equal shapes, dtypes and bits, rank by rank."""
    assert len(actual) == len(wanted), f"{why}: {len(actual)} results for {len(wanted)} ranks"
    for rank, (a, w) in enumerate(zip(actual, wanted, strict=True)):
        where = f"{why}: rank {rank}"
        assert isinstance(a, Tensor), f"{where}: {type(a)}"
        assert (a.shape, a.dtype) == (w.shape, w.dtype), f"{where}: {a.shape} {a.dtype}"
        if a.dtype not in DTYPES:
            a, w = bits(a), bits(w)
        zeros_equal = op in _EXTREMA
        if not torch.equal(bits(a, zeros_equal), bits(w, zeros_equal)):
            wrong = (bits(a, zeros_equal) != bits(w, zeros_equal)).flatten().nonzero().flatten()
            flat = [
                (torch.view_as_real(t) if t.is_complex() else t).flatten()[wrong[:3]].tolist()
                for t in (a.contiguous(), w.contiguous())
            ]
            message = f"{where}: {len(wrong)} differ, first at {wrong[:3].tolist()}: {flat}"
            raise AssertionError(message)


def assert_close(
    actual: Sequence[Tensor], wanted: Sequence[Tensor], why: object = "", world: int = 0
) -> None:
    """Assert equality within one rounding error per rank, as another order, or rounding at every
    hop, may cause."""
    assert len(actual) == len(wanted), why
    for a, w in zip(actual, wanted, strict=True):
        assert (a.shape, a.dtype) == (w.shape, w.dtype), why
        limits = torch.finfo(w.dtype)
        wide = torch.complex128 if w.is_complex() else torch.float64
        rtol, atol = limits.eps * (world or len(wanted)), limits.smallest_normal
        torch.testing.assert_close(a.to(wide), w.to(wide), rtol=rtol, atol=atol, msg=str(why))


def depends_on_order(dtype: torch.dtype, op: str) -> bool:
    """Whether another order of the same operands can give other bits."""
    return op in ("sum", "avg", "prod") and (dtype.is_floating_point or dtype.is_complex)
