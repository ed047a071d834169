"""Forms of calls in torch.distributed: lists, splits, coalesced, objects, and tensors that are
unlike on the ranks, or overlap.

test_matrix.py covers the product of dtypes, ops, sizes and layouts.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Caught, RankContext, caught
from reference import BITS_OF, LAYOUTS, MOVED, assert_same, left_fold, place, randoms
from sites import PROCESSES, only_on, slow_on_processes
from torch import Tensor

import pycollect

N = 5
LARGE = 200_001  # elements; takes several pieces


def of(rank: int, count: int = N, first: int = 0) -> Tensor:
    """A rank's input: elements differ from each other and between ranks."""
    return torch.arange(first, first + count, dtype=torch.float32) + 1_000_000 * rank


def summed(world: int, count: int = N, first: int = 0) -> Tensor:
    return sum(of(r, count, first) for r in range(world))


def same(actual: object, wanted: object) -> None:
    as_lists = [x if isinstance(x, list) else [x] for x in (actual, wanted)]
    assert_same(*as_lists)


# --- lists and splits -----------------------------------------------------------------------------


def all_gather_uneven(me: RankContext) -> None:
    for scale in (1, LARGE):
        out = [torch.zeros(scale * r) for r in range(me.world)]
        dist.all_gather(out, of(me.rank, scale * me.rank))
        same(out, [of(r, scale * r) for r in range(me.world)])


def all_gather_stacked(me: RankContext) -> None:
    out = torch.zeros(me.world, 2, 3)
    dist.all_gather_into_tensor(out, of(me.rank, 6).view(2, 3))
    same(list(out), [of(r, 6).view(2, 3) for r in range(me.world)])


def roots_uneven(me: RankContext) -> None:
    for root in range(me.world):
        parts = [of(root, r + 1) for r in range(me.world)] if me.rank == root else None
        dist.scatter(out := torch.zeros(me.rank + 1), parts, root)
        same(out, of(root, me.rank + 1))
        gathered = [torch.zeros(r + 1) for r in range(me.world)] if me.rank == root else None
        dist.gather(of(me.rank, me.rank + 1), gathered, root)
        same(gathered or [], [of(r, r + 1) for r in range(me.world)] if gathered else [])


def all_to_all_uneven(me: RankContext) -> None:
    for scale in (1, LARGE):
        sizes = [[scale * ((s + 2 * r) % 3) for r in range(me.world)] for s in range(me.world)]
        out = [torch.zeros(sizes[s][me.rank]) for s in range(me.world)]
        dist.all_to_all(out, [of(me.rank, n, r) for r, n in enumerate(sizes[me.rank])])
        same(out, [of(s, sizes[s][me.rank], me.rank) for s in range(me.world)])


