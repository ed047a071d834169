"""CUDA tensors in memory that all of a group's processes reach: the same bits, torch's own rules of
streams and lifetimes, nothing leaked, and DDP's buckets there.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import Caught, Me, Pools, backend_of, caught, fresh, pools_of_a_module
from dist_rungs import on_rung
from homes import GPU, MARKS, STANDS_IN
from reference import assert_same, left_fold, randoms
from test_cuda_dist_training import lenet, train
from torch.nn.parallel import DistributedDataParallel

pytestmark = MARKS
RUNGS = ("stream",)  # on the other nobody reaches the tensors
SECONDS = 180.0
MIB = 1 << 20
VICTIM = 1


@pytest.fixture(scope="module", params=RUNGS)
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    yield from pools_of_a_module(beside=None, environ=on_rung(request.param))


def make(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    import pycollect

    return pycollect.empty(*size, dtype=dtype, device=GPU)


def reached(x: torch.Tensor) -> bool:
    import pycollect

    return STANDS_IN or pycollect._C.in_tract(backend_of(), x)


def mixtures(me: Me) -> None:
    """Ranks whose tensors others reach, and ranks whose they do not."""
    for count in (1, 1023, 300_007):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            values = randoms(me.world, (count,), dtype, seed=count)
            wanted = left_fold(values, "sum")
            for mask in (2**me.world - 1, 1, 0b10):

                def new(n: int, dtype: torch.dtype = dtype, mask: int = mask) -> torch.Tensor:
                    if mask >> me.rank & 1:
                        return make(n, dtype=dtype)
                    return torch.empty(n, dtype=dtype, device=GPU)

                x, out, part = new(count), new(me.world * count), new(count)
                x.copy_(values[me.rank])
                dist.all_reduce(x)
                assert_same([x.cpu()], [wanted], f"all_reduce {count} {dtype} {mask:b}")
                x.copy_(values[me.rank])
                dist.broadcast(x, me.world - 1)
                assert_same([x.cpu()], [values[-1]], f"broadcast {count} {dtype} {mask:b}")
                dist.all_gather_into_tensor(out, x)
                assert_same([out.cpu()], [values[-1].repeat(me.world)], f"all_gather {count}")
                out.copy_(torch.cat(values))
                dist.reduce_scatter_tensor(part, out)
                same = left_fold([values[me.rank]] * me.world, "sum")
                assert_same([part.cpu()], [same], f"reduce_scatter {count} {mask:b}")


@pytest.mark.parametrize("world", [2, 4])
def test_same_bits(pools, world):
    pools(world).run(mixtures, seconds=SECONDS)


def views(me: Me) -> None:
    """Parts at other offsets on every rank, whose alignments differ, of several tensors."""
    for _ in range(3):
        room = make(10_000)
        assert reached(room)
        x = room[101 * me.rank :][:5000].fill_(me.rank + 1)
        dist.all_reduce(x)
        assert bool(x.eq(me.world * (me.world + 1) / 2).all())
        whole = room[: me.world * 1000]
        dist.all_gather_into_tensor(whole, whole[1000 * me.rank :][:1000].fill_(me.rank))
        assert whole.view(me.world, 1000)[:, 0].tolist() == list(range(me.world))


def test_parts(pools):
    pools(3).run(views, seconds=SECONDS)


def used_at_once(me: Me) -> None:
    """Torch hands memory out again as soon as a tensor is gone, and not before the call is over."""
    for turn in range(50):
        x = make(MIB).fill_(me.rank + turn)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x.clone()
        del x, work
        z = make(MIB).fill_(-1)
        assert bool(y.eq(sum(range(me.world)) + turn * me.world).all()), turn
        del y, z


def test_used_at_once(pools):
    pools(3).run(used_at_once, seconds=SECONDS)


def on_a_side_stream(me: Me) -> float:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x = make(MIB).fill_(1)
        dist.all_reduce(x)
        x += 1
        total = x.sum()
    torch.cuda.current_stream().wait_stream(side)
    return float(total.item())


@pytest.mark.cuda
def test_streams(pools):
    assert pools(3).run(on_a_side_stream, seconds=SECONDS) == [4.0 * MIB] * 3


def captured(me: Me) -> Caught:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return caught(make, 10)


@pytest.mark.cuda
def test_under_capture(pools):
    for error in pools(2).run(captured, seconds=SECONDS):
        assert error.kind == "ValueError", error
        assert "under capture" in error.text


def outlives(me: Me) -> float:
    me.init("first")
    x = make(1000).fill_(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    gc.collect()
    x += 1
    me.init("second")
    dist.all_reduce(x)
    total = x.sum().item()
    dist.destroy_process_group()
    return float(total)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_tensor_outlives_its_group(rung):
    with fresh(2, group=False, environ=on_rung(rung)) as pool:
        assert pool.run(outlives, seconds=SECONDS) == [14_000.0] * 2


def bereaved(me: Me) -> tuple[Caught, bool]:
    """The victim has lent its tensor, and dies before its stream comes to the call."""
    x = make(MIB).fill_(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    if me.rank == VICTIM:
        for _ in range(100):
            torch.cuda._sleep(50_000_000)
    work = dist.all_reduce(x, async_op=True)
    if me.rank == VICTIM:
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 30.0
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    error = caught(work.wait)
    address = x.data_ptr()
    del x, work
    torch.cuda.synchronize()
    time.sleep(0.1)
    return error, make(MIB).data_ptr() == address


@pytest.mark.cuda
def test_what_was_lent_is_nobodys():
    with fresh(3, environ=on_rung("stream")) as pool:
        for rank, outcome in enumerate(pool.outcomes(bereaved, seconds=SECONDS)):
            assert outcome.died == (rank == VICTIM)
            if rank == VICTIM:
                continue
            assert not outcome.error, outcome.error
            error, again = outcome.value
            assert error.kind == "PeerLost", error
            assert not again


def cycles(me: Me, count: int) -> list[int]:
    """Free bytes of the GPU, with 64 MiB of tensors in each group."""
    free = []
    for i in range(count):
        me.init(f"cycle_{i}")
        xs = [make(8 * MIB).fill_(1) for _ in range(2)]
        for x in xs:
            dist.all_reduce(x)
        assert all(bool(x.eq(me.world).all()) for x in xs)
        del x
        xs.clear()
        dist.destroy_process_group()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        time.sleep(0.05)  # until the other has come here too
        free.append(torch.cuda.mem_get_info()[0])
    return free


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("rung", RUNGS)
def test_groups_come_and_go(rung):
    with fresh(2, group=False, environ=on_rung(rung)) as pool:
        for free in pool.run(cycles, 20, seconds=SECONDS):
            assert free[-1] > free[2] - 64 * MIB, free  # one group's would be as much


def expandable(me: Me) -> bool:
    x = make(MIB).fill_(1)
    y = torch.ones(MIB, device=GPU)
    for t in (x, y):
        dist.all_reduce(t)
    return reached(x) and bool(x.eq(me.world).all()) and bool(y.eq(me.world).all())


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_beside_expandable_segments(name):
    setting = ((name, "expandable_segments:True"),)
    with fresh(2, environ=(*on_rung("stream"), *setting)) as pool:
        assert pool.run(expandable, seconds=SECONDS) == [True, True]


def trained(me: Me) -> torch.Tensor:
    os.environ["DDP_DISABLE_COMM_MEM"] = "0"
    ddp = DistributedDataParallel(lenet(), gradient_as_bucket_view=True)
    after = train(ddp, me.rank, me.world)
    assert all(reached(p.grad) for p in ddp.parameters())
    return after


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rung", RUNGS)
def test_distributed_data_parallel(rung, world):
    with fresh(world, environ=on_rung(rung)) as pool:
        found = pool.run(trained, seconds=SECONDS)
    assert all(torch.equal(found[0], other) for other in found)
    torch.testing.assert_close(found[0], train(lenet(), 0, 1), rtol=1e-4, atol=1e-5)
