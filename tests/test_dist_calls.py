"""Every form of collective call in torch.distributed: lists, splits, coalesced, aliased.

Each job runs on every rank of a pool and compares with the equivalent plain torch.
test_matrix.py covers the product of dtypes, ops and sizes.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Pools, RankContext, pools_of_a_module
from dist_ranks import slow_on_processes
from reference import BITS_OF, MOVED, assert_same, randoms
from torch import Tensor

N = 5
LARGE = 200_001  # elements; takes several pieces


@pytest.fixture(scope="module")
def pools(ranks_as: str) -> Iterator[Pools]:
    yield from pools_of_a_module(ranks_as=ranks_as)


def of(rank: int, count: int = N, first: int = 0) -> Tensor:
    """A rank's input: elements differ from each other and between ranks."""
    return torch.arange(first, first + count, dtype=torch.float32) + 1000 * rank


def summed(world: int, count: int = N, first: int = 0) -> Tensor:
    return sum(of(r, count, first) for r in range(world))


def same(actual: object, wanted: object) -> None:
    as_lists = [x if isinstance(x, list) else [x] for x in (actual, wanted)]
    assert_same(*as_lists)


# --- lists ----------------------------------------------------------------------------------------


def all_gather_uneven(me: RankContext) -> None:
    for scale in (1, LARGE):
        out = [torch.zeros(scale * r) for r in range(me.world)]
        dist.all_gather(out, of(me.rank, scale * me.rank))
        same(out, [of(r, scale * r) for r in range(me.world)])


def all_gather_into_other_shapes(me: RankContext) -> None:
    out = [torch.zeros(2, 3) for _ in range(me.world)]
    dist.all_gather(out, of(me.rank, 6).view(2, 3).t().contiguous().t())
    same(out, [of(r, 6).view(2, 3) for r in range(me.world)])


def all_gather_stacked(me: RankContext) -> None:
    out = torch.zeros(me.world, 2, 3)
    dist.all_gather_into_tensor(out, of(me.rank, 6).view(2, 3))
    same(list(out), [of(r, 6).view(2, 3) for r in range(me.world)])


def gather_uneven(me: RankContext) -> None:
    for root in range(me.world):
        out = [torch.zeros(r + 1) for r in range(me.world)] if me.rank == root else None
        dist.gather(of(me.rank, me.rank + 1), out, root)
        same(out or [], [of(r, r + 1) for r in range(me.world)] if out else [])


def scatter_uneven(me: RankContext) -> None:
    for root in range(me.world):
        out = torch.zeros(me.rank + 1)
        parts = [of(root, r + 1) for r in range(me.world)] if me.rank == root else None
        dist.scatter(out, parts, root)
        same(out, of(root, me.rank + 1))


def all_to_all_uneven(me: RankContext) -> None:
    for scale in (1, LARGE):
        sizes = [[scale * ((s + 2 * r) % 3) for r in range(me.world)] for s in range(me.world)]
        out = [torch.zeros(sizes[s][me.rank]) for s in range(me.world)]
        dist.all_to_all(out, [of(me.rank, n, r) for r, n in enumerate(sizes[me.rank])])
        same(out, [of(s, sizes[s][me.rank], me.rank) for s in range(me.world)])


