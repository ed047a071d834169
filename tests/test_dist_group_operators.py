"""torch.ops.pycollect.group_*: the calls of torch.distributed, with the same results and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Pools, RankContext, caught
from reference import assert_same, randoms, short
from sites import THREADS, not_on
from torch import Tensor
from torch.autograd import forward_ad

pytestmark = pytest.mark.skipif(not OURS, reason="the operators call groups of pycollect")
WORLD = 3
OPS = {"sum": "SUM", "avg": "AVG", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
BITS = {"band": "BAND", "bor": "BOR", "bxor": "BXOR"}


def operators() -> tuple[Any, str]:
    return torch.ops.pycollect, dist.group.WORLD.group_name


def mine(me: RankContext, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return randoms(me.world, shape, dtype)[me.rank]


def reductions(me: RankContext, dtype: torch.dtype) -> None:
    ops, group = operators()
    for op, torchs in (OPS | ({} if dtype.is_floating_point else BITS)).items():
        for shape in ((7,), (), (6, 5), (0,), (4096, 33)):
            x = mine(me, shape, dtype)
            wanted, got = x.clone(), x.clone()
            dist.all_reduce(wanted, getattr(dist.ReduceOp, torchs))
            assert ops.group_all_reduce_(got, op, group) is None
            assert_same([got], [wanted])
            assert_same([ops.group_all_reduce(x, op, group)], [wanted])
            assert_same([x], [mine(me, shape, dtype)])
        x = mine(me, (6, 5), dtype)
        wanted = x.new_empty(2, 5)
        dist.reduce_scatter_tensor(wanted, x, getattr(dist.ReduceOp, torchs))
        got = torch.empty_like(wanted)
        ops.group_reduce_scatter_(got, x, op, group)
        assert_same([got, ops.group_reduce_scatter(x, op, group)], [wanted] * 2)


def moves(me: RankContext, dtype: torch.dtype) -> None:
    ops, group = operators()
    for shape in ((7,), (4, 5), (0, 3)):
        x = mine(me, shape, dtype)
        wanted = x.new_empty(me.world * shape[0], *shape[1:])
        dist.all_gather_into_tensor(wanted, x)
        got = torch.empty_like(wanted)
        ops.group_all_gather_(got, x, group)
        assert_same([got, ops.group_all_gather(x, group)], [wanted] * 2)
    scalar = torch.tensor(me.rank)
    assert ops.group_all_gather(scalar, group).tolist() == list(range(me.world))

    x = mine(me, (2 * me.world, 5), dtype)
    wanted, got = torch.empty_like(x), torch.empty_like(x)
    dist.all_to_all_single(wanted, x)
    ops.group_all_to_all_(got, x, group)
    assert_same([got, ops.group_all_to_all(x, group)], [wanted] * 2)

    sent = [rank + me.rank for rank in range(me.world)]  # rows from this rank to each
    x = mine(me, (12, 5), dtype)[: sum(sent)]
    wanted = x.new_empty(sum(sent), 5)
    dist.all_to_all_single(wanted, x, sent, sent)
    got = torch.empty_like(wanted)
    ops.group_all_to_all_(got, x, group, sent, sent)
    assert_same([got, ops.group_all_to_all(x, group, sent, sent)], [wanted] * 2)


def gradients(me: RankContext) -> None:
    """Gradients of the sum of all ranks' losses, compared with autograd in one process."""
    ops, group = operators()
    shapes = torch.randn(2 * me.world, 3, generator=torch.Generator().manual_seed(0))
    whole = [(shapes * (r + 1)).requires_grad_() for r in range(me.world)]
    total = sum(whole)
    weights = torch.arange(float(2 * me.world)).reshape(-1, 1)
    parts = [w.chunk(me.world) for w in whole]
    losses = [
        (total * weights * (r + 1)).sum()
        + (total.chunk(me.world)[r] ** 2).sum() / me.world
        + (torch.cat(whole) * (r + 2)).sum()
        + (torch.cat([p[r] for p in parts]) * weights * r).sum()
        for r in range(me.world)
    ]
    sum(losses).backward()
    x = whole[me.rank].detach().clone().requires_grad_()
    mean = ops.group_reduce_scatter(x, "avg", group) * me.world
    loss = (
        (ops.group_all_reduce(x, "sum", group) * weights * (me.rank + 1)).sum()
        + (mean**2).sum() / me.world
        + (ops.group_all_gather(x, group) * (me.rank + 2)).sum()
        + (ops.group_all_to_all(x, group) * weights * me.rank).sum()
    )
    loss.backward()
    torch.testing.assert_close(x.grad, whole[me.rank].grad)
    with pytest.raises(ValueError, match="has no gradient"):
        ops.group_all_reduce(x, "max", group)
    with pytest.raises(ValueError, match="requires grad"):
        ops.group_all_reduce_(x * 1, "sum", group)
    with torch.no_grad():
        ops.group_all_reduce_(x, "sum", group)


def gradients_of_uneven_shares(me: RankContext) -> None:
    """Even chunks of inputs that differ in length: ranks name only what they receive."""
    ops, group = operators()
    received = [rank + 1 for rank in range(me.world)]
    x = torch.randn((me.rank + 1) * me.world, 2).requires_grad_()
    y = ops.group_all_to_all(x, group, received)
    (y * me.rank).sum().backward()
    wanted = torch.arange(me.world).repeat_interleave(me.rank + 1)
    assert x.grad is not None
    assert x.grad[:, 1].tolist() == wanted.tolist()


