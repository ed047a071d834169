"""Data-parallel training on top of the backend: DDP in its forms, Join, hooks, the ZeRO optimizer.

Each job trains on the backend and, between processes, on gloo, and compares every parameter.
Threads have the bits of processes. Of pycollect only the backend name is used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import Pools, RankContext, pools_of_a_module
from dist_ranks import PROCESSES, THREADS, slow_on_processes
from reference import assert_same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 4
pytestmark = [slow_on_processes, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def pools(ranks_as: str) -> Iterator[Pools]:
    yield from pools_of_a_module(ranks_as=ranks_as, second_backend="gloo")


@pytest.fixture(scope="module")
def pools_of_both() -> Iterator[Pools]:
    with contextlib.closing(Pools()) as pools:
        yield pools


class Net(nn.Module):
    """Layers of several sizes, buffers, and a branch that only some ranks take."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 300, bias=False)  # before a norm a bias's gradient is noise
        self.norm = nn.BatchNorm1d(300)
        self.left, self.right = nn.Linear(300, 40), nn.Linear(300, 40)
        self.last = nn.Linear(40, 3)

    def forward(self, x: Tensor, branch: int = 2) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        parts = [self.left, self.right]
        x = sum(p(x) for p in (parts if branch == 2 else parts[branch : branch + 1]))
        return self.last(x)


def batch(me: RankContext, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + me.rank)
    x = torch.randn(8, 20, generator=generator)
    return x, torch.randint(3, (8,), generator=generator)


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def step(model: nn.Module, me: RankContext, n: int, *args: Any) -> Tensor:
    x, y = batch(me, n)
    return nn.functional.cross_entropy(model(x, *args), y)


def state(model: nn.Module) -> list[Tensor]:
    """The state that is equal on all ranks: parameters, not the running means of each rank."""
    return [t.detach().clone() for t in model.parameters()]


def train(me: RankContext, group: dist.ProcessGroup, **options: Any) -> list[Tensor]:
    """Train with DDP; ranks start with different parameters, and DDP takes those of rank 0."""
    model = DDP(net(me.rank), process_group=group, bucket_cap_mb=0.02, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for n in range(STEPS):
        optimizer.zero_grad()
        step(model, me, n).backward()
        optimizer.step()
    return state(model)


def compare(
    me: RankContext,
    run: Callable[[RankContext, dist.ProcessGroup], list[Tensor]],
    **tolerance: float,
) -> list[Tensor]:
    """Compare the run on the backend with that on gloo, which only processes have, and the
    parameters of all ranks; return the parameters."""
    ours = run(me, dist.group.WORLD)
    assert ours
    if me.second_group is not None:
        for mine, other in zip(ours, run(me, me.second_group), strict=True):
            torch.testing.assert_close(mine, other, **tolerance)
    everybody = [None] * me.world
    dist.all_gather_object(
        everybody, [t.double().sum().item() for t in ours], group=me.second_group
    )
    assert all(e == everybody[0] for e in everybody), everybody
    return ours


def ddp(me: RankContext) -> list[Tensor]:
    return compare(me, train)


def ddp_views(me: RankContext) -> list[Tensor]:
    return compare(me, lambda me, group: train(me, group, gradient_as_bucket_view=True))


def ddp_static_graph(me: RankContext) -> list[Tensor]:
    return compare(me, lambda me, group: train(me, group, static_graph=True))


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))


def train_alone(me: RankContext) -> list[Tensor]:
    torch.manual_seed(0)
    alone = small()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for n in range(STEPS):
        optimizer.zero_grad()
        for rank in range(me.world):
            x, y = batch(RankContext(rank, me.spec, ""), n)
            (nn.functional.cross_entropy(alone(x), y) / me.world).backward()
        optimizer.step()
    return state(alone)


FORMS: tuple[tuple[dict[str, Any], bool], ...]  # DDP's options, and whether it compresses
FORMS = (
    ({}, False),
    ({"bucket_cap_mb": 0.0005}, False),
    ({"gradient_as_bucket_view": True}, False),
)
FORMS += (({"find_unused_parameters": True}, False), ({"static_graph": True}, False), ({}, True))


def as_one_process(me: RankContext) -> None:
    """Without batch norm, W ranks with a batch each train like one process with all batches."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wanted = train_alone(me)
    for options, compressed in FORMS:
        torch.manual_seed(me.rank)
        model = DDP(small(), init_sync=True, **options)
        if compressed:
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for n in range(STEPS):
            optimizer.zero_grad()
            step(model, me, n).backward()
            optimizer.step()
        roughly = {"rtol": 0.01, "atol": 1e-3} if compressed else {}
        for mine, one in zip(state(model), wanted, strict=True):
            torch.testing.assert_close(mine, one, **roughly)


def unused(me: RankContext, group: dist.ProcessGroup) -> list[Tensor]:
    model = DDP(net(0), process_group=group, find_unused_parameters=True, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(STEPS):
        optimizer.zero_grad()
        step(model, me, n, (me.rank + n) % 2 if n else 0).backward()
        optimizer.step()
    return state(model)


def find_unused(me: RankContext) -> list[Tensor]:
    return compare(me, unused)


def accumulated(me: RankContext, group: dist.ProcessGroup) -> list[Tensor]:
    model = DDP(net(0), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            step(model, me, 2 * n).backward()
        step(model, me, 2 * n + 1).backward()
        optimizer.step()
    return state(model)


def no_sync(me: RankContext) -> list[Tensor]:
    return compare(me, accumulated)


def uneven(me: RankContext, group: dist.ProcessGroup) -> list[Tensor]:
    """Rank r has r more batches; DDP and ZeRO shadow the remaining calls of their peers (Join)."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3)), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, process_group=group, lr=0.1
    )
    with Join([model, optimizer]):
        for n in range(2 + me.rank):
            optimizer.zero_grad()
            step(model, me, n).backward()
            optimizer.step()
    return state(model)