def all_to_all_splits(me: RankContext) -> None:
    """Uneven splits; splits of which only rank 0's for the last rank is not empty; and even ones,
    of which one list may be omitted."""
    ranks, last = range(me.world), me.world - 1
    for sizes, columns in (
        ([[(s * r) % 4 for r in ranks] for s in ranks], 1),
        ([[(s * r) % 4 for r in ranks] for s in ranks], LARGE // 8),
        ([[LARGE * (s == 0 and r == last) for r in ranks] for s in ranks], 1),
        ([[2] * me.world] * me.world, 3),
    ):
        sent, received = sizes[me.rank], [sizes[s][me.rank] for s in ranks]
        rows = [of(s, sum(sizes[s]) * columns).view(-1, columns) for s in ranks]
        out = torch.zeros(sum(received), columns)
        given = None if columns == 3 else received
        dist.all_to_all_single(out, rows[me.rank].clone(), given, sent)
        same(out, torch.cat([rows[s].split(sizes[s])[me.rank] for s in ranks]))


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


def blocks_in_place(me: RankContext) -> None:
    """Lists with the rank's own block as both input and output, in the forms that test_matrix.py
    lacks."""
    for count in (N, LARGE):
        blocks = list(torch.zeros(me.world * count).split(count))
        blocks[me.rank].copy_(of(me.rank, count))
        dist.all_gather(blocks, blocks[me.rank])
        same(blocks, [of(r, count) for r in range(me.world)])
        parts = list(of(me.rank, me.world * count).split(count))
        dist.reduce_scatter(parts[me.rank], parts)
        same(parts[me.rank], summed(me.world, count, me.rank * count))
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
    """Tensors of a model: leaves that require gradients, views of them, inference tensors."""
    parameter = torch.nn.Parameter(of(me.rank).view(1, N))
    dist.broadcast(parameter, 0)
    same(parameter.detach(), of(0).view(1, N))
    out = [torch.zeros(1, N) for _ in range(me.world)]
    dist.all_gather(out, (parameter * 1.0))
    same(out, [of(0).view(1, N)] * me.world)
    with torch.no_grad():
        dist.all_reduce(parameter[0])
    same(parameter.detach()[0], of(0) * me.world)
    with torch.inference_mode():
        dist.all_reduce(x := of(me.rank))
        same(x, summed(me.world))


JOBS = (all_gather_uneven, all_gather_stacked, roots_uneven, all_to_all_uneven, all_to_all_splits)
JOBS += (dtypes_that_only_move, all_gather_coalesced, coalescing_manager, blocks_in_place)
JOBS += (objects, barriers, parameters)
GLOO_LACKS = {
    dtypes_that_only_move: "has none of them",
    all_gather_uneven: "wants equal sizes",
    all_gather_stacked: "wants the ranks along the first dimension",
    roots_uneven: "hangs after the root has raised",
    all_to_all_uneven: "wants equal sizes",
}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=slow_on_processes), 3])
def test_form_of_call(pools, world, job):
    if not OURS and job in GLOO_LACKS:
        pytest.skip(f"{BACKEND} {GLOO_LACKS[job]}")
    pools(world).run(job)


def unequal_blocks(me: RankContext, few: int, many: int) -> None:
    """One rank's block has many elements. Between hosts, a narrow float's sums are wider."""
    ranks = range(me.world)
    for dtype, large in itertools.product((torch.int32, torch.bfloat16), (0, me.world - 1)):
        sizes = [many if r == large else few for r in ranks]
        pattern = torch.arange(sum(sizes)) % 1021 - 300.0  # prime, so a shifted piece differs
        inputs = [(pattern * 10 ** (r % 5) + r).to(dtype) for r in ranks]
        mine, total = inputs[me.rank], left_fold(inputs, "sum")
        parts = total.split(sizes)
        dist.all_reduce(x := mine.clone())
        same(x, total)
        dist.reduce(x := mine.clone(), large)
        same(x if me.rank == large else total, total)
        dist.broadcast(x := mine.clone(), large)
        same(x, inputs[large])
        dist.reduce_scatter(x := torch.empty_like(parts[me.rank]), list(mine.split(sizes)))
        same(x, parts[me.rank])
        dist.all_gather(out := [torch.empty_like(p) for p in parts], mine[: sizes[me.rank]])
        same(out, [t[:n] for t, n in zip(inputs, sizes, strict=True)])
        counts = [[sizes[(s + r) % me.world] for r in ranks] for s in ranks]
        dist.all_to_all_single(x := torch.empty_like(mine), mine, counts[me.rank], counts[me.rank])
        same(x, torch.cat([inputs[s].split(counts[s])[me.rank] for s in ranks]))


MANY = (60_000, 1_500_000, 0)  # more pieces than are under way at a time
SMALL_BUFFERS = (40, 5000, 4096)  # hosts have unlike regions in them, but must cut equal pieces
SIXTY_FOUR = "".join(chr(ord("0") + host) for host in range(64))
BLOCKS = [("abcd", MANY), ("abab", MANY), ("abbbbbbbbb", MANY), ("abbb", SMALL_BUFFERS)]
SLOW_BLOCKS = [(p, MANY) for p in ("ab", "aaaab", "aaaaaabbbbbb", "abbcccc", "abcdefgh")]
SLOW_BLOCKS += [("abbbbbbbbba", MANY), ("abbcccc", SMALL_BUFFERS), (SIXTY_FOUR, SMALL_BUFFERS)]


