"""scatter, gather, replicate and copy_ between host memory, pinned or not, and GPUs.

The contract: after a call, or after a Work's wait(), host outputs hold the result and host inputs
may be overwritten; GPU memory is ordered by its stream.
"""

from __future__ import annotations

import pytest
import torch
from device_placements import GPU, MARKS, STANDS_IN, VIRTUAL, several_gpus
from reference import DTYPES, assert_same, expected, place, randoms, short

import pycollect as pc

pytestmark = MARKS

# One row, fewer rows than ranks, uneven chunks, and more than any staging buffer holds.
SHAPES = [(1, 3), (3, 5), (1001, 7), (70_001, 3)] + [(9_000_001, 2)] * (not STANDS_IN)
KINDS = ("pageable", "pinned", "gpu")
WORLDS = (1, 2, 3, 8)


def in_memory(values, kind, layout="contiguous"):
    """Copy the values into memory of the given kind and layout."""
    if kind == "gpu":
        base = place(values, layout)
        whole = base if base._base is None else base._base
        there = whole.to(GPU, copy=True)
        return there.as_strided(base.size(), base.stride(), base.storage_offset())
    placed = place(values, layout)
    if kind == "pageable" or STANDS_IN:
        return placed
    whole = placed if placed._base is None else placed._base
    pinned = whole.pin_memory()
    return pinned.as_strided(placed.size(), placed.stride(), placed.storage_offset())


def delay_stream():
    """Keep the current stream busy for about 10 ms, so that a missing wait shows."""
    if not STANDS_IN:
        torch.cuda._sleep(20_000_000)


