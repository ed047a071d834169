"""CUDA tensors through torch.distributed: processes that share a GPU, with the bits of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import dist_staged
import pytest
import torch
import torch.distributed as dist
from dist_pool import Caught, Me, Pools, backend_of, caught, fresh, pools_of_a_module
from dist_rungs import RUNGS, on_rung
from homes import GPU, MARKS, STANDS_IN
from reference import DTYPES, short

pytestmark = MARKS
WORLDS = (2, 4)
SECONDS = 120.0  # the first command also makes a CUDA context in every process


@pytest.fixture(scope="module", params=RUNGS)
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    yield from pools_of_a_module(environ=on_rung(request.param))


def report(found: list[list[str]]) -> None:
    lines = [f"rank {r}: {line}" for r, wrong in enumerate(found) for line in wrong]
    assert not lines, "\n".join([f"{len(lines)} wrong", *lines[:12]])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("world", WORLDS)
def test_bits_of_the_cpu(pools, world, dtype):
    found = pools(world, beside=None).run(dist_staged.sweep, dtype, GPU, seconds=SECONDS)
    assert min(run for run, _ in found) > 80
    report([wrong for _, wrong in found])


@pytest.mark.parametrize("world", WORLDS)
def test_products_and_own_parts(pools, world):
    pool = pools(world, beside=None)
    for dtype in (torch.float32, torch.bfloat16):
        report(pool.run(dist_staged.premultiplied, dtype, GPU, seconds=SECONDS))
        report(pool.run(dist_staged.own_parts, dtype, GPU))


def messages(me: Me) -> list[str]:
    """Small and large ones around a ring, strided and from anybody."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    wrong = []
    for count in (0, 1, 1000, 3_000_000):
        for stride in (1, 2):
            x = torch.full((count * stride,), float(me.rank), device=GPU)[::stride]
            y = torch.full((count * stride,), -1.0, device=GPU)[::stride]
            sent = dist.isend(x, right)
            source = dist.recv(y, None if count == 1000 else left)
            sent.wait()
            if source != left or not bool((y == left).all()):
                wrong.append(f"{count} elements, stride {stride}, from {source}")
    x, y = (torch.full((5,), float(me.rank), device=GPU) for _ in range(2))
    ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return wrong if bool((y == left).all()) else [*wrong, "batch_isend_irecv"]


@pytest.mark.parametrize("world", WORLDS)
def test_messages(pools, world):
    report(pools(world, beside=None).run(messages, seconds=SECONDS))


def refused(me: Me) -> list[Caught]:
    on_gpu, on_host = torch.ones(4, device=GPU), torch.ones(4)
    expanded = torch.ones(1, device=GPU).expand(4)
    return [
        caught(dist.all_reduce_coalesced, [on_gpu, on_host]),
        caught(dist.all_reduce, expanded),
        caught(backend_of().allgather, [[on_gpu[:2]] * me.world], [on_gpu[:2]]),
    ]


@pytest.mark.skipif(STANDS_IN, reason="there is one kind of memory")
def test_refusals(pools):
    for errors in pools(2, beside=None).run(refused, seconds=SECONDS):
        assert [e.kind for e in errors] == ["ValueError"] * 3, errors
        assert "all in host memory or all on GPUs" in errors[0].text


def both_kinds(me: Me) -> list[float]:
    """Groups whose ranks live on one GPU and on all there are, and the host's calls in between."""
    mine = torch.device("cuda", me.rank % torch.cuda.device_count())
    x, y, z = torch.ones(9, device=mine), torch.ones(9), torch.ones(9, device=GPU)
    for t in (x, y, z):
        dist.all_reduce(t)
    dist.barrier()
    gathered: list[object] = [None] * me.world
    dist.all_gather_object(gathered, me.rank)
    return [t.sum().item() for t in (x, y, z)] + [float(sum(gathered))]  # type: ignore[arg-type]


@pytest.mark.skipif(STANDS_IN, reason="there is one kind of memory")
@pytest.mark.parametrize("world", WORLDS)
def test_every_gpu_and_the_host(pools, world):
    found = pools(world, beside=None).run(both_kinds, seconds=SECONDS)
    assert found == [[9.0 * world] * 3 + [world * (world - 1) / 2]] * world


def best(me: Me) -> float:
    x = torch.ones(3, device=GPU)
    dist.all_reduce(x)
    return x.sum().item()


def test_the_best_rung():
    with fresh(2) as pool:
        assert pool.run(best, seconds=SECONDS) == [6.0] * 2