@pytest.mark.skipif(not OURS, reason="PYCOLLECT_HOST is pycollect's")
@only_on(PROCESSES, "names its own hosts")
@pytest.mark.parametrize(
    ("placement", "blocks"),
    [*BLOCKS, *(pytest.param(*blocks, marks=pytest.mark.slow) for blocks in SLOW_BLOCKS)],
)
def test_unequal_blocks_on_hosts(pools, placement, blocks):
    """A piece that comes too early or too late would have another one's data."""
    few, many, buffer_bytes = blocks
    pool = pools(len(placement), placement=placement, buffer_bytes=buffer_bytes)
    pool.run(unequal_blocks, few, many, seconds=120)


# --- unlike layouts, and memory that is shared ----------------------------------------------------

ours_only = pytest.mark.skipif(not OURS, reason=f"{BACKEND} ignores strides or refuses them")


def different_layouts(me: RankContext) -> None:
    """Ranks have different layouts of the same shape: elements match by index, or all refuse."""
    for shape in ((4, 6), (300, 500)):
        inputs = [of(r, shape[0] * shape[1]).view(shape) for r in range(me.world)]
        x = place(inputs[me.rank], LAYOUTS[me.rank % len(LAYOUTS)])
        error = caught(dist.all_reduce, x)
        assert error.kind in ("", "ValueError"), error
        same(x, inputs[me.rank] if error.kind else sum(inputs))
        y = place(inputs[me.rank], LAYOUTS[(me.rank + 2) % len(LAYOUTS)])
        error = caught(dist.broadcast, y, 1)
        assert error.kind in ("", "ValueError"), error
        same(y, inputs[me.rank if error.kind else 1])


def repeated_inputs(me: RankContext) -> None:
    """Inputs of stride 0, whose elements are all the same memory, are accepted."""
    mine = torch.full((1,), float(me.rank)).expand(4, 5)
    out = [torch.zeros(4, 5) for _ in range(me.world)]
    dist.all_gather(out, mine)
    same(out, [torch.full((4, 5), float(r)) for r in range(me.world)])
    dist.reduce_scatter(part := torch.zeros(4, 5), [mine] * me.world)
    same(part, torch.full((4, 5), float(sum(range(me.world)))))


