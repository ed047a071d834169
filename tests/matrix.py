"""The conformance matrix: one table of cases, and the ranks ("sites") that run them.

A case names a collective and a value for each axis: dtype, op, size, layout, root, outputs, and so
on. `drawn` returns cases in which any two values that can meet do; `every` returns the product of
the axes that matter most. A site runs a case and returns how the results differ from those of
reference.py, or "". `Lists` calls pycollect with a tensor of every rank; `rank_differs` is the job
of one rank of torch.distributed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import reference as ref
import torch
from reference import COMPLEX, DTYPES, MOVED, OPS, allowed
from torch import Tensor

import pycollect as pc

TORCH_OPS = dict(
    zip(OPS, ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"), strict=True)
)
LARGE = -1  # in place of a count: more than a MiB, which is several pieces between processes
COUNTS = (0, 1, 7, 24, 1023, LARGE)
LAYOUTS = (*ref.LAYOUTS, "channels_last")
ROOTS = ("first", "middle", "last")
_PERIOD = 1021  # elements of the pattern; prime, so data shifted by a piece or a row never matches
FILLER = 999  # seed of values that outputs have before the call

ROOTED = ("reduce", "broadcast", "gather", "scatter")
REDUCING = (*ref.REDUCING, "all_reduce_coalesced", "reduce_scatter_tensor", "reduce_scatter_inside")
# Between ranks, an input has a block for each of them.
MANY = ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_inside")
MANY += ("all_to_all", "all_to_all_single", "scatter")

# Between ranks, calls with another form of arguments than the collective whose values they have.
# "inside": the block is a part of the tensor of all blocks, as input or as output.
SAME_AS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_inside": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_inside": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
INSIDE = ("all_gather_inside", "reduce_scatter_inside")
ONE_TENSOR = ("all_reduce", "all_reduce_coalesced", "reduce", "broadcast")
OF_RANKS = (
    *ONE_TENSOR,
    *("gather", "scatter", "all_gather", "reduce_scatter", "all_to_all", *SAME_AS),
)
OF_LISTS = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "broadcast_coalesced"),
    *("all_gather", "reduce_scatter", "all_to_all"),
)
OF_ONE_LIST = (*OF_LISTS, "gather", "scatter", "replicate", "copy_")  # not on emulated GPUs
WITH_OUT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


@dataclasses.dataclass(frozen=True)
class Case:
    collective: str
    op: str
    dtype: torch.dtype
    count: int = 7  # elements of a rank's tensor; between ranks, of each of its blocks
    layout: str = "contiguous"
    root: str = "first"
    into: str = ""  # layout of the outputs that the caller passes; "": it passes none
    async_op: bool = False
    dim: int = 0
    algorithm: str | None = None

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return " ".join(
            str(v) if name in ("collective", "op", "dtype") else f"{name}={v!r}"
            for name, v in values.items()
            if v != defaults[name]
        )

    @property
    def reduces(self) -> bool:
        return self.collective in REDUCING

    def root_of(self, world: int) -> int:
        return {"first": 0, "middle": world // 2, "last": world - 1}[self.root]

    def shape(self, blocks: int = 1) -> tuple[int, ...]:
        """Two dims, except that a channels-last tensor has four. Blocks are parts of dim 0."""
        count = self.count
        if count == LARGE:
            count = 7 * (1_150_000 // self.dtype.itemsize // blocks // 7 | 1)
        first = next((n for n in (31, 7, 5, 4, 3, 2) if count % n == 0), 1)
        pair = (blocks * first, count // first)
        four = "channels_last" in (self.layout, self.into)
        return (pair[0], 1, pair[1], 1) if four else pair

    def exact(self, world: int) -> bool:
        """Whether the bits are guaranteed: by the default algorithm, by exact ones and, for wide
        dtypes, by native ones."""
        if self.algorithm is None or world == 1:
            return True
        if not self.reduces or not ref.depends_on_order(self.dtype, self.op):
            return True
        collective = self.collective.removesuffix("_coalesced")
        order = pc.plan(collective, world, algorithm=self.algorithm).order
        return order == "exact" or (order == "native" and self.dtype not in ref.NARROW)


# --- drawing cases --------------------------------------------------------------------------------

Axes = dict[str, tuple[Any, ...]]


def axes_of_lists(collective: str, op: str) -> Axes:
    coalesced = collective.endswith("_coalesced")
    named = collective.removesuffix("_coalesced") if collective != "broadcast_coalesced" else ""
    algorithms = pc.algorithms(named) if named in ref.COLLECTIVES and named != "all_to_all" else []
    outputs = ("", "contiguous", "misaligned") if collective in WITH_OUT else ("",)
    in_place = collective in ref.IN_PLACE or coalesced or collective in ("replicate", "copy_")
    return {
        "dtype": _dtypes(collective, op),
        "count": COUNTS,
        "layout": LAYOUTS,
        "root": ROOTS
        if collective in ("reduce", "broadcast", "broadcast_coalesced")
        else ROOTS[:1],
        "into": outputs,
        "async_op": (False,) if collective in NO_WORK else (False, True),
        "dim": (0,) if in_place else (0, 1, -1),
        "algorithm": (None, *algorithms),
    }


NO_WORK = ("gather", "replicate", "broadcast_coalesced")  # they have no argument async_op


def axes_of_emulated_lists(collective: str, op: str) -> Axes:
    """Without large counts, because the emulated kernels are slow; larger ones end no other way."""
    return axes_of_lists(collective, op) | {"count": COUNTS[:-1]}


def axes_of_ranks(collective: str, op: str) -> Axes:
    """Some calls of torch.distributed hand on complex tensors as reals, and refuse "prod" then."""
    dtypes = _dtypes(collective, op)
    if op == "prod" and not collective.startswith("reduce_scatter"):
        dtypes = tuple(d for d in dtypes if d not in COMPLEX)
    return {
        "dtype": dtypes,
        "count": COUNTS,
        "layout": LAYOUTS[:2] if collective in INSIDE else LAYOUTS,
        "into": LAYOUTS if collective not in (*ONE_TENSOR, *INSIDE) else ("",),
        "root": ROOTS if collective in ROOTED else ROOTS[:1],
        "async_op": (False, True),
    }


def _dtypes(collective: str, op: str) -> tuple[torch.dtype, ...]:
    if collective not in REDUCING:
        return (*DTYPES, *MOVED)
    return tuple(d for d in DTYPES if allowed(d, op))


def calls(collectives: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each collective, with each op if it reduces."""
    for collective in collectives:
        for op in OPS if collective in REDUCING else ("sum",):
            yield collective, op


