"""send and recv of CUDA tensors: all sizes, ends in different memory, and the jobs of host memory.

Messages go through pinned memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_dist_p2p as on_host
import torch
import torch.distributed as dist
from dist_pool import OURS, RankContext
from sites import EMULATED, REAL, THREADS, not_on, site_worlds, sites
from torch import Tensor

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
MIB = (1 << 20) // 4  # float32 elements
LARGE = 3 * MIB + 3  # elements; more than the buffers between two ranks


def values(count: int, seed: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32) % 1009 + seed


def finish(works: list[Any]) -> None:
    for work in works:
        work.wait()


# --- sizes ----------------------------------------------------------------------------------------

SIZES = (0, 1, 1000, 4097, MIB - 1, MIB, MIB + 1, 400_000, LARGE)


def around_a_ring(me: RankContext) -> list[str]:
    """Send to the right, receive from the left or any source; strided or not, filled late."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    wrong = []
    for count in (*SIZES, *[64 * MIB] * me.site.real):
        for stride in (1, 2):
            y = torch.full((count * stride,), -1.0)[::stride]
            me.site.fill_later(y, -2.0)
            x = values(count * stride, me.rank)[::stride]
            sent = dist.isend(x, right)
            source = dist.recv(y, None if count in (1000, MIB) else left)
            sent.wait()
            x.fill_(-3.0)  # the sender may reuse its tensor after wait()
            if source != left or not torch.equal(y, values(count * stride, left)[::stride]):
                wrong.append(f"{count} elements, stride {stride}, from {source}: {y[:3]}")
    return wrong


@pytest.mark.parametrize(("site", "world"), site_worlds(*EMULATED, *REAL))
def test_around_a_ring(pools, site, world):
    assert pools(world, site=site).run(around_a_ring) == [[]] * world


def ends_in_different_memory(me: RankContext) -> list[int]:
    """Messages between host memory and GPU."""
    wrong = []
    for turn in range(6):
        x = values(LARGE - 1000 * turn, turn)
        y = torch.zeros_like(x)
        if turn % 3 == me.rank:
            x, y = me.site.host(x), me.site.host(y)
        if me.rank == 0:
            dist.send(x, 1)
            x.fill_(-1.0)  # the sender may reuse its tensor after send()
        else:
            dist.recv(y, 0)
            wrong += [] if torch.equal(y.cpu(), values(y.numel(), turn).cpu()) else [turn]
    return wrong


JOBS_OF_HOSTS = (*on_host.ALSO_ALONE, on_host.from_any_source)
JOBS_OF_HOSTS += (on_host.collectives_past_messages, on_host.messages_past_collectives)


@pytest.mark.parametrize("site", sites(*EMULATED, *REAL))
@pytest.mark.parametrize(
    "job",
    [
        *(pytest.param(j, id=j.__name__) for j in (ends_in_different_memory, *JOBS_OF_HOSTS)),
        pytest.param(
            on_host.dtypes,
            id="dtypes",
            marks=not_on(THREADS, "torch copies between layouts where the emulator does not see"),
        ),
    ],
)
def test_messages(pools, site, job):
    assert not any(pools(2, site=site).run(job))


@pytest.mark.parametrize("kind", on_host.MISMATCHES)
def test_mismatched_messages_raise(pools, kind):
    sent, out = on_host.MISMATCHES[kind]
    _, (receiver,) = pools(2, site="late").run(on_host.mismatched, sent, out, False)
    assert receiver.kind == "ValueError"
    assert receiver.text.startswith(f"rank 0 sent {sent.nbytes} bytes of "), receiver
