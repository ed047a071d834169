"""Errors of all_reduce of sparse tensors: those of all ranks, and nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from dist_in_step import assert_in_step
from dist_pool import OURS, Caught, Pools, RankContext, caught, fresh, pools_of_a_module
from dist_ranks import between_processes, quick_on_hosts
from torch import Tensor

WORLD = 3
pytestmark = [
    pytest.mark.skipif(not OURS, reason="tests promises of pycollect alone"),
    quick_on_hosts,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def pools(ranks_as: str) -> Iterator[Pools]:
    yield from pools_of_a_module(ranks_as=ranks_as)


def plain(**options: bool) -> Tensor:
    return torch.sparse_coo_tensor([[1, 3]], [1.0, 2.0], (12,), **options)


Op = dist.ReduceOp
UNLIKE: dict[str, tuple[Callable[[], None], str]] = {
    "a dense tensor": (lambda: dist.all_reduce(torch.ones(12)), "in sparse tensors"),
    "dense counts": (lambda: dist.all_reduce(torch.ones(1, dtype=torch.int64)), "sparse"),
    "counts of an all_gather": (
        lambda: dist.all_gather_into_tensor(torch.zeros(WORLD).long(), torch.zeros(1).long()),
        "all_gather",
    ),
    "another size": (
        lambda: dist.all_reduce(torch.sparse_coo_tensor([[1]], [1.0], (13,))),
        "of 13 float32",
    ),
    "another shape": (
        lambda: dist.all_reduce(torch.sparse_coo_tensor([[1], [1]], [1.0], (3, 4))),
        "shapes",
    ),
    "other sparse dimensions": (
        lambda: dist.all_reduce(torch.sparse_coo_tensor([[0]], torch.ones(1, 12), (1, 12))),
        "shapes",
    ),
    "another dtype": (lambda: dist.all_reduce(plain().double()), "of 12 float64"),
    "another op": (lambda: dist.all_reduce(plain(), Op.AVG), "op avg"),
    "a refused op": (lambda: dist.all_reduce(plain(), Op.MAX), "sum and avg"),
    "a factor": (
        lambda: dist.all_reduce(plain(), dist._make_nccl_premul_sum(2.0)),
        "PREMUL_SUM",
    ),
    "another number": (lambda: dist.all_reduce_coalesced([plain(), plain()]), "2 tensors"),
    "an index out of range": (
        lambda: dist.all_reduce(torch.sparse_coo_tensor([[12]], [1.0], (12,))),
        "the index 12",
    ),
    "a negative index": (lambda: dist.all_reduce(bad(-1)), "the index -1"),
    "false order": (
        lambda: dist.all_reduce(
            torch.sparse_coo_tensor([[3, 1]], [1.0, 2.0], (12,), is_coalesced=True)
        ),
        "not sorted",
    ),
    "the same twice": (lambda: dist.all_reduce_coalesced([plain()] * 2), "twice"),
    "another call": (lambda: dist.barrier(), "barrier"),
}


def bad(index: int) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[index]]), [1.0], (12,), check_invariants=False)


def disagree(me: RankContext, odd: int, name: str) -> Caught:
    mine = plain()
    error = caught(UNLIKE[name][0]) if me.rank == odd else caught(dist.all_reduce, mine)
    assert not mine.is_coalesced()
    assert mine._values().tolist() == [1, 2]
    assert_in_step(me)
    dist.all_reduce(mine)
    assert mine.values().tolist() == [me.world, 2 * me.world]
    return error


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_differ_raise_on_all_ranks(pools, name, odd):
    for rank, error in enumerate(pools(WORLD).run(disagree, odd, name)):
        assert "ValueError" in error.kinds, (rank, error)
        assert UNLIKE[name][1] in error.text, (rank, error)


def refused_block(me: RankContext) -> tuple[Caught, list[list[float]]]:
    """Rank 1 passes a bad tensor after a good one: none of the block's calls runs."""
    tensors = [plain(), bad(50) if me.rank == 1 else plain()]

    def block() -> None:
        with dist._coalescing_manager(device=torch.device("cpu")):
            for t in tensors:
                dist.group.WORLD.allreduce([t])

    error = caught(block)
    assert_in_step(me)
    return error, tensors[0]._values().tolist()


def test_a_refused_block_runs_no_call(pools):
    for error, values in pools(WORLD).run(refused_block):
        assert "the index 50" in error.text
        assert values == [1, 2]


def with_an_absent_rank(me: RankContext, dies: bool) -> Caught | None:
    dist.all_reduce(plain())
    if me.rank != 1:
        return caught(dist.all_reduce, plain())
    return os._exit(0) if dies else None  # absent until the pool is closed


@pytest.mark.parametrize("dies", [False, True])
@between_processes("a rank that is a thread cannot die alone")
def test_an_absent_rank_is_an_error(ranks_as, dies):
    with fresh(WORLD, ranks_as=ranks_as, timeout=0.5) as pool:
        pool.begin(with_an_absent_rank, dies)
        outcomes = pool.collect_outcomes()
    for rank in (0, 2):
        error = outcomes[rank].value
        assert error.kind in ("Timeout", "PeerLost"), error
        assert "all_reduce #" in error.text
        assert "rank 1" in error.text