@functools.cache
def drawn(of: str, seed: int) -> tuple[Case, ...]:
    """Cases in which any two values of two axes meet that can; the same for the same seed.

    As D. M. Cohen et al., "The AETG system" (1997): each case begins with a pair that has not met,
    and then takes the values one by one that make the most new pairs.
    """
    collectives, axes = KINDS[of]
    domains = {call: axes(*call) for call in calls(collectives)}
    missing = dict.fromkeys(
        pair
        for call, values in domains.items()
        for pair in itertools.combinations(_cells({"call": (call,), **values}), 2)
        if pair[0][0] != pair[1][0]
    )
    pick, found = random.Random(seed), []
    while missing:
        pair = next(iter(missing))
        fits = [c for c in domains if all(v in _domain(domains, c, axis) for axis, v in pair)]
        call = pick.choice(fits)
        chosen = dict(pair) | {"call": call}
        for axis in pick.sample(sorted(domains[call]), len(domains[call])):
            if axis not in chosen:
                chosen[axis] = _best(axis, domains[call][axis], chosen, missing, pick)
        for pair in itertools.combinations(_in_order(chosen, domains[call]), 2):
            missing.pop(pair, None)
        del chosen["call"]
        found.append(Case(*call, **chosen))
    return tuple(found)


def _cells(axes: Axes) -> list[tuple[str, Any]]:
    return [(axis, value) for axis, values in axes.items() for value in values]


def _domain(domains: dict[Any, Axes], call: Any, axis: str) -> tuple[Any, ...]:
    return (call,) if axis == "call" else domains[call][axis]


def _in_order(chosen: dict[str, Any], axes: Axes) -> list[tuple[str, Any]]:
    return [(axis, chosen[axis]) for axis in ("call", *axes) if axis in chosen]


def _best(axis: str, values: Any, chosen: dict[str, Any], missing: Any, pick: Any) -> Any:
    def new_pairs(value: Any) -> tuple[int, bool, float]:
        sides = [((axis, value), other) for other in chosen.items()]
        new = sum(a in missing or b in missing for a, b in ((s, s[::-1]) for s in sides))
        return new, value != LARGE, pick.random()  # large cases are slow

    return max(values, key=new_pairs)


def every(of: str, dtype: torch.dtype) -> Iterator[Case]:
    """Every collective x op x count x layout of a dtype; the other axes take turns. A large count
    has every layout, but not in combination with every op."""
    collectives, axes = KINDS[of]
    turn = 0
    for call in calls(collectives):
        domain = axes(*call)
        if dtype not in domain.pop("dtype"):
            continue
        for count, layout in itertools.product(domain.pop("count"), domain.pop("layout")):
            turn += 1
            if count == LARGE and turn % 4:
                continue
            rest = {axis: values[turn % len(values)] for axis, values in domain.items()}
            yield Case(*call, dtype, count, layout, **rest)


