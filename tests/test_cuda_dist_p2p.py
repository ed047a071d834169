"""send and recv of CUDA tensors between processes on one GPU: the sizes at which they go another
way, whose stream waits for whom, and ends that die. Without a GPU: test_dist_staging_p2p*.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, Pools, caught, fresh, pools_of_a_module
from homes import GPU
from torch import Tensor

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not OURS, reason="stages by itself")]
SECONDS = 120.0  # the first command also makes a CUDA context in every process
NOTICED = 2.0
PIECE = (1 << 20) // 4  # elements of float32: larger messages go in pieces
MOST = 64 * PIECE  # in larger ones
_NAP = 100_000_000  # cycles: some 50 ms


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    yield from pools_of_a_module()


def values(count: int, seed: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32, device=GPU) % 1009 + seed


def around(me: Me) -> list[str]:
    """To the right neighbour, strided and not, each tensor made on a stream that is late."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    wrong = []
    for count in [n + d for n in (4096, PIECE, 4 * PIECE, MOST) for d in (-1, 0, 1)]:
        for stride in (1, 2):
            x, y = (torch.zeros(count * stride, device=GPU)[::stride] for _ in range(2))
            torch.cuda._sleep(_NAP // 10)
            x.copy_(values(count, me.rank))
            y.fill_(-1.0)
            works = [dist.isend(x, right), dist.irecv(y, left)]
            for work in works:
                work.wait()
            x.fill_(-2.0)  # it is the sender's again
            if not torch.equal(y, values(count, left)):
                wrong.append(f"{count} elements, stride {stride}: {y[:3].tolist()}")
    return wrong


@pytest.mark.parametrize("world", [2, 4])
def test_sizes_around_a_ring(pools, world):
    assert pools(world, beside=None).run(around, seconds=SECONDS) == [[]] * world


def by_tag(me: Me) -> list[bool]:
    tags = range(10)
    xs = [values(PIECE + 7 * tag if tag % 3 else 11, tag) for tag in tags]
    ys = [torch.zeros_like(x) for x in xs]
    if me.rank == 0:
        works = [dist.isend(xs[tag], 1, tag=tag) for tag in tags]
    else:
        works = [dist.irecv(ys[t], 0, tag=t) for t in sorted(tags, key=lambda t: t * 7 % 10)]
    for work in works:
        work.wait()
    return [me.rank == 0 or torch.equal(x, y) for x, y in zip(xs, ys, strict=True)]


def test_tags_in_any_order(pools):
    assert pools(2, beside=None).run(by_tag, seconds=SECONDS) == [[True] * 10] * 2


def mixed(me: Me) -> list[bool]:
    """One end on the CPU, by turns, and both on the GPU again."""
    good = []
    for turn in range(6):
        x, y = values(4 * PIECE, turn), torch.zeros(4 * PIECE, device=GPU)
        if turn % 3 == me.rank:
            x, y = x.cpu(), y.cpu()
        if me.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(y, 0)
            good.append(torch.equal(y.cpu(), values(4 * PIECE, turn).cpu()))
    return good


def test_one_end_on_the_cpu(pools):
    assert pools(2, beside=None).run(mixed, seconds=SECONDS) == [[], [True] * 6]


def reached(me: Me) -> list[bool]:
    """Tensors in memory that the receiver reaches, and parts of them."""
    import pycollect

    good = []
    for turn in range(6):
        x = pycollect.empty(4 * PIECE, dtype=torch.float32, device=GPU)[1000 * turn :]
        y = torch.zeros_like(x)
        x.copy_(values(x.numel(), turn))
        if me.rank == 0:
            dist.send(x, 1)
            x.fill_(-1.0)
        else:
            dist.recv(y, 0)
            good.append(torch.equal(y, values(x.numel(), turn)))
    return good


def test_tensors_that_the_receiver_reaches(pools):
    assert pools(2, beside=None).run(reached, seconds=SECONDS) == [[], [True] * 6]


def dies(me: Me, victim: int) -> tuple[Caught, float]:
    x = torch.ones(40 * PIECE, device=GPU)
    for rank in (0, 1):
        if me.rank == rank:
            dist.send(x, 1 - me.rank)
        else:
            dist.recv(x, 1 - me.rank)
    torch.cuda.synchronize()
    if me.rank == victim:
        if victim == 0:
            dist.isend(x, 1)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.6 * (victim == 0))
    start = time.monotonic()
    error = caught(dist.send, x, 1) if me.rank == 0 else caught(dist.recv, x, 0)
    return error, error.when - start


@pytest.mark.parametrize("victim", [0, 1])
def test_an_end_dies(victim):
    with fresh(2) as pool:
        survivor = pool.outcomes(dies, victim, seconds=SECONDS)[1 - victim]
        assert not survivor.error, survivor.error
        error, took = survivor.value
        assert error.kind == "PeerLost", error
        assert f"rank {victim}" in error.text
        assert took < 0.3 + NOTICED


def cycles(me: Me, count: int) -> int:
    """Bytes of the GPU that groups which are gone have kept, torch's cache aside."""
    before = 0
    for i in range(count):
        me.init(f"cycle_{i}")
        x, y = torch.ones(4 * PIECE, device=GPU), torch.zeros(4 * PIECE, device=GPU)
        works = [dist.isend(x, 1 - me.rank), dist.irecv(y, 1 - me.rank)]
        for work in works:
            work.wait()
        dist.barrier()
        dist.destroy_process_group()
        del x, y, works, work
        torch.cuda.synchronize()
        if i == 1:
            before = torch.cuda.mem_get_info(GPU)[0]
    return before - torch.cuda.mem_get_info(GPU)[0]


def test_groups_come_and_go():
    count = int(os.environ.get("PYCOLLECT_TEST_CYCLES", "20"))
    with fresh(2, group=False) as pool:
        lost = pool.run(cycles, count, seconds=SECONDS)
        # Both look at one GPU while the other may be in a group still: a few blocks, not one each.
        assert max(lost) < count * (1 << 20), lost
