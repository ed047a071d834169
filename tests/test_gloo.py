"""Every list collective against torch.distributed: W gloo processes give the same results.

Exact for copies, integers, booleans, minima and maxima; floats within the rounding of gloo's own
order. All cases of all worlds run in one set of processes, with a time limit.
"""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
from gloo_worker import ROOT, WORLDS, Case, uneven, work
from reference import COMPLEX, INTEGERS, OPS, assert_close, assert_same, short

import pycollect as pc

SECONDS = 100
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = tuple(d for d in INTEGERS if d != torch.int16)  # gloo has no int16 and no 8-bit floats
BOOL_OPS = ("min", "max", "band", "bor", "bxor")  # gloo adds booleans as bytes
BITWISE = ("band", "bor", "bxor")


def gloo_supports(dtype, op):
    """True if gloo defines op for dtype with the same meaning."""
    if dtype in FLOATS:
        return op not in BITWISE
    if dtype in WHOLE:
        return op != "avg"
    return op in BOOL_OPS if dtype == torch.bool else op in ("sum", "avg")


DTYPES = (*FLOATS, *WHOLE, torch.bool, *COMPLEX)
COPIES = ("broadcast", "all_gather", "all_to_all", "all_to_all_v", "scatter", "gather")
CASES = [
    Case(collective, dtype, op)
    for collective in ("all_reduce", "reduce", "reduce_scatter")
    for dtype in DTYPES
    for op in OPS
    if gloo_supports(dtype, op)
]
CASES += [
    Case(collective, dtype)
    for collective in COPIES
    for dtype in DTYPES
    if not (collective == "gather" and dtype in COMPLEX)  # gloo does not support it
]
CASES += [Case("coalesced", dtype) for dtype in (torch.float32, torch.int64)]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    """[rank][world, case]: the result of every process."""
    folder = tmp_path_factory.mktemp("gloo")
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=work, args=(rank, CASES, str(folder)), daemon=True)
        for rank in range(max(WORLDS))
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + SECONDS
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
    assert codes == [0] * len(ranks), f"gloo processes: {codes} (None: still running)"
    files = [folder / f"rank_{rank}.pt" for rank in range(len(ranks))]
    return [torch.load(file, weights_only=False) for file in files]


def only_root(results):
    """Keep the root's results: torch.distributed leaves the others undefined."""
    return [t if r == ROOT else None for r, t in enumerate(results)]


def in_place(call, x, *args):
    call(x, *args)
    return x


def all_to_all_v(x):
    sizes = uneven(len(x))
    rows = [t[:1].repeat(sum(row), 1) for t, row in zip(x, sizes, strict=True)]
    return pc.all_to_all(rows, split_sizes=sizes)


def coalesced(x, op):
    lists = [[t, t[0].clone()] for t in x]
    pc.all_reduce_coalesced(lists, op)
    return [torch.cat([t.flatten(), u]) for t, u in lists]


# Every rank's input tensor and every rank's result.
CALLS = {
    "all_reduce": lambda x, op: in_place(pc.all_reduce, x, op),
    "reduce": lambda x, op: only_root(in_place(pc.reduce, x, ROOT, op)),
    "broadcast": lambda x, op: in_place(pc.broadcast, x, ROOT),
    "all_gather": lambda x, op: pc.all_gather(x),
    "reduce_scatter": lambda x, op: pc.reduce_scatter(x, op),
    "all_to_all": lambda x, op: pc.all_to_all(x),
    "all_to_all_v": lambda x, op: all_to_all_v(x),
    "gather": lambda x, op: only_root([pc.gather(x)] * len(x)),
    "scatter": lambda x, op: pc.scatter(x[ROOT], f"cpu*{len(x)}"),
    "coalesced": coalesced,
}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.collective}-{short(c.dtype)}-{c.op}")
def test_results_equal_gloos(gloo, case):
    adds = case.collective not in COPIES and case.op in ("sum", "avg", "prod")
    may_round = adds and case.dtype in (*FLOATS, *COMPLEX)
    for world in WORLDS:
        theirs = [gloo[rank][world, case] for rank in range(world)]
        ours = CALLS[case.collective](case.inputs(world), case.op)
        assert [t is None for t in ours] == [t is None for t in theirs]
        ours, theirs = ([t for t in side if t is not None] for side in (ours, theirs))
        if may_round:
            assert_close(ours, theirs, f"world {world}", world)
        else:
            assert_same(ours, theirs, f"world {world}")
