"""Every collective x world x dtype x op x size x layout through torch.distributed.

Each result has the bits of the one-process API. It also equals gloo's where gloo supports the case:
bit by bit for copies and integers, within one rounding per rank for floats. A dtype is one job.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import dist_cases
import pytest
import torch
import torch.distributed as dist
from dist_cases import (
    COLLECTIVES,
    LAYOUTS,
    Case,
    CaseContext,
    block,
    gloo_limitation,
    rows,
    with_layout,
)
from dist_pool import BACKEND, OURS, Pools, RankContext, pools_of_a_module
from dist_ranks import between_processes, slow_on_processes
from reference import (
    COMPLEX,
    DTYPES,
    MOVED,
    NARROW,
    assert_close,
    assert_same,
    bits,
    depends_on_order,
    short,
)
from torch import Tensor

WORLDS = (1, 2, 3, 4, 8)
SMALL = (0, 1, 7, 1023)
LARGE = 300_000  # elements; several pieces for most dtypes
OVER_MIB = {1: 1_100_003, 2: 600_007, 4: 300_007, 8: 150_001, 16: 75_011}  # item size -> elements
GLOO_COUNTS = (7, 1023)
FACTOR = 0.5  # factor of PREMUL_SUM: exact in every dtype, so the moment of rounding has no effect
_MOST = 12  # largest number of reported failures per job


@pytest.fixture(scope="module")
def pools(ranks_as: str) -> Iterator[Pools]:
    yield from pools_of_a_module(ranks_as=ranks_as, second_backend="gloo")


def cases(dtype: torch.dtype, world: int) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Yield cases with their layouts. With eight ranks, and for large cases, the layouts alternate,
    and for large cases the two sizes and (except all_reduce of few ranks) the ops: pieces are
    independent of both."""
    turn = 0
    for collective in COLLECTIVES:
        ops = dist_cases.ops(collective, dtype)
        blocks = world if COLLECTIVES[collective].many else 1
        for op in ops:
            for count in SMALL:
                turn += 1
                yield (
                    Case(collective, dtype, op, count),
                    LAYOUTS if world < 8 else two_layouts(turn),
                )
        every = collective == "all_reduce" and world < 8
        for op in ops if every or not ops else (ops[turn // 2 % len(ops)],):
            turn += 1
            count = (OVER_MIB[dtype.itemsize], LARGE)[turn % 2 if world < 8 else 0]
            yield Case(collective, dtype, op, -(-count // blocks)), two_layouts(turn)


def two_layouts(turn: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(("contiguous", LAYOUTS[turn % len(LAYOUTS)])))


def mismatch(actual: Tensor | None, wanted: Tensor | None, case: Case, close: int = 0) -> str:
    """Return the mismatch of a result, or "". `close`: the number of ranks, each of which may
    round once; 0 for equal bits."""
    if actual is None or wanted is None:
        return "" if actual is wanted else "only one of them has a result"
    if case.dtype in MOVED:  # torch does not copy all of them
        actual, wanted = bits(actual), bits(wanted)
    actual, wanted = actual.reshape(-1), wanted.reshape(-1)
    large = actual.numel() > SMALL[-1] and actual.dtype == wanted.dtype
    if large and torch.equal(raw(actual), raw(wanted)):
        return ""  # fast path for equal bits; the slower checks below treat NaNs and zeros
    try:
        if close:
            assert_close([actual], [wanted], "gloo", close)
        else:
            assert_same([actual], [wanted], "bits", case.op)
    except AssertionError as error:
        return str(error)
    return ""


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


# Ranks that are threads take turns, so they ask for the same few cases at a time.
@functools.lru_cache(maxsize=4)
def modelled(
    case: Case, world: int, root: int, tame: bool
) -> tuple[list[list[Tensor]], list[Tensor | None]]:
    """Return the inputs and the model's results of all ranks."""
    x = rows(case, world, tame)
    return x, COLLECTIVES[case.collective].model(x, case.op, root)


def sweep(me: RankContext, dtype: torch.dtype) -> tuple[int, list[str]]:
    """Run all cases of a dtype; return their number and the mismatches."""
    run, wrong = 0, []
    for case, layouts in cases(dtype, me.world):
        if not OURS and gloo_limitation(case):
            continue
        call = COLLECTIVES[case.collective]
        root = case.count % me.world
        tame = not OURS
        x, results = modelled(case, me.world, root, tame)
        wanted = results[me.rank]
        for layout in layouts if OURS else ("contiguous",):
            case_in_layout = dataclasses.replace(case, layout=layout)
            context = CaseContext(dist.group.WORLD, me.rank, me.world, root, case_in_layout)
            actual = call.run(context, x[me.rank])
            close = me.world if not OURS and depends_on_order(dtype, case.op) else 0
            why = mismatch(actual, wanted, case, close)
            wrong += [f"{case_in_layout}, root {root}: {why}"] if why else []
            run += 1
    return run, wrong


# Quick runs test, on threads, every dtype with three ranks, and some with other world sizes; on
# processes, one dtype of each kind with three ranks.
QUICK_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16)


def marks(world: int, dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    if world == 3:
        return [] if dtype in QUICK_DTYPES else [slow_on_processes]
    few = QUICK_DTYPES if world < 8 else QUICK_DTYPES[:2]
    return [slow_on_processes] if dtype in few else [pytest.mark.slow]


def in_worlds(dtypes: Iterable[torch.dtype]) -> list[Any]:
    return [
        pytest.param(w, d, marks=marks(w, d), id=f"{w}-{short(d)}") for w in WORLDS for d in dtypes
    ]


@pytest.mark.parametrize(("world", "dtype"), in_worlds((*DTYPES, *MOVED)))
def test_results_have_the_bits_of_the_one_process_api(pools, world, dtype):
    found = pools(world).run(sweep, dtype, seconds=60)
    runs = {run for run, _ in found}
    assert len(runs) == 1
    assert runs != {0} or not OURS
    report([wrong for _, wrong in found])


def report(wrong: list[list[str]]) -> None:
    lines = [f"rank {r}: {line}" for r, lines in enumerate(wrong) for line in lines]
    assert not lines, "\n".join([f"{len(lines)} wrong results", *lines[:_MOST]])


def compare_with_gloo(me: RankContext, dtype: torch.dtype) -> tuple[int, list[str]]:
    run, wrong = 0, []
    for collective in COLLECTIVES:
        for op in dist_cases.ops(collective, dtype):
            for count in GLOO_COUNTS if me.world < 8 else GLOO_COUNTS[:1]:
                case = Case(collective, dtype, op, count)
                if gloo_limitation(case):
                    continue
                call = COLLECTIVES[collective]
                mine = rows(case, me.world, tame=True)[me.rank]
                root = me.world - 1
                ours, theirs = (
                    call.run(CaseContext(group, me.rank, me.world, root, case), mine)
                    for group in (dist.group.WORLD, me.second_group)
                )
                adds = call.reduces and depends_on_order(dtype, op)
                why = mismatch(ours, theirs, case, close=me.world if adds else 0)
                wrong += [f"{case}: {why}"] if why else []
                run += 1
    return run, wrong


@between_processes("gloo has no ranks that are threads")
@pytest.mark.parametrize(("world", "dtype"), in_worlds((*DTYPES, torch.complex32)))
def test_results_equal_gloos(pools, world, dtype):
    found = pools(world).run(compare_with_gloo, dtype)
    assert all(run for run, _ in found) or gloo_limitation(Case("broadcast", dtype))
    report([wrong for _, wrong in found])


@functools.lru_cache(maxsize=4)
def scaled_sum(case: Case, world: int, factor: float) -> Tensor | None:
    scaled = [[row[0] * factor] for row in rows(case, world, tame=True)]
    return COLLECTIVES["all_reduce"].model(scaled, "sum", 0)[0]


def premultiplied(me: RankContext, dtype: torch.dtype, factor: float, as_tensor: bool) -> list[str]:
    """Check that PREMUL_SUM gives the sum of factor * x; return the mismatches."""
    scale = torch.tensor([factor], dtype=dtype) if as_tensor else factor
    op = dist._make_nccl_premul_sum(scale)
    wrong = []
    for count in (*SMALL, LARGE):
        case = Case("all_reduce", dtype, "sum", count)
        wanted = scaled_sum(case, me.world, factor)
        actual = with_layout(block(case, me.rank * me.world, tame=True), "sliced")
        dist.all_reduce(actual, op)
        exact = factor == FACTOR
        why = mismatch(actual, wanted, case, 0 if exact else 2 * me.world)
        wrong += [f"all_reduce {count}: {why}"] if why else []
        mine = block(case, me.rank * me.world, tame=True)
        shares = torch.cat([mine] * me.world)
        out = torch.empty_like(mine)
        dist.reduce_scatter_tensor(out, shares, op)
        why = mismatch(out, wanted, case, 0 if exact else 2 * me.world)
        wrong += [f"reduce_scatter {count}: {why}"] if why else []
    return wrong


PREMUL_WORLDS = [
    pytest.param(w, marks=[] if w == 3 else [slow_on_processes if w == 1 else pytest.mark.slow])
    for w in WORLDS
]


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} refuses PREMUL_SUM")
@pytest.mark.parametrize("world", PREMUL_WORLDS)
def test_premul_sum(pools, world):
    for dtype in (torch.float32, torch.float64, *NARROW[:2]):
        for factor in (FACTOR, 0.3):
            for as_tensor in (False, True):
                report(pools(world).run(premultiplied, dtype, factor, as_tensor))


def undefined_reductions(me: RankContext) -> list[str]:
    """Ops that the contract does not define raise on every rank, name op and dtype, and move no
    data."""
    wrong = []
    undefined = [(torch.float32, op) for op in ("BAND", "BOR", "BXOR")]
    undefined += [(torch.bool, "AVG"), (torch.uint16, "SUM"), (torch.float8_e8m0fnu, "MAX")]
    for dtype, op in undefined:
        x = torch.ones(5, dtype=dtype)
        for call in (
            dist.all_reduce,
            lambda t, op: dist.reduce(t, 0, op),
            lambda t, op: dist.reduce_scatter(t, [t.clone()] * me.world, op),
            lambda t, op: dist.all_reduce_coalesced([t], op),
        ):
            try:
                call(x, getattr(dist.ReduceOp, op))
                wrong.append(f"{dtype} {op} was not refused")
            except TypeError as error:
                names_op = dtype in MOVED or op.lower() in str(error)
                if not names_op or short(dtype) not in str(error):
                    wrong.append(f"{dtype} {op}: {error}")
            if not torch.equal(raw(x), raw(torch.ones(5, dtype=dtype))):
                wrong.append(f"{dtype} {op} changed the tensor")
    dist.all_reduce(torch.ones(3))
    return wrong


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} raises RuntimeError, or computes wrong results")
def test_undefined_reductions_raise(pools):
    report(pools(3).run(undefined_reductions))


def complex_reductions(me: RankContext) -> list[str]:
    """torch.distributed refuses PRODUCT and MAX of complex tensors; the group stays usable."""
    wrong = []
    for dtype in COMPLEX:
        for op in ("PRODUCT", "MAX"):
            try:
                dist.all_reduce(torch.ones(3, dtype=dtype), getattr(dist.ReduceOp, op))
                wrong.append(f"{dtype} {op} was not refused")
            except ValueError:
                pass
    dist.all_reduce(torch.ones(3))
    return wrong


def test_complex_reductions_that_torch_refuses(pools):
    report(pools(2).run(complex_reductions))