def half_overlapping_inputs(me: RankContext) -> None:
    """An input that half overlaps its output at another offset: refused, or the right result."""
    for count in (4, 100_000):
        whole = (me.world + 1) * count
        base = of(me.rank, whole)
        mine, out = base[count // 2 :][:count], base[: me.world * count]
        error = caught(dist.all_gather_into_tensor, out, mine)
        assert error.kind in ("", "ValueError"), error
        if not error.kind:
            same(out, torch.cat([of(r, count, count // 2) for r in range(me.world)]))
        base = of(me.rank, whole)
        error = caught(dist.all_to_all_single, base[count:], base[:-count])
        assert error.kind in ("", "ValueError"), error
        if not error.kind:
            same(base[count:], torch.cat([of(r, count, me.rank * count) for r in range(me.world)]))


def root_only(parts: list[Tensor]) -> list[Tensor] | None:
    return None if dist.get_rank() else parts


PARTS: dict[str, Callable[..., Any]] = {
    "all_gather": lambda part, parts, _, **o: dist.all_gather(parts, part, **o),
    "all_gather_into_tensor": lambda part, _, x, **o: dist.all_gather_into_tensor(x, part, **o),
    "gather": lambda part, parts, _, **o: dist.gather(part, root_only(parts), **o),
    "reduce_scatter": lambda part, parts, _, **o: dist.reduce_scatter(part, parts, **o),
    "reduce_scatter_tensor": lambda part, _, x, **o: dist.reduce_scatter_tensor(part, x, **o),
    "scatter": lambda part, parts, _, **o: dist.scatter(part, root_only(parts), **o),
}


def parts_of_the_other_side(me: RankContext) -> None:
    """A tensor may be this rank's own part of the call's other side, but no other rank's part."""
    count, own, other = 300, me.rank, (me.rank + 1) % me.world
    inputs = [of(r, me.world * count) for r in range(me.world)]
    parts = [x.view(me.world, count) for x in inputs]
    gathered = torch.cat([parts[r][r] for r in range(me.world)])
    wholes = {"all_gather": gathered, "all_gather_into_tensor": gathered}
    wholes["gather"] = inputs[own] if own else gathered
    results = {"scatter": parts[0][own]}
    results |= dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor"), sum(parts)[own])
    for new in (torch.empty, pycollect.symmetric_empty):
        for name, call in PARTS.items():
            mine = list((whole := new(me.world * count).copy_(inputs[own])).chunk(me.world))
            error = caught(call, mine[other], mine, whole)
            assert error.kind == "ValueError", (name, error)
            same(whole, inputs[own])
            call(mine[own], mine, whole)
            same(mine[own], results[name]) if name in results else same(whole, wholes[name])


def lazy_clones(me: RankContext) -> None:
    """A call writes a lazy clone, in which it also reads: the original may change meanwhile."""
    count = 300
    for call in PARTS.values():
        original = of(me.rank, me.world * count)
        whole = torch._lazy_clone(original)
        wanted = whole.clone()
        parts = list(whole.chunk(me.world))
        dist.barrier()
        if me.rank > 0:
            time.sleep(0.01)  # so that rank 0 is in the call when it changes the original
        work = call(parts[me.rank], parts, whole, async_op=True)
        original.fill_(-1)
        work.wait()
        call((again := list(wanted.chunk(me.world)))[me.rank], again, wanted)
        same(whole, wanted)


@ours_only
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "job",
    [
        different_layouts,
        repeated_inputs,
        half_overlapping_inputs,
        parts_of_the_other_side,
        lazy_clones,
    ],
)
def test_memory_of_tensors(pools, world, job):
    pools(world).run(job)


def expanded() -> Tensor:
    return torch.zeros(1).expand(12)


def overlapping() -> Tensor:
    return torch.zeros(8).as_strided((3, 4), (2, 1))


def gathered(bad: Tensor) -> None:
    good = [torch.zeros(bad.shape) for _ in range(dist.get_world_size() - 1)]
    dist.all_gather([*good, bad], bad + 1)


OUTPUTS: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "all_gather": gathered,
    "reduce_scatter": lambda bad: dist.reduce_scatter(bad, [bad + 1] * dist.get_world_size()),
}


def refused_output(
    me: RankContext, call: str, make: Callable[[], Tensor], ranks: tuple[int, ...]
) -> Caught:
    """A call whose output overlaps itself on some ranks; the group stays usable."""
    error = caught(OUTPUTS[call], make() if me.rank in ranks else make().clone())
    dist.all_reduce(x := torch.ones(3))
    assert x.tolist() == [me.world] * 3
    return error


@ours_only
@pytest.mark.parametrize("call", OUTPUTS)
@pytest.mark.parametrize("make", [expanded, overlapping])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_outputs_that_overlap_are_refused(pools, call, make, ranks):
    errors = pools(3).run(refused_output, call, make, ranks)
    for rank, error in enumerate(errors):
        assert "ValueError" in error.kinds, f"rank {rank}: {error}"
        assert rank in ranks or "rank 1" in error.text, error
    assert all(".clone()" in errors[r].text for r in ranks), errors


def shared_outputs(me: RankContext) -> list[Caught]:
    base = torch.zeros(12)
    error = caught(dist.all_gather, [base[:8], base[4:]], torch.ones(8))
    assert not base.any()
    return [error, caught(dist.broadcast, torch.eye(12).to_sparse(), 0)]


@ours_only
def test_outputs_that_share_memory_or_are_sparse_are_refused(pools):
    for shared, sparse in pools(2).run(shared_outputs):
        assert shared.kind == "ValueError", shared
        assert sparse.kind, "nothing was raised"