def forward_mode(me: RankContext) -> None:
    ops, group = operators()
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(ValueError, match="tangent"):
            ops.group_all_reduce(x, "sum", group)


def unused(me: RankContext) -> None:
    """Only one rank uses the result: the others must make the call all the same."""
    ops, group = operators()

    def step(x: Tensor) -> Tensor:
        y = ops.group_all_reduce(x, "sum", group)
        return y + 1 if me.rank == 0 else x + 1

    torch._dynamo.reset()
    x = torch.ones(3)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same([compiled(x)], [step(x)])


def compiled(me: RankContext) -> None:
    """Rank 0 runs graphs, and so do all threads; the other processes run what has no graph."""
    ops, group = operators()
    graphs = me.rank == 0 or me.spec.ranks_as == "threads"

    def layer(x: Tensor) -> Tensor:
        y = x * 2
        ops.group_all_reduce_(y, "sum", group)
        z = ops.group_all_gather(ops.group_all_reduce(y + 1, "max", group), group)
        shard = ops.group_reduce_scatter(z * z, "avg", group)
        return ops.group_all_to_all(shard, group).sin()

    x = torch.arange(120.0).reshape(12, 10) / 120 + me.rank
    torch._dynamo.reset()
    in_graph = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_same([(in_graph if graphs else layer)(x)], [layer(x)])
    leaf = x.clone().requires_grad_()

    def recorded(x: Tensor) -> Tensor:
        return ops.group_all_reduce(ops.group_all_to_all(x, group) ** 2, "avg", group)

    recorded(leaf).sum().backward()
    wanted, leaf.grad = leaf.grad, None
    in_graph = torch.compile(recorded, fullgraph=True, backend="aot_eager")
    (in_graph if graphs else recorded)(leaf).sum().backward()
    assert_same([leaf.grad], [wanted])


def checked(me: RankContext) -> None:
    """Schemas and fakes: without data, results have the shapes of those with data."""
    ops, group = operators()
    x, part = mine(me, (6, 5), torch.float32), torch.empty(2, 5)
    for operator, arguments in (
        (ops.group_all_reduce, (x, "sum", group)),
        (ops.group_reduce_scatter, (x, "sum", group)),
        (ops.group_all_gather, (x, group)),
        (ops.group_all_to_all, (x, group, [2] * 3, [2] * 3)),
        (ops.group_all_reduce_, (x.clone(), "sum", group)),
        (ops.group_reduce_scatter_, (part, x, "sum", group)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def errors(me: RankContext) -> list[Caught]:
    ops, group = operators()
    x = torch.ones(6)
    found = [
        caught(lambda: ops.group_all_reduce_(torch.ones(4 + (me.rank == 1)), "sum", group)),
        caught(lambda: ops.group_all_reduce_(x, "max" if me.rank else "sum", group)),
        caught(lambda: ops.group_all_gather_(torch.ones(5), x, group)),
        caught(lambda: ops.group_reduce_scatter(torch.ones(4), "sum", group)),
        caught(lambda: ops.group_all_to_all(x, group, [6, 0, 0], [1, 2, 3])),
    ]
    assert torch.equal(x, torch.ones(6))
    ops.group_all_reduce_(x, "sum", group)
    assert torch.equal(x, torch.full((6,), float(me.world)))
    return found


def test_errors_are_those_of_torch_distributed(pools: Pools) -> None:
    for found in pools(WORLD).run(errors):
        assert all(one.kind == "ValueError" for one in found), found
        assert all(words in found[1].text for words in ("max", "sum"))


def own_errors(me: RankContext) -> None:
    ops, group = operators()
    x = torch.ones(3)
    with pytest.raises(ValueError, match="most"):
        ops.group_all_reduce_(x, "most", group)
    with pytest.raises(RuntimeError, match="nobody"):
        ops.group_all_reduce_(x, "sum", "nobody")
    with pytest.raises(TypeError, match="float32"):
        ops.group_all_reduce_(x, "bor", group)
    dist.barrier()


def over_gloo(me: RankContext) -> None:
    other = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="backend gloo"):
        torch.ops.pycollect.group_all_reduce_(torch.ones(3), "sum", other.group_name)
    dist.barrier()  # gloo fails if a rank leaves while another still connects to it
    dist.destroy_process_group(other)


def debugged(me: RankContext) -> None:
    """A group whose backend torch has wrapped to compare the ranks' calls."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        wrapped = dist.new_group()
    finally:
        dist.set_debug_level(level)
    x = torch.full((5,), float(me.rank))
    ops, group = torch.ops.pycollect, wrapped.group_name
    ops.group_all_reduce_(x, "sum", group)
    assert x.tolist() == [sum(range(me.world))] * 5
    assert ops.group_all_gather(x[:1], group).tolist() == x.tolist()[:1] * me.world
    dist.barrier()
    dist.destroy_process_group(wrapped)


JOBS: list[Any] = [
    *((reductions, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)),
    *((moves, dtype) for dtype in (torch.float32, torch.float16, torch.float8_e8m0fnu)),
    *((job,) for job in (gradients, gradients_of_uneven_shares, forward_mode, own_errors)),
    *((job,) for job in (unused, compiled, checked)),
    *(
        pytest.param((job,), marks=not_on(THREADS, "gloo is for processes"))
        for job in (over_gloo, debugged)
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "job", JOBS, ids=lambda job: "-".join([job[0].__name__, *map(short, job[1:])])
)
def test_operators(pools: Pools, job: tuple[Any, ...]) -> None:
    pools(WORLD).run(*job)
