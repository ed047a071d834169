"""scatter, gather, replicate and copy_ between host memory, pinned or not, and GPUs.

The contract: after a call, or after a Work's wait(), host outputs hold the result and host inputs
may be overwritten; GPU memory is ordered by its stream.
"""

from __future__ import annotations

import pytest
import torch
from reference import assert_same, expected, place, randoms
from sites import GPU, ON_GPU, STANDS_IN, several_gpus

import pycollect as pc

pytestmark = ON_GPU

# One row, fewer rows than ranks, uneven chunks, and more than any staging buffer holds.
SHAPES = [(1, 3), (3, 5), (1001, 7), (70_001, 3)] + [(9_000_001, 2)] * (not STANDS_IN)
KINDS = ("pageable", "pinned", "gpu")
RANKS = [GPU, "cpu", GPU]


def in_memory(values, kind, layout="contiguous"):
    """Copy the values into memory of the given kind and layout."""
    placed = place(values, layout)
    if kind == "pageable" or STANDS_IN:
        return placed
    whole = placed if placed._base is None else placed._base
    there = whole.to(GPU, copy=True) if kind == "gpu" else whole.pin_memory()
    return there.as_strided(placed.size(), placed.stride(), placed.storage_offset())


def delay_stream():
    """Keep the current stream busy for about 10 ms, so that a missing wait shows."""
    if not STANDS_IN:
        torch.cuda._sleep(20_000_000)


def check(results, wanted, why=""):
    """Host results must be there before anything synchronizes."""
    results = [r if r.is_cuda else r.clone() for r in results]
    assert_same([r.cpu() for r in results], list(wanted), why)


def scatter(x, async_op, ranks=RANKS, **options):
    got = pc.scatter(x, ranks, async_op=async_op, **options)
    got = got.wait() if async_op else got
    assert [g.device for g in got] == pc.devices(ranks)
    return got


def scatter_parts(x, async_op):
    out = [torch.zeros_like(part, device=d) for part, d in zip(parts(x), RANKS, strict=True)]
    got = scatter(x, async_op, chunk_sizes=[len(part) for part in out], out=out)
    assert all(g is o for g, o in zip(got, out, strict=True))
    return got


def parts(x):
    return x.split([len(x) - 1, 0, 1])


def staged(x, async_op):
    got = pc.Communicator([GPU] * 3, peer_access=False).scatter(x, async_op=async_op)
    return got.wait() if async_op else got


def replicate(x, async_op):
    return [t for copies in pc.replicate([x, x[:1]], RANKS) for t in copies]


def gather(x, async_op):
    there = x.to(GPU, copy=True)
    return [pc.gather([x, there], device, dim=1) for device in (None, "cpu", GPU)]


def copy_to(kind):
    def copy(x, async_op):
        dst = in_memory(torch.zeros(x.shape, dtype=x.dtype), kind)
        work = pc.copy_(dst, x, async_op=async_op)
        assert (work.wait() if async_op else work) is None
        return [dst]

    return copy


# Name -> (call, results that it must have).
CALLS = {
    "scatter": (scatter, lambda v: v.tensor_split(3)),
    "scatter columns": (lambda x, a: scatter(x, a, dim=-1), lambda v: v.tensor_split(3, -1)),
    "scatter to 8": (lambda x, a: scatter(x, a, [GPU] * 8), lambda v: v.tensor_split(8)),
    "scatter parts": (scatter_parts, parts),
    "scatter, staged": (staged, lambda v: v.tensor_split(3)),
    "replicate": (replicate, lambda v: [v, v[:1]] * 3),
    "gather": (gather, lambda v: [torch.cat([v, v], 1)] * 3),
    **{f"copy to {kind}": (copy_to(kind), lambda v: [v]) for kind in KINDS},
}
NOT_ASYNC = ("replicate", "gather")


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_inputs_may_be_overwritten_and_host_results_are_there(name, source):
    call, wanted = CALLS[name]
    for shape in SHAPES:
        for async_op in (False,) if name in NOT_ASYNC else (False, True):
            values = randoms(1, shape, torch.int32)[0]
            x = in_memory(values, source)
            delay_stream()
            got = call(x, async_op)
            x.zero_()  # at once on the host, in stream order on a GPU
            check(got, wanted(values), f"{shape}, async {async_op}")


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


@pytest.mark.parametrize("kind", KINDS)
def test_many_scatters_share_the_staging_buffers(kind):
    many = [randoms(1, (100_000 + i,), torch.int32, seed=i)[0] for i in range(20)]
    sources = [in_memory(v, kind) for v in many]
    delay_stream()
    works = [pc.scatter(s, [GPU] * 4, async_op=True) for s in sources]
    for values, work in zip(many, works, strict=True):
        check(work.wait(), values.tensor_split(4))


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


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_an_async_copy_keeps_its_source_alive(source, target):
    values = randoms(1, (1_000_003,), torch.int32)[0]
    src, dst = in_memory(values, source), in_memory(torch.zeros_like(values), target)
    delay_stream()
    work = pc.copy_(dst, src, async_op=True)
    del src
    spoilers = [in_memory(torch.zeros_like(values), kind) for kind in KINDS]
    work.wait()
    assert_same([dst.cpu()], [values])
    del spoilers


# Counts of less than one piece, and of many pieces, of the staging ring for pageable memory.
@pytest.mark.parametrize("count", [1_003, 3_000_001])
@pytest.mark.parametrize("kinds", [("pageable",) * 2, ("pinned", "pageable"), ("pinned",) * 2])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter", "all_gather"])
def test_ranks_in_host_memory_have_their_results_on_return(collective, kinds, count):
    values = randoms(3, (count,), torch.float32)
    tensors = [in_memory(v, kind) for v, kind in zip(values, ("gpu", *kinds), strict=True)]
    delay_stream()
    check(getattr(pc, collective)(tensors) or tensors, expected(collective, values))


@pytest.mark.cuda
def test_a_pageable_scatter_does_not_wait_for_the_gpu():
    values = randoms(1, (100_000,), torch.int32)[0]
    pc.scatter(values, [GPU] * 2)  # one-time allocations happen here
    torch.cuda.synchronize()
    delay_stream()
    done = torch.cuda.Event()
    got = pc.scatter(values, [GPU] * 2)
    done.record()
    assert not done.query(), "the host waited"
    check(got, values.tensor_split(2))


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