def all_to_all_splits(me: RankContext) -> None:
    sizes = [[(s * r) % 4 for r in range(me.world)] for s in range(me.world)]
    sent, received = sizes[me.rank], [sizes[s][me.rank] for s in range(me.world)]
    for columns in (1, LARGE // 8):
        rows = [of(s, sum(sizes[s]) * columns).view(-1, columns) for s in range(me.world)]
        out = torch.zeros(sum(received), columns)
        dist.all_to_all_single(out, rows[me.rank].clone(), received, sent)
        parts = [rows[s].split(sizes[s])[me.rank] for s in range(me.world)]
        same(out, torch.cat(parts))


def all_to_all_one_sided_splits(me: RankContext) -> None:
    """One of the two split lists may be omitted when the splits are even."""
    out = torch.zeros(2 * me.world)
    dist.all_to_all_single(out, of(me.rank, 2 * me.world), None, [2] * me.world)
    same(out, torch.cat([of(s, 2, 2 * me.rank) for s in range(me.world)]))


def only_one_sends(me: RankContext) -> None:
    """Nearly empty splits: rank 0 sends to the last rank, all other splits are empty."""
    last = me.world - 1
    sent, received = [0] * me.world, [0] * me.world
    sent[last] = LARGE if me.rank == 0 else 0
    received[0] = LARGE if me.rank == last else 0
    out = torch.zeros(sum(received))
    dist.all_to_all_single(out, of(me.rank, sum(sent)), received, sent)
    same(out, of(0, LARGE) if me.rank == last else torch.zeros(0))


def dtypes_that_only_move(me: RankContext) -> None:
    """Uneven parts, splits, scalars, moves coalesced with a reduction; torch cannot copy uint4."""
    for dtype in (*MOVED, torch.uint4):
        parts = randoms(me.world, (me.world, 2), dtype)
        mine, last = parts[me.rank], parts[-1].view(BITS_OF[dtype.itemsize]).clone().view(dtype)
        out = randoms(me.world, (me.world, 2), dtype, seed=1)
        dist.all_gather([t[:r] for r, t in enumerate(out)], mine[: me.rank])
        same([t[:r] for r, t in enumerate(out)], [t[:r] for r, t in enumerate(parts)])
        sent = [int(r >= me.rank) for r in range(me.world)]
        received = [int(r <= me.rank) for r in range(me.world)]
        rows = out[0][: sum(received)]
        dist.all_to_all_single(rows, mine[me.rank :], received, sent)
        same(list(rows), [parts[s][me.rank] for s in range(me.rank + 1)])
        scalar = randoms(1, (), dtype, seed=me.rank)[0]
        dist.broadcast(scalar, 0)
        same(scalar, randoms(1, (), dtype, seed=0)[0])
        x = of(me.rank)
        with dist._coalescing_manager(device=torch.device("cpu")):
            dist.broadcast(mine.t(), me.world - 1)
            dist.all_reduce(x)
            dist.all_gather(out, mine)
        same([x, mine, *out], [summed(me.world), *[last] * (me.world + 1)])


# --- coalesced ------------------------------------------------------------------------------------


def all_reduce_coalesced(me: RankContext) -> None:
    counts = (3, 0, LARGE, 1)
    tensors = [of(me.rank, n) for n in counts]
    dist.all_reduce_coalesced(tensors)
    same(tensors, [summed(me.world, n) for n in counts])


def all_gather_coalesced(me: RankContext) -> None:
    counts = (3, 7, LARGE)
    out = [[torch.zeros(n) for n in counts] for _ in range(me.world)]
    dist.all_gather_coalesced(out, [of(me.rank, n) for n in counts])
    for rank, row in enumerate(out):
        same(row, [of(rank, n) for n in counts])


def coalescing_manager(me: RankContext) -> None:
    for async_ops in (False, True):
        tensors = [of(me.rank), of(me.rank, LARGE)]
        wholes = [torch.zeros(n * me.world) for n in (3, LARGE)]
        parts = [torch.zeros(n) for n in (2, 9)]
        with dist._coalescing_manager(async_ops=async_ops) as first:
            for t in tensors:
                dist.all_reduce(t)
        with dist._coalescing_manager(async_ops=async_ops) as second:
            for t in wholes:
                dist.all_gather_into_tensor(t, of(me.rank, t.numel() // me.world))
        with dist._coalescing_manager(async_ops=async_ops) as third:
            for t in parts:
                dist.reduce_scatter_tensor(t, of(me.rank, t.numel() * me.world))
        if async_ops:
            for manager in (third, first, second):
                manager.wait()
        same(tensors, [summed(me.world), summed(me.world, LARGE)])
        same(wholes, [torch.cat([of(r, n) for r in range(me.world)]) for n in (3, LARGE)])
        same(parts, [summed(me.world, n, n * me.rank) for n in (2, 9)])


def coalescing_of_a_device(me: RankContext) -> None:
    """_coalescing_manager with a device: calls in the block start, in order, when it ends."""
    device = torch.device("cpu")
    x, y, z = of(me.rank), [torch.zeros(N) for _ in range(me.world)], of(me.rank, me.world)
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        dist.broadcast(x, me.world - 1, async_op=True)
        dist.all_gather(y, x, async_op=True)
        dist.all_to_all_single(torch.zeros(me.world), z, async_op=True)
    manager.wait()
    same([x, *y], [of(me.world - 1)] * (me.world + 1))
    with dist._coalescing_manager(device=device):
        dist.all_reduce(z)
        dist.all_reduce(x)
    same([z, x], [summed(me.world, me.world), me.world * of(me.world - 1)])


# --- in place -------------------------------------------------------------------------------------


def gather_in_place(me: RankContext) -> None:
    """All-gather whose input is the rank's own block of the output, as in FSDP."""
    for count in (N, LARGE):
        whole = torch.zeros(me.world * count)
        shards = list(whole.split(count))
        shards[me.rank].copy_(of(me.rank, count))
        dist.all_gather_into_tensor(whole, shards[me.rank])
        same(shards, [of(r, count) for r in range(me.world)])
        whole.zero_()
        shards[me.rank].copy_(of(me.rank, count))
        dist.all_gather(shards, shards[me.rank])
        same(shards, [of(r, count) for r in range(me.world)])


def reduce_scatter_in_place(me: RankContext) -> None:
    for count in (N, LARGE):
        whole = of(me.rank, me.world * count)
        shard = whole.split(count)[me.rank]
        dist.reduce_scatter_tensor(shard, whole)
        same(shard, summed(me.world, count, me.rank * count))
        parts = list(of(me.rank, me.world * count).split(count))
        dist.reduce_scatter(parts[me.rank], parts)
        same(parts[me.rank], summed(me.world, count, me.rank * count))


def roots_in_place(me: RankContext) -> None:
    """scatter and gather where the root's input block is its output block."""
    for count in (N, LARGE):
        parts = list(of(me.rank, me.world * count).split(count))
        dist.scatter(parts[me.rank].clone() if me.rank else parts[0], None if me.rank else parts, 0)
        same(parts[0], of(me.rank, count))
        dist.gather(parts[me.rank], parts if me.rank == 0 else None, 0)
        mine = of(me.rank, count, me.rank * count)
        wanted = [of(r, count, r * count) for r in range(me.world)] if me.rank == 0 else [mine]
        same(parts if me.rank == 0 else [parts[me.rank]], wanted)


# --- objects, barriers, kinds of tensors ----------------------------------------------------------


def objects(me: RankContext) -> None:
    mine = {"rank": me.rank, "long": "x" * (1000 * me.rank), "tensor": of(me.rank)}
    everybody = [None] * me.world
    dist.all_gather_object(everybody, mine)
    assert [o["rank"] for o in everybody] == list(range(me.world))
    assert [len(o["long"]) for o in everybody] == [1000 * r for r in range(me.world)]
    sent = ["hello", {"root": 1}, 3] if me.rank == me.world - 1 else [None] * 3
    dist.broadcast_object_list(sent, src=me.world - 1)
    assert sent == ["hello", {"root": 1}, 3]
    gathered = [None] * me.world if me.rank == 0 else None
    dist.gather_object(me.rank, gathered, 0)
    assert gathered in (None, list(range(me.world)))
    got = [None]
    dist.scatter_object_list(got, [f"to {r}" for r in range(me.world)], src=0)
    assert got == [f"to {me.rank}"]
    if me.world == 1:
        return  # no peer to send to
    if me.rank == 0:
        dist.send_object_list(["a", 2], dst=me.world - 1)
    elif me.rank == me.world - 1:
        received = [None, None]
        assert dist.recv_object_list(received, src=0) == 0
        assert received == ["a", 2]


def barriers(me: RankContext) -> None:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    group = dist.group.WORLD
    group.monitored_barrier(datetime.timedelta(seconds=20), wait_all_ranks=True)
    group.monitored_barrier(datetime.timedelta(seconds=20))


def parameters(me: RankContext) -> None:
    """Tensors of a model: leaves that require gradients, and views of them."""
    parameter = torch.nn.Parameter(of(me.rank).view(1, N))
    dist.broadcast(parameter, 0)
    same(parameter.detach(), of(0).view(1, N))
    out = [torch.zeros(1, N) for _ in range(me.world)]
    dist.all_gather(out, (parameter * 1.0))
    same(out, [of(0).view(1, N)] * me.world)
    with torch.no_grad():
        dist.all_reduce(parameter[0])
    same(parameter.detach()[0], of(0) * me.world)


def scalars(me: RankContext) -> None:
    x = torch.tensor(float(me.rank + 1))
    dist.all_reduce(x, dist.ReduceOp.MAX)
    assert x.item() == me.world
    out = [torch.zeros(()) for _ in range(me.world)]
    dist.all_gather(out, torch.tensor(float(me.rank)))
    assert [t.item() for t in out] == list(range(me.world))


def inference(me: RankContext) -> None:
    with torch.inference_mode():
        x = of(me.rank)
        dist.all_reduce(x)
        same(x, summed(me.world))


JOBS = (all_gather_uneven, all_gather_into_other_shapes, all_gather_stacked, gather_uneven)
JOBS += (scatter_uneven, all_to_all_uneven, all_to_all_splits, all_to_all_one_sided_splits)
JOBS += (only_one_sends, dtypes_that_only_move, all_reduce_coalesced, all_gather_coalesced)
JOBS += (coalescing_manager, coalescing_of_a_device, gather_in_place, reduce_scatter_in_place)
JOBS += (roots_in_place, objects, barriers, parameters, scalars, inference)
GLOO_LACKS = {
    coalescing_of_a_device: "does not coalesce",
    dtypes_that_only_move: "has none of them",
    all_gather_uneven: "wants equal sizes",
    all_gather_stacked: "wants the ranks along the first dimension",
    gather_uneven: "hangs after the root has raised",
    scatter_uneven: "hangs after the root has raised",
    all_to_all_uneven: "wants equal sizes",
}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=slow_on_processes), 3])
def test_form_of_call(pools, world, job):
    if not OURS and job in GLOO_LACKS:
        pytest.skip(f"{BACKEND} {GLOO_LACKS[job]}")
    pools(world).run(job)