def ranks(world):
    return [GPU] * world


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter(kind, shape, dim):
    values = randoms(1, shape, torch.int32)[0]
    for world in WORLDS:
        wanted = list(values.tensor_split(world, dim))
        source = in_memory(values, kind)
        delay_stream()
        got = pc.scatter(source, ranks(world), dim=dim)
        source.zero_()  # inputs may be overwritten: at once on the host, in stream order on a GPU
        assert [g.device for g in got] == [torch.device(GPU)] * world
        assert_same([g.cpu() for g in got], wanted, f"world {world}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_scatter_of_every_dtype_and_layout(kind, dtype):
    values = randoms(1, (37, 11), dtype)[0]
    for layout in ("misaligned", "transposed", "columns", "every_other"):
        for dim in (0, 1):
            source = in_memory(values, kind, layout)
            got = pc.scatter(source, ranks(3), dim=dim)
            assert_same([g.cpu() for g in got], list(values.tensor_split(3, dim)), layout)


@pytest.mark.parametrize("kind", KINDS)
def test_scatter_accepts_chunk_sizes_out_and_async_op(kind):
    values = randoms(1, (50_000, 6), torch.float32)[0]
    sizes = [49_000, 0, 1_000]
    wanted = list(values.split(sizes))
    out = [torch.zeros_like(w, device=GPU) for w in wanted]
    for async_op in (False, True):
        source = in_memory(values, kind)
        delay_stream()
        got = pc.scatter(source, ranks(3), chunk_sizes=sizes, out=out, async_op=async_op)
        got = got.wait() if async_op else got
        source.zero_()
        assert all(g is o for g, o in zip(got, out, strict=True))
        assert_same([g.cpu() for g in got], wanted, f"async {async_op}")


@pytest.mark.parametrize("kind", KINDS)
def test_many_scatters_share_the_staging_buffers(kind):
    many = [randoms(1, (100_000 + i,), torch.int32, seed=i)[0] for i in range(20)]
    sources = [in_memory(v, kind) for v in many]
    delay_stream()
    works = [pc.scatter(s, ranks(4), async_op=True) for s in sources]
    for values, work in zip(many, works, strict=True):
        assert_same([g.cpu() for g in work.wait()], list(values.tensor_split(4)))


def test_scatter_over_gpus_and_the_cpu():
    values = randoms(1, (999, 5), torch.float32)[0]
    placements = [GPU, "cpu", GPU]
    for kind in KINDS:
        delay_stream()
        got = pc.scatter(in_memory(values, kind), placements)
        assert [g.device for g in got] == [torch.device(h) for h in placements]
        assert_same([got[1]], [values.tensor_split(3)[1]], f"{kind}: on the host, at once")
        assert_same([g.cpu() for g in got], list(values.tensor_split(3)), kind)


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_copy_in_every_direction(source, target, async_op):
    for shape in ((1,), (100_003,), *SHAPES):
        values = randoms(1, shape, torch.int32)[0]
        src, dst = in_memory(values, source), in_memory(torch.zeros_like(values), target)
        delay_stream()
        work = pc.copy_(dst, src, async_op=async_op)
        if async_op:
            assert work.wait() is None
        src.zero_()
        got = dst.clone() if target != "gpu" else dst  # before anything synchronizes
        assert_same([got.cpu()], [values], shape)


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_copy_between_any_two_layouts(source, target):
    for dtype in (torch.float32, torch.bool, torch.complex128, torch.float8_e5m2):
        values = randoms(1, (33, 20), dtype)[0]
        for there in ("contiguous", "misaligned", "transposed", "columns", "every_other"):
            for here in ("contiguous", "transposed", "every_other"):
                dst = in_memory(torch.zeros_like(values), target, there)
                pc.copy_(dst, in_memory(values, source, here))
                assert_same([dst.cpu()], [values], f"{dtype}, {here} to {there}")


def test_copies_run_in_issue_order():
    values = randoms(1, (400_003,), torch.int32)[0]
    src = in_memory(values, "gpu")
    for _ in range(10):
        first, second, host = torch.zeros_like(src), torch.zeros_like(src), torch.zeros_like(values)
        delay_stream()
        pc.copy_(first, src, async_op=True)
        pc.copy_(second, first, async_op=True)
        pc.copy_(host, second)
        assert_same([host], [values])


def test_an_async_copy_keeps_its_source_alive():
    values = randoms(1, (1_000_003,), torch.int32)[0]
    for kind in KINDS:
        for target in KINDS:
            src, dst = in_memory(values, kind), in_memory(torch.zeros_like(values), target)
            delay_stream()
            work = pc.copy_(dst, src, async_op=True)
            del src
            spoilers = [in_memory(torch.zeros_like(values), k) for k in KINDS]
            work.wait()
            assert_same([dst.cpu()], [values], f"{kind} to {target}")
            del spoilers


@pytest.mark.parametrize("dim", [0, 1])
def test_gather_to_the_host_and_to_a_gpu(dim):
    values = randoms(3, (501, 7), torch.int64)
    for place_of in (ranks(3), [GPU, "cpu", GPU]):
        tensors = [v.to(d) for v, d in zip(values, place_of, strict=True)]
        for device in (None, "cpu", GPU):
            delay_stream()
            got = pc.gather(tensors, device, dim=dim)
            assert got.device == torch.device(device or place_of[0])
            got = got.clone()
            assert_same([got.cpu()], [torch.cat(values, dim)], f"{place_of} to {device}")


@pytest.mark.parametrize("kind", KINDS)
def test_replicate_from_every_kind_of_memory(kind):
    values = [randoms(1, s, torch.float32)[0] for s in ((20, 1, 3, 3), (), (100_003,), (0, 4))]
    sources = [in_memory(v, kind) for v in values]
    delay_stream()
    copies = pc.replicate(sources, [GPU, "cpu", GPU])
    for source in sources:
        source.zero_()
    assert_same(copies[1], values, "on the host, at once")
    for mine, device in zip(copies, (GPU, "cpu", GPU), strict=True):
        assert {t.device for t in mine} == {torch.device(device)}
        assert_same([t.cpu() for t in mine], values)


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather"])
def test_host_ranks_have_their_results_on_return(collective):
    values = randoms(3, (200_003,), torch.int32)
    placements = [GPU, "cpu", GPU]
    for _ in range(5):
        tensors = [v.to(h, copy=True) for v, h in zip(values, placements, strict=True)]
        delay_stream()
        got = getattr(pc, collective)(tensors) or tensors
        assert_same([got[1].clone()], expected(collective, values)[1:2])
        assert_same([g.cpu() for g in got], expected(collective, values))


# Counts of less than one piece, and of many pieces, of the staging ring for pageable memory.
@pytest.mark.parametrize("count", [1_003, 3_000_001])
@pytest.mark.parametrize("kinds", [("pageable",) * 2, ("pinned", "pageable"), ("pinned",) * 2])
def test_reductions_over_host_memory_of_every_kind(kinds, count):
    values = randoms(3, (count,), torch.float32)
    for collective in ("all_reduce", "reduce_scatter", "reduce"):
        places = ("gpu", *kinds)
        tensors = [in_memory(v, place) for v, place in zip(values, places, strict=True)]
        delay_stream()
        got = getattr(pc, collective)(tensors) or tensors
        host = [g.clone() for g in got if not g.is_cuda]  # before anything synchronizes
        got = [g.cpu() if g.is_cuda else host.pop(0) for g in got]
        assert_same(got, expected(collective, values), f"{collective}, {kinds}")


def test_strided_host_memory_is_reduced():
    for layout in ("columns", "every_other", "transposed", "misaligned"):
        values = randoms(2, (77, 60), torch.bfloat16)
        tensors = [in_memory(values[0], "gpu", layout), in_memory(values[1], "pageable", layout)]
        pc.all_reduce(tensors, "avg")
        assert_same([t.cpu() for t in tensors], expected("all_reduce", values, "avg"), layout)


@pytest.mark.cuda
def test_a_pageable_scatter_does_not_wait_for_the_gpu():
    values = randoms(1, (100_000,), torch.int32)[0]
    pc.scatter(values, ranks(2))  # one-time allocations happen here
    torch.cuda.synchronize()
    delay_stream()
    done = torch.cuda.Event()
    got = pc.scatter(values, ranks(2))
    done.record()
    assert not done.query(), "the host waited"
    assert_same([g.cpu() for g in got], list(values.tensor_split(2)))


@pytest.mark.cuda
def test_copies_between_gpus():
    first, second = several_gpus()[:2]
    for shape in SHAPES:
        values = randoms(1, shape, torch.int32)[0]
        for api in (pc, pc.Communicator([first, second], peer_access=False)):
            src = values.to(first)
            dst = torch.zeros_like(src, device=second)
            with torch.cuda.device(first):
                delay_stream()
            api.copy_(dst, src)
            src.zero_()  # the stream of `src` must wait until the copy has read it
            assert_same([dst.cpu()], [values], shape)


def test_pinned_and_pageable_scatter_of_a_communicator():
    values = randoms(1, (77_777,), torch.float16)[0]
    communicator = pc.Communicator(VIRTUAL.devices(4), peer_access=False)
    for kind in KINDS:
        got = communicator.scatter(in_memory(values, kind))
        assert_same([g.cpu() for g in got], list(values.tensor_split(4)), kind)
