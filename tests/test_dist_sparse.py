"""all_reduce of sparse tensors: exact in rank order, whatever the numbers of entries of the ranks.

Errors are those of all ranks, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Caught, RankContext, assert_in_step, caught
from reference import DTYPES, allowed, assert_same, left_fold, randoms, short
from sites import quick_on_hosts
from torch import Tensor

import pycollect as pc

WORLD = 3
F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
pytestmark = [
    pytest.mark.skipif(not OURS, reason="gloo has only sum, and rounds narrow floats at every hop"),
    quick_on_hosts,
    pytest.mark.filterwarnings("ignore"),
]


def sparse(
    rank: int, shape: tuple[int, ...], dims: int, entries: int, dtype: torch.dtype, **options: bool
) -> Tensor:
    """A tensor with random entries at random indices, some of which repeat."""
    generator = torch.Generator().manual_seed(rank)
    indices = [torch.randint(max(n, 1), (entries,), generator=generator) for n in shape[:dims]]
    values = randoms(1, (entries, *shape[dims:]), dtype, seed=rank)[0]
    indices = torch.stack(indices) if dims else torch.empty(0, entries, dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values, shape, **options)


def unlike(rank: int, dtype: torch.dtype) -> Tensor:
    """Rank 0 has no entry, the other ranks have different numbers."""
    return sparse(rank, (50,), 1, 30 * rank, dtype)


CASES: dict[str, Callable[[int, torch.dtype], Tensor]] = {
    "different numbers of entries": unlike,
    "two dimensions": lambda r, t: sparse(r, (6, 7), 2, 40, t),
    "values with a dimension": lambda r, t: sparse(r, (20, 5), 1, 13 + r, t),
    "values with two dimensions": lambda r, t: sparse(r, (4, 3, 3, 2), 2, 9, t),
    "values without elements": lambda r, t: sparse(r, (9, 0), 1, 4 * r, t),
    "no sparse dimension": lambda r, t: sparse(r, (5,), 0, 2 - r, t),
    "no entries": lambda r, t: sparse(r, (8,), 1, 0, t),
    "a dimension of size 0": lambda r, t: sparse(r, (0, 3), 1, 0, t),
    # A rank without an entry adds nothing, not +0.0.
    "zeros of rank 1": lambda r, t: torch.sparse_coo_tensor(
        [[2] * (r == 1)], torch.tensor([-0.0] * (r == 1)).to(t), (4,)
    ),
    "one entry for all": lambda r, t: sparse(r, (1, 70_000), 1, 1, t),
    "values that are not contiguous": lambda r, t: torch.sparse_coo_tensor(
        torch.arange(6).view(1, 6).flip(1), randoms(1, (4, 6), t, seed=r)[0].t(), (6, 4)
    ),
}


def total(tensors: list[Tensor], op: str = "sum") -> tuple[Tensor, Tensor]:
    """The indices and values of the sum: a missing entry is -0.0, which adds nothing."""
    parts = [t.coalesce() for t in tensors]
    indices = sorted({tuple(i) for p in parts for i in p.indices().t().tolist()})
    place = {index: n for n, index in enumerate(indices)}
    first = parts[0].values()
    floating = first.is_floating_point() or first.is_complex()
    nothing = (complex(-0.0, -0.0) if first.is_complex() else -0.0) if floating else 0
    dense = []
    for part in parts:
        values = torch.full((len(indices), *first.shape[1:]), nothing, dtype=first.dtype)
        for index, value in zip(part.indices().t().tolist(), part.values(), strict=True):
            values[place[tuple(index)]] = value
        dense.append(values)
    count = (len(indices), parts[0].sparse_dim())
    return torch.tensor(indices, dtype=torch.int64).reshape(count).t(), left_fold(dense, op)


def check(t: Tensor, wanted: tuple[Tensor, Tensor], why: object) -> None:
    assert t.is_coalesced(), why
    assert torch.equal(t.indices(), wanted[0]), why
    assert_same([t.values()], [wanted[1]], why)


def reduce(t: Tensor, op: str = "sum") -> Tensor:
    """all_reduce through the group: `dist.all_reduce` gets a copy of a complex sparse tensor."""
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, op.upper())
    dist.group.WORLD.allreduce([t], options).wait()
    return t


def all_cases(me: RankContext, dtype: torch.dtype) -> None:
    for name, make in CASES.items():
        for op in ("sum", "avg"):
            if not allowed(dtype, op):
                continue
            inputs = [make(r, dtype) for r in range(me.world)]
            mine = make(me.rank, dtype)
            assert reduce(mine, op) is mine
            check(mine, total(inputs, op), (name, op))
            again = mine.clone()  # one that is coalesced
            check(reduce(again, op), total([mine] * me.world, op), (name, op))


@pytest.mark.parametrize("dtype", [t for t in DTYPES if t not in F8], ids=short)
def test_sums_are_the_left_fold_in_rank_order(pools, dtype):
    pools(WORLD).run(all_cases, dtype)


def float8(me: RankContext, dtype: torch.dtype) -> Caught:
    tensors = [
        torch.sparse_coo_tensor([[0, 2 + r]], torch.tensor([1.0, 3.0]).to(dtype), (6,))
        for r in range(me.world)
    ]
    refused = caught(dist.all_reduce, tensors[me.rank].clone())
    mine = tensors[me.rank]._coalesced_(True)
    dist.all_reduce(mine)
    assert mine.indices().tolist() == [[0, 2, 3, 4]]
    assert mine.values().float().tolist() == [3, 3, 3, 3]
    return refused


@pytest.mark.parametrize("dtype", F8, ids=short)
def test_float8_must_be_coalesced(pools, dtype):
    for refused in pools(WORLD).run(float8, dtype):
        assert refused.kind == "TypeError", refused
        assert "coalesce" in refused.text


def large(me: RankContext) -> None:
    """Many pieces through the staging buffers."""
    inputs = [sparse(r, (3000, 400), 1, 400 + 300 * r, torch.float32) for r in range(me.world)]
    mine = inputs[me.rank].clone()
    dist.all_reduce(mine)
    check(mine, total(inputs), "large")


def test_large_sums(pools):
    pools(WORLD).run(large)


# --- ways to call it ------------------------------------------------------------------------------


def of(rank: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return sparse(rank + 10 * seed, (30, 2), 1, 11 + 3 * rank, dtype)


def everybody(me: RankContext, seed: int = 0) -> list[Tensor]:
    return [of(r, seed) for r in range(me.world)]


def asynchronous(me: RankContext) -> None:
    tensors = [of(me.rank, s) for s in range(4)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for seed, (work, t) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait()
        check(t, total(everybody(me, seed)), seed)
        assert work.is_success()
        assert work.result()[0] is t
        assert work.get_future().value()[0] is t
    chained = of(me.rank)
    future = dist.all_reduce(chained, async_op=True).get_future().then(lambda f: f.value()[0])
    check(future.wait(), total(everybody(me)), "future")


def in_a_block(me: RankContext) -> None:
    """torch passes the tensors of a block at its end, in one list; with `device`, one by one."""
    for device in (None, torch.device("cpu")):
        tensors = [of(me.rank, s) for s in range(3)]
        with dist._coalescing_manager(device=device):
            for t in tensors:
                dist.all_reduce(t)
        for seed, t in enumerate(tensors):
            check(t, total(everybody(me, seed)), (device, seed))
    with dist._coalescing_manager(async_ops=True) as block:
        dist.all_reduce(asynchronous := of(me.rank))
    block.wait()
    check(asynchronous, total(everybody(me)), "async")


def in_order(me: RankContext) -> None:
    """Each call of a block reads the results of those before it."""
    t, once = of(me.rank), total(everybody(me))
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.group.WORLD.allreduce([t])
        dist.group.WORLD.allreduce([t])
    first = torch.sparse_coo_tensor(*once, t.shape)
    check(t, total([first] * me.world), "twice")


def with_dense(me: RankContext) -> None:
    """Values are read before a dense tensor of the same call, with their memory, is written."""
    values = torch.full((2,), float(me.rank + 1))
    t = torch.sparse_coo_tensor([[0, me.rank + 1]], values, (9,))._coalesced_(True)
    shared, dense = t._values(), torch.ones(5)
    dist.all_reduce_coalesced([dense, t, shared])
    assert dense.tolist() == [me.world] * 5
    assert shared.tolist() == [sum(range(1, me.world + 1))] * 2
    assert t.to_dense().tolist()[: me.world + 1] == [shared[0].item(), *range(1, me.world + 1)]


def parameter(me: RankContext) -> None:
    """A leaf that requires grad, an inference tensor; the version counts as after a write."""
    leaf = of(me.rank).requires_grad_()
    version = leaf._version
    dist.all_reduce(leaf)
    assert leaf._version > version
    check(leaf.detach(), total(everybody(me)), "leaf")
    with torch.inference_mode():
        inference = of(me.rank)
        dist.all_reduce(inference)
    check(inference, total(everybody(me)), "inference")


def old_values(me: RankContext) -> None:
    """As with gloo, the entries are replaced: tensors that share the old ones keep them."""
    t = of(me.rank).coalesce()
    values, copy = t.values(), t.values().clone()
    dist.all_reduce(t)
    assert_same([values], [copy])


def one_rank(me: RankContext) -> None:
    groups = [dist.new_group([r]) for r in range(me.world)]
    t = of(me.rank)
    dist.all_reduce(t, group=groups[me.rank])
    check(t, total([of(me.rank)]), "alone")


WAYS = (asynchronous, in_a_block, with_dense, parameter, old_values, one_rank, in_order)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ways_to_call(pools, way):
    pools(WORLD).run(way)


def in_tree_order(me: RankContext) -> list[str]:
    options = pc.distributed.options(order="tree")
    tree = dist.new_group(backend=BACKEND, pg_options=options)
    errors = [caught(lambda t=t: dist.all_reduce(t, group=tree)) for t in (plain(), plain())]
    dist.all_reduce(x := torch.ones(2), group=tree)
    assert x.tolist() == [me.world] * 2
    dist.destroy_process_group(tree)
    return [f"{e.kind} {e.text}" for e in errors]


def test_sparse_tensors_have_rank_order_only(pools):
    for errors in pools(WORLD).run(in_tree_order):
        for error in errors:
            assert error.startswith("ValueError")
            assert "is sparse, and the group's option is order='tree'" in error


# --- errors ---------------------------------------------------------------------------------------


def plain(**options: bool) -> Tensor:
    return torch.sparse_coo_tensor([[1, 3]], [1.0, 2.0], (12,), **options)


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
    "another op": (lambda: dist.all_reduce(plain(), dist.ReduceOp.AVG), "op avg"),
    "a refused op": (lambda: dist.all_reduce(plain(), dist.ReduceOp.MAX), "sum and avg"),
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
