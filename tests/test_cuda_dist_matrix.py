"""CUDA tensors through torch.distributed give the CPU's bits.

The cases are a subset of test_dist_matrix.py, alternating layouts and sizes; the results are
compared with the one-process API on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import dist_cases
import pytest
import torch
import torch.distributed as dist
from dist_cases import COLLECTIVES, LAYOUTS, Case, CaseContext, rows
from dist_pool import OURS, Caught, RankContext, backend_of, caught, fresh, pools_of_ranks
from dist_ranks import between_processes
from dist_sites import EMULATED, LARGE, REAL, cpu_by_default, is_real, site_worlds, sites
from reference import DTYPES, assert_same, short
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
pools = pytest.fixture(pools_of_ranks, scope="module")

COUNTS = (0, 1, 7, 1023)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    turn = 0
    for collective in COLLECTIVES:
        ops = dist_cases.ops(collective, dtype)
        for op in ops:
            for count in COUNTS:
                turn += 1
                for layout in dict.fromkeys(("contiguous", LAYOUTS[turn % len(LAYOUTS)])):
                    yield Case(collective, dtype, op, count, layout)
        for op in ops[-1:]:
            yield Case(collective, dtype, op, LARGE, LAYOUTS[turn % len(LAYOUTS)])


def mismatches(
    actual: Tensor | None, wanted: Tensor | None, me: RankContext, what: Any
) -> list[str]:
    if actual is None or wanted is None:
        return [] if actual is wanted else [f"{what}: only one of them has a result"]
    if actual.device.type != torch.device(me.site.device).type:
        return [f"{what}: the result is on {actual.device}"]
    try:
        op = what.op if isinstance(what, Case) else "sum"
        assert_same([actual.cpu().reshape(-1)], [wanted.reshape(-1)], "bits", op)
    except AssertionError as error:
        return [f"{what}: {error}"]
    return []


@cpu_by_default
def sweep(me: RankContext, dtype: torch.dtype) -> tuple[int, list[str]]:
    """Run all cases of a dtype; return their number and the mismatches."""
    run, wrong = 0, []
    for case in cases(dtype):
        root = case.count % me.world
        call = COLLECTIVES[case.collective]
        x = rows(case, me.world)
        wanted = call.model(x, case.op, root)[me.rank]
        context = CaseContext(dist.group.WORLD, me.rank, me.world, root, case, me.site.device)
        actual = call.run(context, [b.to(me.site.device) for b in x[me.rank]])
        wrong += mismatches(actual, wanted, me, case)
        run += 1
    return run, wrong


@cpu_by_default
def premultiplied(me: RankContext, dtype: torch.dtype) -> list[str]:
    """PREMUL_SUM by 0.5 (exact) in all_reduce and reduce_scatter_tensor; return mismatches."""
    op, wrong = dist._make_nccl_premul_sum(0.5), []
    for count in COUNTS:
        case = Case("all_reduce", dtype, "sum", count)
        x = rows(case, me.world, tame=True)
        wanted = COLLECTIVES["all_reduce"].model([[r[0] * 0.5] for r in x], "sum", 0)[me.rank]
        for layout in LAYOUTS:
            actual = dist_cases.with_layout(x[me.rank][0].to(me.site.device), layout)
            dist.all_reduce(actual, op)
            wrong += mismatches(actual, wanted, me, dataclasses.replace(case, layout=layout))
        out = x[me.rank][0].to(me.site.device)
        dist.reduce_scatter_tensor(out, torch.cat([out] * me.world), op)
        wrong += mismatches(out, wanted, me, f"reduce_scatter {count}")
    return wrong


@cpu_by_default
def in_place_blocks(me: RankContext, dtype: torch.dtype) -> list[str]:
    """All-gather with the input inside the output, and reduce-scatter the other way round."""
    wrong = []
    for count in COUNTS:
        x = [r[0] for r in rows(Case("all_gather", dtype, "sum", count), me.world)]
        whole = torch.zeros(me.world * count, dtype=dtype, device=me.site.device)
        part = whole.view(me.world, count)[me.rank]
        part.copy_(x[me.rank])
        dist.all_gather_into_tensor(whole, part)
        wrong += mismatches(whole, torch.cat(x), me, f"all_gather into itself, {count}")
        whole = torch.cat(x).to(me.site.device)
        part = whole.view(me.world, count)[me.rank]
        dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.MAX)
        wrong += mismatches(part, x[me.rank], me, f"reduce_scatter into itself, {count}")
    return wrong


# Quick runs use one dtype of each kind on emulated devices: staging moves plain bytes, which the
# host path folds.
QUICK_DTYPES = {
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e8m0fnu,
}


def dtype_marks(site: str, dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    if is_real(site) or dtype == torch.float32:
        return []
    only = between_processes("threads stage nothing, so that late devices serve for all dtypes")
    return [pytest.mark.slow] * (dtype not in QUICK_DTYPES) + [only] * (site == "eager")


def dtype_cases() -> list[Any]:
    found = [
        pytest.param(
            *place.values,
            dtype,
            id=f"{place.id}-{short(dtype)}",
            marks=[*place.marks, *dtype_marks(place.values[0], dtype)],
        )
        for place in site_worlds(*EMULATED, *REAL)
        for dtype in (*DTYPES, torch.float8_e8m0fnu)
    ]
    return found + [pytest.param("late", world, torch.float32) for world in (1, 2, 4)]


def assert_bits(pool: Any, dtype: torch.dtype) -> None:
    for run, wrong in pool.run(sweep, dtype, seconds=180.0):
        assert run > 40
        assert wrong == []


@pytest.mark.parametrize(("site", "world", "dtype"), dtype_cases())
def test_results_have_the_cpus_bits(pools, site, world, dtype):
    assert_bits(pools(world, site=site), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("site", sites("eager", *REAL, stands_in=False))
def test_eight_ranks(site):
    with fresh(8, site=site) as pool:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            assert_bits(pool, dtype)


@pytest.mark.parametrize(("site", "world"), [("", 3), *site_worlds(*EMULATED, *REAL)])
def test_premul_sum_and_in_place_blocks(pools, site, world):
    pool = pools(world, site=site)
    for dtype in (torch.float32, torch.bfloat16):
        assert pool.run(premultiplied, dtype) == [[]] * world
        assert pool.run(in_place_blocks, dtype) == [[]] * world


def invalid_calls(me: RankContext) -> tuple[list[Caught], float]:
    x, on_host = torch.ones(12), me.site.host(torch.ones(12))
    errors = [
        caught(dist.all_reduce_coalesced, [x, on_host]),
        caught(dist.all_to_all_single, on_host, x),
        caught(backend_of().allgather, [[x[:2]] * me.world], [x[:2]]),
        caught(dist.all_reduce, torch.ones(1).expand(4)),
    ]
    dist.all_reduce(x)
    dist.all_reduce(on_host)  # valid in a call without GPU tensors
    return errors, x.sum().item() + on_host.sum().item()


def mismatched_calls(me: RankContext) -> tuple[list[Caught], float]:
    last = me.rank == me.world - 1
    x, y = torch.ones(10), torch.ones(4)
    dist.all_reduce(x)
    errors = [
        caught(dist.all_reduce, torch.ones(10 + last)),
        caught(dist.broadcast, torch.ones(3), 0) if last else caught(dist.all_reduce, x),
        caught(dist.all_reduce, torch.ones(1).expand(4 if last else 1)),
    ]
    dist.all_reduce(y)
    return errors, y.sum().item()


@pytest.mark.parametrize(("site", "world"), site_worlds(*EMULATED, *REAL, stands_in=False))
def test_invalid_and_mismatched_calls_raise(pools, site, world):
    """Invalid calls are refused by each rank, mismatched calls by all; the group stays usable."""
    for errors, total in pools(world, site=site).run(invalid_calls):
        assert [e.kind for e in errors] == ["ValueError"] * 4, errors
        assert all("all in host memory or all on GPUs" in e.text for e in errors[:2]), errors
        assert total == 24.0 * world
    for errors, total in pools(world, site=site).run(mismatched_calls):
        assert [e.kind for e in errors] == ["ValueError"] * 3, errors
        assert f"rank {world - 1} called all_reduce of 11 float32" in errors[0].text
        assert f"rank {world - 1} called broadcast" in errors[1].text
        assert f"rank {world - 1} refused all_reduce" in errors[2].text
        assert total == 4.0 * world
