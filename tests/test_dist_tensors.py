"""Tensors whose layouts differ between ranks, and tensors that share memory.

test_matrix.py has strided inputs and outputs. Outputs whose elements share memory are refused on
every rank before data moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Caught, Pools, RankContext, caught, pools_of_a_module
from reference import LAYOUTS, assert_same, place
from torch import Tensor

SHAPES = ((4, 6), (300, 500))  # a small one, and one of several pieces
pytestmark = pytest.mark.skipif(not OURS, reason=f"{BACKEND} ignores strides or refuses them")


@pytest.fixture(scope="module")
def pools(ranks_as: str) -> Iterator[Pools]:
    yield from pools_of_a_module(ranks_as=ranks_as)


def of(rank: int, shape: tuple[int, ...]) -> Tensor:
    count = int(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.float32) + 100_000 * rank).view(shape)


def different_layouts(me: RankContext) -> None:
    """Ranks have different layouts of the same shape: elements match by index, or all refuse."""
    for shape in SHAPES:
        x = place(of(me.rank, shape), LAYOUTS[me.rank % len(LAYOUTS)])
        error = caught(dist.all_reduce, x)
        wanted = sum(of(r, shape) for r in range(me.world))
        assert error.kind in ("", "ValueError"), error
        assert_same([x], [of(me.rank, shape) if error.kind else wanted], "all_reduce")
        y = place(of(me.rank, shape), LAYOUTS[(me.rank + 2) % len(LAYOUTS)])
        error = caught(dist.broadcast, y, 1)
        assert error.kind in ("", "ValueError"), error
        assert_same([y], [of(me.rank if error.kind else 1, shape)], "broadcast")


@pytest.mark.parametrize("world", [2, 3])
def test_layouts_that_differ_between_ranks(pools, world):
    pools(world).run(different_layouts)


def repeated_inputs(me: RankContext) -> None:
    """Inputs of stride 0, whose elements are all the same memory, are accepted."""
    mine = torch.full((1,), float(me.rank)).expand(4, 5)
    out = [torch.zeros(4, 5) for _ in range(me.world)]
    dist.all_gather(out, mine)
    assert_same(out, [torch.full((4, 5), float(r)) for r in range(me.world)])
    part = torch.zeros(4, 5)
    dist.reduce_scatter(part, [mine] * me.world)
    assert_same([part], [torch.full((4, 5), float(sum(range(me.world))))])


def test_inputs_of_stride_0(pools):
    pools(3).run(repeated_inputs)


# --- refusals: the rank's own error, its peers' error that quotes it, and a usable group ----------


def _overlapping() -> Tensor:
    return torch.zeros(8).as_strided((3, 4), (2, 1))


def all_reduce_of(make: Callable[[], Tensor]) -> None:
    dist.all_reduce(make())


def all_gather_into(make: Callable[[], Tensor]) -> None:
    bad = make()
    good = [torch.zeros(bad.shape) for _ in range(dist.get_world_size() - 1)]
    dist.all_gather([*good, bad], torch.ones(bad.shape))


def broadcast_of(make: Callable[[], Tensor]) -> None:
    dist.broadcast(make(), 0)


def reduce_scatter_into(make: Callable[[], Tensor]) -> None:
    bad = make()
    dist.reduce_scatter(bad, [torch.ones(bad.shape)] * dist.get_world_size())


def invalid_tensors(
    me: RankContext, call: Callable[..., None], kind: str, ranks: tuple[int, ...]
) -> Caught:
    bad = {
        "expanded": lambda: torch.zeros(1).expand(12),
        "overlapping": _overlapping,
        "sparse": lambda: torch.eye(12).to_sparse(),
    }[kind]
    good = {"overlapping": lambda: torch.zeros(3, 4)}.get(kind, lambda: torch.zeros(12))
    error = caught(call, bad if me.rank in ranks else good)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [me.world] * 3
    return error


@pytest.mark.parametrize("call", [all_reduce_of, all_gather_into, reduce_scatter_into])
@pytest.mark.parametrize("kind", ["expanded", "overlapping"])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_outputs_that_overlap(pools, call, kind, ranks):
    errors = pools(3).run(invalid_tensors, call, kind, ranks)
    for rank, error in enumerate(errors):
        assert "ValueError" in error.kinds, f"rank {rank}: {error}"
        assert rank in ranks or "rank 1" in error.text, error
    assert all(".clone()" in errors[r].text for r in ranks), errors


def test_sparse_tensors(pools):
    for error in pools(2).run(invalid_tensors, broadcast_of, "sparse", (0, 1)):
        assert error.kind, "nothing was raised"


def shared_outputs(me: RankContext) -> Caught:
    base = torch.zeros(12)
    error = caught(dist.all_gather, [base[:8], base[4:]], torch.ones(8))
    assert not base.any()
    return error


def test_outputs_that_share_memory(pools):
    for error in pools(2).run(shared_outputs):
        assert error.kind == "ValueError", error


def half_overlapping_inputs(me: RankContext, count: int) -> list[Caught]:
    """An input that half overlaps its output at another offset: refused, or the right result."""
    base = of(me.rank, (3 * count,))
    moved = [of(r, (3 * count,))[count // 2 :][:count] for r in range(me.world)]
    first = caught(dist.all_gather_into_tensor, base[: 2 * count], base[count // 2 :][:count])
    if not first.kind:
        assert_same([base[: 2 * count]], [torch.cat(moved)])
    base = of(me.rank, (3 * count,))
    sent = [of(r, (3 * count,))[: 2 * count].split(count)[me.rank] for r in range(me.world)]
    second = caught(dist.all_to_all_single, base[count:], base[: 2 * count])
    if not second.kind:
        assert_same([base[count:]], [torch.cat(sent)])
    dist.all_reduce(torch.ones(3))
    return [first, second]


@pytest.mark.parametrize("count", [4, 100_000])
def test_inputs_that_overlap_outputs(pools, count):
    for errors in pools(2).run(half_overlapping_inputs, count):
        assert {e.kind for e in errors} <= {"", "ValueError"}, errors
