"""CUDA tensors through torch.distributed have the bits of the CPU, whatever way they go."""

from __future__ import annotations

from typing import Any

import dist_staged
import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, backend_of, caught, fresh, pools_of_sites
from dist_site import EMULATED, LARGE, REAL, SLAB_BYTES, SLABS, each, is_real
from reference import DTYPES, short

pytestmark = pytest.mark.skipif(not OURS, reason="moves CUDA tensors in ways of its own")
pools = pytest.fixture(pools_of_sites, scope="module")

# Quick runs have a type of each kind on emulated devices: what is staged is bytes, and the host's
# calls fold them. On late ones more may be missed.
USUAL = {torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64}


def every() -> list[Any]:
    found = [
        pytest.param(
            *place.values,
            dtype,
            id=f"{place.id}-{short(dtype)}",
            marks=[*place.marks]
            + [pytest.mark.slow] * (not is_real(place.values[0]) and dtype not in USUAL)
            + [pytest.mark.slow] * (place.values[0] == "eager:stream" and dtype != torch.float32),
        )
        for place in each(*EMULATED, *REAL)
        for dtype in DTYPES
    ]
    return found + [("eager:stream", world, torch.float32) for world in (1, 2, 4)]


def right(pool: Any, dtype: torch.dtype) -> None:
    found = pool.run(dist_staged.sweep, dtype, seconds=180.0)
    assert min(run for run, _ in found) > 60
    dist_staged.report([wrong for _, wrong in found])


def launched(me: Me) -> int:
    return me.site.launched()


@pytest.mark.parametrize(("site", "world", "dtype"), every())
def test_bits_of_the_cpu(pools, site, world, dtype):
    pool = pools(world, site=site)
    right(pool, dtype)
    if site in SLABS:
        assert min(pool.run(launched)) > 60  # or else it went another way


@pytest.mark.parametrize(("site", "world"), [("", 3), *each(*EMULATED, *REAL)])
def test_products_and_own_parts(pools, site, world):
    pool = pools(world, site=site)
    for dtype in (torch.float32, torch.bfloat16):
        dist_staged.report(pool.run(dist_staged.premultiplied, dtype))
        dist_staged.report(pool.run(dist_staged.own_parts, dtype))


SLOT = SLAB_BYTES // 2 // 4  # elements of float32
EDGES = sorted({n + d for n in (SLOT // 3, SLOT, 2 * SLOT, 3 * SLOT) for d in (-16, -1, 0, 1, 16)})


def at_the_edges(me: Me) -> list[str]:
    """Sizes around those of a slot, of all its regions, and of several slots."""
    wrong = []
    for count in EDGES:
        x = torch.arange(count, dtype=torch.float32) % 1013 + me.rank
        wanted = (torch.arange(count) % 1013 * me.world + me.world * (me.world - 1) / 2).float()
        dist.all_reduce(x)
        out = torch.empty(me.world * count)
        dist.all_gather_into_tensor(out, torch.full((count,), float(me.rank)))
        ranks = torch.arange(me.world).float().repeat_interleave(count)
        if not torch.equal(x, wanted) or not torch.equal(out, ranks):
            wrong.append(f"{count} elements")
    return wrong


def apart(me: Me) -> list[str]:
    """Ranks on several GPUs share the folds; on one, each has two launches a piece."""
    me.fake.gpu.live_on(f"GPU {me.rank}")
    wrong = at_the_edges(me)
    x = torch.full((LARGE,), float(me.rank))
    made, pieces = me.site.launches(lambda: dist.all_reduce(x)), LARGE // SLOT + 1
    if not bool((x == 3).all()) or made <= 2 * pieces:
        wrong.append(f"{made} launches for {pieces} pieces")
    return wrong


@pytest.mark.parametrize("site", SLABS)
def test_sizes_around_a_slot(pools, site):
    dist_staged.report(pools(3, site=site).run(at_the_edges))
    with fresh(3, site=site) as pool:
        dist_staged.report(pool.run(apart))


def refused(me: Me) -> tuple[list[Caught], float]:
    x, on_host = torch.ones(12), me.site.host(torch.ones(12))
    errors = [
        caught(dist.all_reduce_coalesced, [x, on_host]),
        caught(dist.all_to_all_single, on_host, x),
        caught(backend_of().allgather, [[x[:2]] * me.world], [x[:2]]),
        caught(dist.all_reduce, torch.ones(1).expand(4)),
    ]
    dist.all_reduce(x)
    dist.all_reduce(on_host)  # by itself it is as good as any
    return errors, x.sum().item() + on_host.sum().item()


def disagreeing(me: Me) -> tuple[list[Caught], float]:
    last = me.rank == me.world - 1
    x, y, z = torch.ones(10), torch.ones(4), torch.ones(4)
    dist.all_reduce(x)
    errors = [
        caught(dist.all_reduce, torch.ones(10 + last)),
        caught(dist.broadcast, torch.ones(3), 0) if last else caught(dist.all_reduce, x),
        caught(dist.all_reduce, torch.ones(1).expand(4 if last else 1)),
        caught(dist.all_reduce, me.site.host(y) if last else y),
    ]
    dist.all_reduce(z)
    return errors, z.sum().item()


@pytest.mark.parametrize(("site", "world"), each(*EMULATED, *REAL, stands_in=False))
def test_what_is_refused(pools, site, world):
    """By each rank for itself, or by all when they do not ask for the same; the group goes on."""
    for errors, total in pools(world, site=site).run(refused):
        assert [e.kind for e in errors] == ["ValueError"] * 4, errors
        assert all("all in host memory or all on GPUs" in e.text for e in errors[:2]), errors
        assert total == 24.0 * world
    for errors, total in pools(world, site=site).run(disagreeing):
        assert [e.kind for e in errors[:3]] == ["ValueError"] * 3, errors
        assert f"rank {world - 1} called all_reduce of 11 float32" in errors[0].text
        assert f"rank {world - 1} called broadcast" in errors[1].text
        assert f"rank {world - 1} refused all_reduce" in errors[2].text
        if site.endswith("stream"):  # what is staged goes the host's way
            assert "called all_reduce of 4 float32, op sum, on the host" in errors[3].text
            assert errors[3].kind == "ValueError"
        assert total == 4.0 * world
