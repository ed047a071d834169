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
from dist_rank import OLD_TORCH
from reference import COMPLEX, DTYPES, MOVED, OPS, allowed, as_bits
from torch import Tensor

import pycollect as pc

TORCH_OPS = dict(
    zip(OPS, ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"), strict=True)
)
LARGE = -1  # in place of a count: more than a MiB, which is several pieces between processes
COUNTS = (0, 1, 7, 35, 1023, LARGE)
LAYOUTS = (*ref.LAYOUTS, "channels_last")
ROOTS = ("first", "middle", "last")
ORDERS = ("rank", "tree")
_PERIOD = 1021  # elements of the pattern; prime, so data shifted by a piece or a row never matches

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
# gloo copies between a tensor and itself, and in old torch it does not take lists in all_to_all.
OF_GLOO = tuple(c for c in OF_RANKS if c not in (*INSIDE, *["all_to_all"] * OLD_TORCH))
OF_LISTS = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "broadcast_coalesced"),
    *("all_gather", "reduce_scatter", "all_to_all", "tree_sum"),
)
OF_ONE_LIST = (*OF_LISTS, "gather", "scatter", "replicate", "copy_")  # not on emulated GPUs
WITH_OUT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "copy_")


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
    order: str = "rank"

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
        """Two dims, except that a channels-last tensor has four. Blocks are parts of dim 0. From 35
        elements on, no layout is another one's memory."""
        count = self.count
        if count == LARGE:
            count = 7 * (1_150_000 // self.dtype.itemsize // blocks // 7 | 1)
        first = next((n for n in (31, 7, 5, 4, 3, 2) if count % n == 0), 1)
        if "channels_last" in (self.layout, self.into):
            return (blocks, first, 1, count // first)
        return (blocks * first, count // first)

    @property
    def passed_algorithm(self) -> str | None:
        """None in place of an algorithm that tree order refuses."""
        if self.order == "rank" or self.algorithm is None:
            return self.algorithm
        collective = self.collective.removesuffix("_coalesced")
        return self.algorithm if self.algorithm in exact_algorithms(collective) else None

    def exact(self, world: int) -> bool:
        """Whether the bits are guaranteed: by the default algorithm, by exact ones and, for wide
        dtypes, by native ones."""
        if self.algorithm is None or world == 1 or self.order == "tree":
            return True
        if not self.reduces or not ref.depends_on_order(self.dtype, self.op):
            return True
        collective = self.collective.removesuffix("_coalesced")
        order = pc.plan(collective, world, algorithm=self.algorithm).order
        return order == "exact" or (order == "native" and self.dtype not in ref.NARROW)


@functools.cache
def exact_algorithms(collective: str) -> tuple[str, ...]:
    names = pc.algorithms(collective)
    return tuple(a for a in names if pc.plan(collective, 8, algorithm=a).order == "exact")


# --- drawing cases --------------------------------------------------------------------------------

Axes = dict[str, tuple[Any, ...]]


def axes_of_lists(collective: str, op: str) -> Axes:
    coalesced = collective.endswith("_coalesced")
    named = collective.removesuffix("_coalesced") if collective != "broadcast_coalesced" else ""
    algorithms = pc.algorithms(named) if named in ref.COLLECTIVES and named != "all_to_all" else []
    outputs = ("", "contiguous", "misaligned") if collective in WITH_OUT else ("",)
    outputs = LAYOUTS[:-1] if collective == "copy_" else outputs
    whole = collective in ("replicate", "copy_", "tree_sum")
    in_place = collective in ref.IN_PLACE or coalesced or whole
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
        "order": ORDERS if collective in REDUCING else ORDERS[:1],
    }


NO_WORK = (
    "gather",
    "replicate",
    "broadcast_coalesced",
    "tree_sum",
)  # they have no argument async_op


def axes_of_emulated_lists(collective: str, op: str) -> Axes:
    """Without large counts: the emulated kernels are slow, and treat them as they do small ones."""
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
        "order": ORDERS if collective in REDUCING else ORDERS[:1],
    }


def axes_of_gloo(collective: str, op: str) -> Axes:
    """The axes of ranks, as far as gloo defines them with the same meaning: it refuses or ignores
    strides, adds booleans as bytes, and multiplies complex numbers as reals."""
    axes, dense = axes_of_ranks(collective, op), LAYOUTS[:2]
    refused = {torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, *MOVED[:-1]}
    if collective in REDUCING:
        refused |= {torch.bool} if op in ("sum", "prod", "avg") else set()
        refused |= {*ref.INTEGERS} if op == "avg" else set()
        refused |= {*COMPLEX} if op == "prod" else set()
    elif collective == "gather":
        refused |= {*COMPLEX, torch.complex32}
    return axes | {
        "dtype": tuple(d for d in axes["dtype"] if d not in refused),
        "count": COUNTS[1:-1],
        "layout": dense,
        "into": dense if axes["into"] != ("",) else ("",),
        "order": ORDERS[:1],
    }


def _dtypes(collective: str, op: str) -> tuple[torch.dtype, ...]:
    if collective == "tree_sum":
        return DTYPES
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
    domains = {call: values for call, values in domains.items() if values["dtype"]}
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
            if chosen["count"] or any(axis == "count" for axis, _ in pair):
                missing.pop(pair, None)  # no elements show nothing but that it works
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
    if axis == "count":  # large cases are slow, and empty ones show little
        values = [value for value in values if value not in (0, LARGE)]

    def new_pairs(value: Any) -> tuple[int, float]:
        pairs = [((axis, value), other) for other in chosen.items()]
        return sum(p in missing or p[::-1] in missing for p in pairs), pick.random()

    return max(values, key=new_pairs)


def every_fold(world: int) -> Iterator[Case]:
    """Every reduction x algorithm x dtype x op of lists."""
    for collective, op in calls(("all_reduce", "reduce", "reduce_scatter")):
        axes = axes_of_lists(collective, op)
        for algorithm, dtype in itertools.product(axes["algorithm"], axes["dtype"]):
            yield Case(collective, op, dtype, 35 + world, algorithm=algorithm)
        for algorithm, dtype in itertools.product(exact_algorithms(collective), axes["dtype"]):
            yield Case(collective, op, dtype, 99 + world, algorithm=algorithm, order="tree")


def every(of: str, dtype: torch.dtype) -> Iterator[Case]:
    """Every collective x op x count x layout of a dtype, with random values of the other axes. A
    large count, which is slow, has a third of the layouts."""
    collectives, axes = KINDS[of]
    for call in calls(collectives):
        domain = axes(*call)
        if dtype not in domain.pop("dtype"):
            continue
        for count, layout in itertools.product(domain.pop("count"), domain.pop("layout")):
            pick = random.Random(f"{call} {dtype} {count} {layout}")
            rest = {axis: pick.choice(values) for axis, values in domain.items()}
            if count != LARGE or pick.random() < 1 / 3:
                yield Case(*call, dtype, count, layout, **rest)


KINDS: dict[str, tuple[Sequence[str], Callable[[str, str], Axes]]] = {
    "lists": (OF_ONE_LIST, axes_of_lists),
    "emulated lists": (OF_LISTS, axes_of_emulated_lists),
    "ranks": (OF_RANKS, axes_of_ranks),
    "gloo": (OF_GLOO, axes_of_gloo),
}


# --- values ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def _pattern(dtype: torch.dtype, seed: int) -> Tensor:
    return ref.randoms(1, (_PERIOD,), dtype, seed=seed)[0]


@functools.lru_cache(maxsize=512)
def _sparse_pattern(dtype: torch.dtype, rank: int, world: int, neutral: int) -> Tensor:
    """Floats whose sum and product are exact in any order and in any type: of each element two
    ranks have the same small power of two, the others the neutral element."""
    generator = torch.Generator().manual_seed(dtype.itemsize)
    parts = (_PERIOD, 2) if dtype.is_complex else (_PERIOD,)
    powers = torch.tensor([0.5, 1.0, 2.0, -1.0, -2.0])
    values = powers[torch.randint(len(powers), parts, generator=generator)]
    values = torch.view_as_complex(values) if dtype.is_complex else values
    has = (torch.arange(_PERIOD) + rank) % world < 2
    return torch.where(has, values, torch.tensor(neutral).to(values.dtype)).to(dtype)


def _repeated(pattern: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values that repeat one pattern, so that large ones are cheap."""
    count = int(torch.Size(shape).numel())
    return pattern.repeat(count // _PERIOD + 1)[:count].view(shape)


def filler(case: Case, blocks: int) -> Tensor:
    """A block with values that no result has."""
    whole = _repeated(_pattern(case.dtype, 999), case.shape(blocks))
    return whole[: len(whole) // blocks]


@functools.lru_cache(maxsize=4)  # ranks that are threads take turns with the same few cases
def modelled(
    case: Case, world: int, blocks: int, sparse: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The input tensor of every rank, and its result; None where a rank has none. "sparse": the
    result of a reduction does not depend on its order."""
    sparse &= case.reduces and (case.dtype.is_floating_point or case.dtype.is_complex)
    neutral = 1 if case.op == "prod" else 0
    inputs = [
        _repeated(
            _sparse_pattern(case.dtype, r, world, neutral) if sparse else _pattern(case.dtype, r),
            case.shape(blocks),
        )
        for r in range(world)
    ]
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
    if name == "tree_sum":
        return [ref.fold(inputs, "sum", "tree"), *[None] * (world - 1)]
    name = name.removesuffix("_coalesced")
    return list(ref.expected(name, inputs, case.op, root, case.dim, case.order))


def placed(values: Tensor, layout: str) -> Tensor:
    """Copy the values into new memory of a layout."""
    if values.dtype in MOVED:
        return placed(as_bits(values), layout).view(values.dtype)
    if layout == "channels_last":
        return values.clone(memory_format=torch.channels_last)
    return ref.place(values, layout)


def zeros(like: Tensor, layout: str) -> Tensor:
    return placed(torch.zeros_like(as_bits(like)).view(like.dtype), layout)


def difference(actual: Any, wanted: Tensor | None, case: Case, close: int = 0) -> str:
    """How a result differs, or "". `close`: the number of ranks, each of which may round once."""
    if actual is None or wanted is None:
        return "" if actual is wanted else "only one of them has a result"
    if (actual.shape, actual.dtype) != (wanted.shape, wanted.dtype):
        return f"{actual.dtype} {tuple(actual.shape)} instead of {tuple(wanted.shape)}"
    if actual.numel() > COUNTS[-2] and torch.equal(_bytes(actual), _bytes(wanted)):
        return ""  # quick for large tensors; what follows treats NaNs and zeros
    try:
        if close:
            ref.assert_close([actual], [wanted], "not close", close)
        else:
            ref.assert_same([actual], [wanted], "bits", case.op if case.reduces else "")
    except AssertionError as error:
        return str(error) or "different"
    return ""


def _bytes(tensor: Tensor) -> Tensor:
    return as_bits(tensor).contiguous().view(torch.uint8)
