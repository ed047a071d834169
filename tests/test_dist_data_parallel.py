"""Data-parallel training on top of the backend: DDP in its forms, Join, hooks, the ZeRO optimizer.

Each run trains on the backend and, between processes, on gloo, and compares every parameter.
Of pycollect only the backend name is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import RankContext
from reference import assert_same
from sites import slow_on_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 4
pytestmark = [
    slow_on_processes,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.pools_with(second_backend="gloo"),
]


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


def train(me: RankContext, group: dist.ProcessGroup) -> list[Tensor]:
    """Train with DDP; ranks start with different parameters, and DDP takes those of rank 0."""
    model = DDP(net(me.rank), process_group=group, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for n in range(STEPS):
        optimizer.zero_grad()
        step(model, me, n).backward()
        optimizer.step()
    return state(model)


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


def uneven(me: RankContext, group: dist.ProcessGroup) -> list[Tensor]:
    """Rank r has r more batches; DDP and ZeRO shadow the remaining calls of their peers (Join)."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3)), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01
    )
    with Join([model, optimizer]):
        for n in range(2 + me.rank):
            optimizer.zero_grad()
            step(model, me, n).backward()
            optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    assert me.rank or optimizer.state_dict()["state"]
    return state(model)


def power_sgd(me: RankContext, group: dist.ProcessGroup, megabytes: float) -> list[Tensor]:
    """PowerSGD: futures of collectives that start further collectives."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DDP(net(0), process_group=group, bucket_cap_mb=megabytes)
    given = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(given, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(STEPS):
        optimizer.zero_grad()
        step(model, me, n).backward()
        optimizer.step()
    return state(model)


def zero_overlapped(me: RankContext, group: dist.ProcessGroup) -> list[Tensor]:
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
        found += state(model)
    return found


def sparse_gradients(me: RankContext, group: dist.ProcessGroup) -> list[Tensor]:
    torch.manual_seed(0)
    words = nn.EmbeddingBag(40, 6, sparse=True)
    model = DDP(nn.Sequential(words, nn.Linear(6, 3)), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(me, n)
        nn.functional.cross_entropy(model((20 * x.abs()).long() % 40), y).backward()
        assert words.weight.grad.is_sparse
        optimizer.step()
    return state(model)


# What is trained, and how close to gloo's its parameters are; None: gloo runs the collectives that
# callbacks start in an order that differs between ranks.
RUNS: dict[str, tuple[Callable[..., list[Tensor]], dict[str, float] | None]] = {
    "ddp": (train, {}),
    "unused parameters": (unused, {}),
    "sparse gradients": (sparse_gradients, {}),
    "ZeRO and Join": (uneven, {"rtol": 1e-3, "atol": 1e-4}),
    "ZeRO, overlapped": (zero_overlapped, None),
    "PowerSGD": (functools.partial(power_sgd, megabytes=25), {"rtol": 1e-2, "atol": 1e-2}),
    "PowerSGD of many buckets": (functools.partial(power_sgd, megabytes=0.01), None),
}


def trained(me: RankContext, name: str) -> list[Tensor]:
    """Train on the backend, and on gloo if the ranks have it; all ranks have the same bits."""
    run, roughly = RUNS[name]
    ours = run(me, dist.group.WORLD)
    if me.second_group is not None and roughly is not None:
        for mine, other in zip(ours, run(me, me.second_group), strict=True):
            torch.testing.assert_close(mine, other, **roughly)
    for tensor in ours:
        of_all = [torch.empty_like(tensor) for _ in range(me.world)]
        dist.all_gather(of_all, tensor)
        assert_same(of_all, [tensor] * me.world, "bits")
    return ours


@pytest.mark.parametrize("name", RUNS)
def test_training(pools, name):
    assert all(pools(3).run(trained, name, seconds=40))


def test_forms_of_ddp_train_as_one_process(pools):
    pools(3).run(as_one_process, seconds=40)
