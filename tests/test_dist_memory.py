"""Tensors in the group's symmetric heap: ordinary torch tensors, used without copies, and freed.

/proc/self/maps shows whether a tensor lies in shared memory. Also tests tensors over 2^31 bytes.
That results have the same bits is tested by test_dist_programs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Caught, RankContext, caught, fresh
from sites import PROCESSES, THREADS, not_on
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

MIB = 2**20
pytestmark = pytest.mark.skipif(not OURS, reason=f"{BACKEND} has no symmetric memory")


def is_shared(tensor: Tensor) -> bool:
    """Whether the tensor lies in a shared mapping."""
    first = tensor.untyped_storage().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= first < high:
            return permissions[3] == "s"
    return False


def by_torch(count: int, dtype: torch.dtype) -> Tensor:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    return backend.allocate_tensor(count, dtype=dtype, device=torch.device("cpu"))


def by_empty(count: int, dtype: torch.dtype) -> Tensor:
    import pycollect

    return pycollect.symmetric_empty(count, dtype=dtype)


def by_allocator(count: int, dtype: torch.dtype) -> Tensor:
    import pycollect

    return pycollect.SymmetricAllocator().empty(count, dtype=dtype)


MAKERS = (by_torch, by_empty, by_allocator)
Make = Callable[[int, torch.dtype], Tensor]


def ordinary(me: RankContext, make: Make) -> None:
    x = make(600, torch.float32)
    assert (x.shape, x.dtype, x.device.type) == ((600,), torch.float32, "cpu")
    assert is_shared(x)
    assert not is_shared(torch.empty(600))
    x.fill_(me.rank)
    view = x.view(20, 30).t()[3:7]
    view += 1
    assert x.sum().item() == 600 * me.rank + 80
    y = x.clone()
    assert not is_shared(y)
    assert torch.equal(x, y)
    x.requires_grad_()
    (x * 2).sum().backward()
    assert x.grad.eq(2).all()
    assert torch.equal(torch.from_numpy(y.numpy()), y)
    assert make(0, torch.int64).shape == (0,)


def views(me: RankContext, make: Make) -> None:
    """Zero-copy views at different offsets on every rank; strided and in-place ones."""
    base = make(10_000, torch.float32)
    x = base[100 * me.rank :][:5000].fill_(me.rank + 1)
    total = me.world * (me.world + 1) / 2
    dist.all_reduce(x)
    assert x.eq(total).all()
    y = base[:9000].view(90, 100).t()[: 10 + 0 * me.rank].fill_(me.rank)
    dist.all_reduce(y, dist.ReduceOp.MAX)
    assert y.eq(me.world - 1).all()
    whole = base[: me.world * 1000]
    mine = whole[1000 * me.rank :][:1000].fill_(me.rank)
    dist.all_gather_into_tensor(whole, mine)
    assert whole.view(me.world, 1000)[:, 0].tolist() == list(range(me.world))


def reuse_after_calls(me: RankContext, make: Make) -> None:
    """A tensor may be overwritten, and its memory reused, as soon as a call is complete."""
    for turn in range(50):
        x = make(100_000, torch.float32).fill_(me.rank + turn)
        dist.all_reduce(x)
        y = x.clone()
        x.fill_(-1)
        del x
        make(100_000, torch.float32).fill_(-2)
        assert y.eq(sum(range(me.world)) + turn * me.world).all()
    works = []
    for _ in range(20):
        y = make(50_000, torch.float32).fill_(1)
        works.append((dist.all_reduce(y, async_op=True), y))
        del y
    for work, y in works:
        work.wait()
        assert y.eq(me.world).all()


def allocate_and_free(me: RankContext, make: Make) -> None:
    """Allocate 64 GiB in total, with at most 64 MiB live at a time."""
    for _ in range(1000):
        x = make(64 * MIB, torch.uint8)
        x[:: 16 * MIB] = 1
        del x
    kept = [make(MIB, torch.uint8).fill_(n) for n in range(8)]
    assert len({x.data_ptr() for x in kept}) == 8
    assert [int(x.sum()) for x in kept] == [n * MIB for n in range(8)]
    dist.barrier()


IN_SHARED_MEMORY = not_on(THREADS, "threads share all memory, so the group has no heap")
JOBS = [
    *(views, reuse_after_calls),
    *(pytest.param(job, marks=IN_SHARED_MEMORY) for job in (ordinary, allocate_and_free)),
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_symmetric_tensors(pools, job, make):
    pools(3).run(job, make)


def tensor_outlives_group(me: RankContext) -> None:
    """A tensor may outlive its group, and be used in the next one."""
    me.init("first")
    x = by_empty(1000, torch.float32).fill_(3)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert x.sum().item() == 3000
    x += 1
    me.init("second")
    dist.all_reduce(x)
    assert x.eq(4 * me.world).all()
    y = by_empty(1000, torch.float32).fill_(1)
    dist.all_reduce(y)
    assert y.eq(me.world).all()


def test_a_tensor_outlives_its_group():
    with fresh(2, group=False) as pool:
        pool.run(tensor_outlives_group)


def buckets(me: RankContext) -> list[bool]:
    os.environ["DDP_DISABLE_COMM_MEM"] = "0"
    torch.manual_seed(me.rank)
    net = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 50))
    model = DDP(net, bucket_cap_mb=0.05, gradient_as_bucket_view=True)
    shared: list[bool] = []

    def hook(state, bucket):  # no annotations: DDP rejects those that are strings
        buffer = bucket.buffer()
        shared.append(is_shared(buffer))
        buffer /= me.world
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])

    model.register_comm_hook(None, hook)
    for _ in range(3):
        model(torch.randn(7, 100)).square().sum().backward()
    shared += [is_shared(p.grad) for p in net.parameters()]
    grads = torch.cat([p.grad.flatten() for p in net.parameters()])
    everybody = [torch.empty_like(grads) for _ in range(me.world)]
    dist.all_gather(everybody, grads)
    assert all(torch.equal(e, grads) for e in everybody)
    return shared


@IN_SHARED_MEMORY
def test_buckets_of_ddp(pools):
    for shared in pools(2).run(buckets):
        assert shared
        assert all(shared), shared


def memory_of_groups(me: RankContext) -> list[list[int]]:
    """Bytes of shared memory of a group that is new, has made small calls, one of 64 KiB, and a
    large one; and of another after a broadcast, in which only the root has staging buffers."""
    found = []
    for _ in range(2):
        before = shared_bytes()
        group = dist.new_group()
        dist.barrier()
        sizes = [shared_bytes() - before]
        for count in (1, 256):
            dist.all_reduce(torch.ones(count), group=group)
            dist.broadcast(torch.ones(count), 0, group=group)
            dist.all_gather_into_tensor(
                torch.ones(count * me.world), torch.ones(count), group=group
            )
            dist.all_to_all_single(*torch.ones(2, count * me.world), group=group)
        peer = dist.isend(torch.ones(10), (me.rank + 1) % me.world, group=group)
        dist.recv(torch.ones(10), (me.rank - 1) % me.world, group=group)
        peer.wait()
        dist.barrier()
        sizes.append(shared_bytes() - before)
        dist.barrier()
        for count in (16384, MIB):
            dist.all_reduce(torch.ones(count), group=group)
            dist.barrier()
            sizes.append(shared_bytes() - before)
            dist.barrier()
        before = shared_bytes()
        dist.broadcast(torch.ones(MIB), 0, group=dist.new_group())
        dist.barrier()
        found.append([*sizes, shared_bytes() - before])
    return found


def shared_bytes() -> int:
    """Bytes of all shared memory of groups that this process has mapped."""
    files = [path for path in Path("/proc/self/fd").iterdir() if "memfd:pycollect" in target(path)]
    return sum(512 * path.stat().st_blocks for path in files)


def target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # the descriptor of the folder itself
        return ""


@not_on(THREADS, "threads share their memory anyway")
@pytest.mark.parametrize("world", [2, 8])
def test_memory_is_committed_when_it_is_used(world, pools):
    with pools.fresh(world) as pool:
        for sizes in pool.run(memory_of_groups, seconds=60):
            for new, small, medium, large, broadcast in sizes:
                assert new < MIB / 4, sizes
                if pools.ranks_as != PROCESSES:  # of the ranks of one of two hosts
                    assert broadcast < (2 * (world // 2) + 0.5) * MIB, sizes
                    assert large < (6 * (world // 2) + 0.5) * MIB, sizes
                    continue
                assert small <= MIB, sizes
                assert large > 2 * small, sizes
                assert broadcast < 1.5 * MIB, sizes
                # All slots of each rank's two staging buffers, before the first call uses one.
                assert 1.9 * MIB < (medium - small) / world < 2.1 * MIB, sizes
                assert large < medium + MIB, sizes


def invalid_arguments(me: RankContext) -> list[Caught]:
    import pycollect as pc

    devices = [caught(lambda d=d: pc.symmetric_empty(3, device=d)) for d in ("cuda:0", "meta")]
    gloo = dist.new_group(backend="gloo")
    return [
        *devices,
        caught(pc.symmetric_empty, -1),
        caught(lambda: pc.symmetric_empty(3, group=gloo)),
        caught(by_empty, 2**50, torch.uint8),
    ]


@IN_SHARED_MEMORY
def test_invalid_arguments_raise(pools):
    for on_gpu, on_meta, negative, foreign, too_much in pools(2).run(invalid_arguments):
        assert "device is 'cuda:0'; symmetric memory is host memory" in on_gpu.text
        assert "device is 'meta'; symmetric memory is host memory" in on_meta.text
        assert "no dimension may be negative" in negative.text
        assert "make the group with 'pycollect'" in foreign.text
        assert too_much.kind in ("RuntimeError", "ValueError", "MemoryError"), too_much
        assert str(2**50) in too_much.text
        assert {e.kind for e in (on_gpu, on_meta, negative, foreign)} == {"ValueError"}


# --- over 2^31 bytes ------------------------------------------------------------------------------

HUGE = 2**31 + 12_345
_NEEDED = 9 * 2**30  # bytes: input and output of about 2 GiB each on two ranks, and a margin


def available_bytes() -> int:
    (line,) = [x for x in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in x]
    return int(line.split()[1]) * 1024


def ends(x: Tensor) -> list[int]:
    return [int(x[n]) for n in (0, 1, len(x) // 2, len(x) // 2 + 1, len(x) - 2, len(x) - 1)]


def huge(me: RankContext, kind: str) -> None:
    other = 1 - me.rank
    if kind == "gather":
        half = HUGE // 2
        x = torch.full((half,), me.rank + 1, dtype=torch.uint8)
        whole = torch.empty(2 * half, dtype=torch.uint8)
        dist.all_gather_into_tensor(whole, x)
        assert ends(whole[:half]) + ends(whole[half:]) == [1] * 6 + [2] * 6
        return
    x = torch.empty(HUGE, dtype=torch.uint8)
    x[: HUGE // 2], x[HUGE // 2 :] = 10 + me.rank, 20 + me.rank
    x[-1] = 30 + me.rank
    if kind == "all_reduce":
        dist.all_reduce(x)
        assert ends(x) == [21, 21, 41, 41, 41, 61]
    elif kind == "broadcast":
        dist.broadcast(x, 1)
        assert ends(x) == [11, 11, 21, 21, 21, 31]
    elif me.rank == 0:
        dist.send(x, other)
    else:
        dist.recv(x, other)
        assert ends(x) == [10, 10, 20, 20, 20, 30]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "gather", "message"])
def test_over_2_31_bytes(kind):
    if available_bytes() < _NEEDED:
        pytest.skip(f"needs {_NEEDED >> 30} GiB of free memory, {available_bytes() >> 30} are free")
    with fresh(2) as pool:
        pool.run(huge, kind, seconds=90)