KINDS: dict[str, tuple[Sequence[str], Callable[[str, str], Axes]]] = {
    "lists": (OF_ONE_LIST, axes_of_lists),
    "emulated lists": (OF_LISTS, axes_of_emulated_lists),
    "ranks": (OF_RANKS, axes_of_ranks),
}


# --- values ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def _pattern(dtype: torch.dtype, seed: int, tame: bool) -> Tensor:
    return ref.randoms(1, (_PERIOD,), dtype, seed=seed, tame=tame)[0]


def block_of(case: Case, seed: int, tame: bool = False, blocks: int = 1) -> Tensor:
    """A rank's values; they repeat one pattern, so that large ones are cheap."""
    shape = case.shape(blocks)
    count = int(torch.Size(shape).numel())
    return _pattern(case.dtype, seed, tame).repeat(count // _PERIOD + 1)[:count].view(shape)


@functools.lru_cache(maxsize=4)  # ranks that are threads take turns with the same few cases
def modelled(
    case: Case, world: int, blocks: int, tame: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The input tensor of every rank, and its result; None where a rank has none."""
    inputs = [block_of(case, r, tame, blocks) for r in range(world)]
    results = wanted(case, [as_bits(t) for t in inputs])
    return inputs, [w if w is None else w.view(case.dtype) for w in results]


def wanted(case: Case, inputs: list[Tensor]) -> list[Any]:
    """The result of every rank, by reference.py."""
    world, name = len(inputs), SAME_AS.get(case.collective, case.collective)
    root, ranks = case.root_of(world), range(world)
    if name == "gather":
        return [torch.cat(inputs, case.dim) if r == root else None for r in ranks]
    if name == "scatter":
        return list(inputs[root].tensor_split(world, case.dim))
    if name in ("replicate", "copy_", "broadcast_coalesced"):
        return [inputs[root]] * world
    name = name.removesuffix("_coalesced")
    return list(ref.expected(name, inputs, case.op, root, case.dim))


def placed(values: Tensor, layout: str) -> Tensor:
    """Copy the values into new memory of a layout."""
    if values.dtype in MOVED:
        return placed(as_bits(values), layout).view(values.dtype)
    if layout == "channels_last":
        return values.clone(memory_format=torch.channels_last)
    return ref.place(values, layout)


def as_bits(tensor: Tensor) -> Tensor:
    """The tensor as integers if torch does not copy, join or fill all of its type."""
    return tensor.view(ref.BITS_OF[tensor.itemsize]) if tensor.dtype in MOVED else tensor


def zeros(like: Tensor, layout: str) -> Tensor:
    return placed(torch.zeros_like(as_bits(like)).view(like.dtype), layout)


def whole_memory(tensor: Tensor) -> Tensor:
    """The tensor's storage as integers of its item size; of complex128, as those of its parts."""
    dtype = ref.BITS_OF[min(tensor.itemsize, 8)]
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())


def viewed_as(whole: Tensor, tensor: Tensor) -> Tensor:
    """The part of a copy of `whole_memory` that the tensor is of the original."""
    typed = whole.view(tensor.dtype)
    return typed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def surroundings(tensor: Tensor) -> Tensor | None:
    """The memory around a view, as integers; None if the tensor has all of its memory."""
    whole = whole_memory(tensor)
    if tensor.numel() * tensor.itemsize == whole.numel() * whole.itemsize:
        return None
    copy = whole.clone()
    viewed_as(copy, tensor).view(ref.BITS_OF.get(tensor.itemsize, tensor.dtype)).zero_()
    return copy


def difference(actual: Any, wanted: Tensor | None, case: Case, close: int = 0) -> str:
    """How a result differs, or "". `close`: the number of ranks, each of which may round once."""
    if actual is None or wanted is None:
        return "" if actual is wanted else "only one of them has a result"
    if actual.shape != wanted.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(wanted.shape)}"
    if actual.numel() > COUNTS[-2] and torch.equal(_bytes(actual), _bytes(wanted)):
        return ""  # quick for large tensors; what follows treats NaNs and zeros
    try:
        if close:
            ref.assert_close([actual], [wanted], "", close)
        else:
            ref.assert_same([actual], [wanted], "", case.op if case.reduces else "")
    except AssertionError as error:
        return str(error)
    return ""


def _bytes(tensor: Tensor) -> Tensor:
    return as_bits(tensor).contiguous().view(torch.uint8)
