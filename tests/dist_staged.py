"""The distributed matrix, reduced: what tensors on devices must not change of it.

The cases are those of test_dist_matrix.py, turn by turn in layouts and sizes; the results are held
against the one-process API on the CPU, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import dist_cases
import torch
import torch.distributed as dist
from dist_cases import COLLECTIVES, LAYOUTS, Case, Side, rows
from dist_pool import Me
from dist_site import by_hand
from reference import assert_same

COUNTS = (0, 1, 7, 1023)
LARGE = 300_000  # several pieces


def cases(dtype: torch.dtype) -> Iterator[Case]:
    turn = 0
    for collective in COLLECTIVES:
        for op in dist_cases.ops(collective, dtype):
            for count in COUNTS:
                turn += 1
                for layout in dict.fromkeys(("contiguous", LAYOUTS[turn % len(LAYOUTS)])):
                    yield Case(collective, dtype, op, count, layout)
        yield Case(collective, dtype, op, LARGE, LAYOUTS[turn % len(LAYOUTS)])


@by_hand
def sweep(me: Me, dtype: torch.dtype) -> tuple[int, list[str]]:
    """How many cases this rank has run, and what was wrong."""
    device = me.site.device
    run, wrong = 0, []
    for case in cases(dtype):
        root = case.count % me.world
        call = COLLECTIVES[case.collective]
        x = rows(case, me.world)
        wanted = call.model(x, case.op, root)[me.rank]
        side = Side(dist.group.WORLD, me.rank, me.world, root, case, device)
        actual = call.run(side, [b.to(device) for b in x[me.rank]])
        why = _differs(actual, wanted, case, device)
        wrong += [f"{case}, root {root}: {why}"] if why else []
        run += 1
    return run, wrong


def _differs(
    actual: torch.Tensor | None, wanted: torch.Tensor | None, case: Case, device: str
) -> str:
    if actual is None or wanted is None:
        return "" if actual is wanted else "only one of them has a result"
    if actual.device.type != torch.device(device).type:
        return f"the result is on {actual.device}"
    try:
        assert_same([actual.cpu().reshape(-1)], [wanted.reshape(-1)], "bits", case.op)
    except AssertionError as error:
        return str(error)
    return ""


@by_hand
def premultiplied(me: Me, dtype: torch.dtype) -> list[str]:
    """PREMUL_SUM by half, which is exact, of every collective that reduces."""
    op, device = dist._make_nccl_premul_sum(0.5), me.site.device
    wrong = []
    for count in COUNTS:
        case = Case("all_reduce", dtype, "sum", count)
        x = rows(case, me.world, tame=True)
        wanted = COLLECTIVES["all_reduce"].model([[r[0] * 0.5] for r in x], "sum", 0)[me.rank]
        for layout in LAYOUTS:
            laid = dataclasses.replace(case, layout=layout)
            actual = dist_cases.lay(x[me.rank][0].to(device), layout)
            dist.all_reduce(actual, op)
            why = _differs(actual, wanted, laid, device)
            wrong += [f"{laid}: {why}"] if why else []
        out = x[me.rank][0].to(device)
        dist.reduce_scatter_tensor(out, torch.cat([out] * me.world), op)
        why = _differs(out, wanted, case, device)
        wrong += [f"reduce_scatter {count}: {why}"] if why else []
    return wrong


@by_hand
def own_parts(me: Me, dtype: torch.dtype) -> list[str]:
    """Inputs that lie inside outputs, and the other way round."""
    device = me.site.device
    wrong = []
    for count in COUNTS:
        case = Case("all_gather", dtype, "sum", count)
        x = rows(case, me.world)
        whole = torch.zeros(me.world * count, dtype=dtype, device=device)
        part = whole.view(me.world, count)[me.rank]
        part.copy_(x[me.rank][0])
        dist.all_gather_into_tensor(whole, part)
        why = _differs(whole, torch.cat([r[0] for r in x]), case, device)
        wrong += [f"all_gather into itself, {count}: {why}"] if why else []
        whole = torch.cat([r[0] for r in x]).to(device)
        part = whole.view(me.world, count)[me.rank]
        dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.MAX)
        why = _differs(part, x[me.rank][0], case, device)
        wrong += [f"reduce_scatter into itself, {count}: {why}"] if why else []
    return wrong


def report(found: list[list[str]]) -> None:
    lines = [f"rank {r}: {line}" for r, wrong in enumerate(found) for line in wrong]
    assert not lines, "\n".join([f"{len(lines)} wrong", *lines[:12]])