def join(me: RankContext) -> list[Tensor]:
    return compare(me, uneven)


def zero(me: RankContext, group: dist.ProcessGroup) -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(net(0), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01
    )
    for n in range(STEPS):
        optimizer.zero_grad()
        step(model, me, n).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if me.rank == 0:
        assert optimizer.state_dict()["state"]
    return state(model)


def zero_optimizer(me: RankContext) -> list[Tensor]:
    return compare(me, zero, rtol=1e-3, atol=1e-4)


def hooked(
    me: RankContext,
    group: dist.ProcessGroup,
    hook: Callable[..., Any],
    given: Any,
    megabytes: float = 0.02,
) -> list[Tensor]:
    model = DDP(net(0), process_group=group, bucket_cap_mb=megabytes)
    model.register_comm_hook(given, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(STEPS):
        optimizer.zero_grad()
        step(model, me, n).backward()
        optimizer.step()
    return state(model)


def simple_hooks(me: RankContext) -> list[Tensor]:
    """DDP communication hooks: plain, fp16 and bf16 gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

    def bf16(state, bucket):
        return hooks.bf16_compress_hook(state, bucket)  # under its own name DDP requires NCCL

    roughly = {"rtol": 1e-1, "atol": 1e-2}
    found = compare(me, lambda me, group: hooked(me, group, hooks.allreduce_hook, group))
    for hook in (hooks.fp16_compress_hook, bf16):
        found += compare(me, lambda me, group, hook=hook: hooked(me, group, hook, group), **roughly)
    return found


def power_sgd_hook(me: RankContext) -> list[Tensor]:
    """PowerSGD: futures of collectives that start further collectives. One bucket: with several,
    gloo runs those in an order that differs between ranks."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def run(me: RankContext, group: dist.ProcessGroup) -> list[Tensor]:
        given = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        return hooked(me, group, powerSGD_hook.powerSGD_hook, given, megabytes=25)

    return compare(me, run, rtol=1e-2, atol=1e-2)


def power_sgd_hook_of_buckets(me: RankContext) -> list[Tensor]:
    """The same with many buckets: each one's collectives follow the one that starts them."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    group = dist.group.WORLD
    given = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    return alike(me, hooked(me, group, powerSGD_hook.powerSGD_hook, given, megabytes=0.01))


def zero_overlapped(me: RankContext) -> list[Tensor]:
    """ZeRO whose steps are callbacks of the buckets' futures, and broadcast parameters."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found = []
    for hook in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        model = DDP(net(0), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05
        )
        model.register_comm_hook(None, hook(default_hooks.allreduce_hook, model, optimizer))
        for n in range(STEPS + 2):  # the first two find out the buckets, and do not train
            optimizer.zero_grad()
            step(model, me, n).backward()
            optimizer.step()
        found += alike(me, [p.detach() for p in model.parameters()])
    return found


def alike(me: RankContext, tensors: list[Tensor]) -> list[Tensor]:
    """Assert that all ranks have the same bits."""
    for tensor in tensors:
        of_all = [torch.empty_like(tensor) for _ in range(me.world)]
        dist.all_gather(of_all, tensor)
        assert_same(of_all, [tensor] * me.world, "bits")
    return tensors


def syncs_buffers(me: RankContext) -> None:
    """DDP broadcasts rank 0's buffers before a forward."""
    model = DDP(net(me.rank))
    for n in range(2):
        step(model, me, n)
    model.eval()
    mean = model.module.norm.running_mean
    model.train()
    step(model, me, 3)
    everybody = [torch.zeros_like(mean) for _ in range(me.world)]
    dist.all_gather(everybody, model.module.norm.running_var.clone(), group=me.second_group)
    assert all(torch.isfinite(t).all() for t in everybody)


def monitored(me: RankContext) -> list[Tensor]:
    """DDP with the checks of TORCH_DISTRIBUTED_DEBUG=INFO."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    return compare(me, train)


def averaged(me: RankContext) -> None:
    """PeriodicModelAverager: parameters are averaged every other step."""
    from torch.distributed.algorithms.model_averaging import averagers

    model = net(me.rank)
    averager = averagers.PeriodicModelAverager(period=2, process_group=dist.group.WORLD)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # parameters without one are skipped
        averager.average_parameters(model.parameters())
    wanted = [
        torch.stack(ps).mean(0)
        for ps in zip(*(net(r).parameters() for r in range(me.world)), strict=True)
    ]
    for mine, other in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(mine, other)


COMPARED = (ddp, ddp_views, ddp_static_graph, find_unused, no_sync, join, zero_optimizer)
COMPARED += (power_sgd_hook, power_sgd_hook_of_buckets, zero_overlapped, monitored, simple_hooks)
JOBS = (*COMPARED, as_one_process, syncs_buffers, averaged)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_training(pools, job):
    pools(3).run(job, seconds=40)


@pytest.mark.slow
@pytest.mark.parametrize("job", COMPARED, ids=lambda job: job.__name__)
def test_threads_train_with_the_bits_of_processes(pools_of_both, job):
    torch.set_num_threads(1)  # as in the processes
    threads, processes = (
        pools_of_both(3, ranks_as=kind).run(job, seconds=40) for kind in (THREADS, PROCESSES)
    )
    for ours, wanted in zip(threads, processes, strict=True):
        assert ours
        assert_same(ours, wanted, "bits")
