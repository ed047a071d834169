"""Users of torch.distributed on ranks as threads: each as one process, twice with equal bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import test_dist_sharded as sharded
import torch
import torch._dynamo  # DDP imports it, for some seconds
import torch.distributed as dist
from dist_rank import OLD_TORCH, RankContext
from reference import assert_same
from test_dist_sharded import STEPS, batch, close, loss_of, net
from thread_jobs import WORLD, alone, launch, launch_twice, parameters_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.filterwarnings("ignore")

# --- the jobs of the process pools ----------------------------------------------------------------


@pytest.mark.skipif(OLD_TORCH, reason="FSDP2 of this torch mixes dtypes, between processes too")
@pytest.mark.parametrize(
    "job", [j for j in sharded.JOBS if j is not sharded.compiled], ids=lambda job: job.__name__
)
def test_sharded_as_in_one_process(job, tmp_path):
    launch(job, WORLD, tmp_path)


def test_sharded_and_replicated_as_in_one_process(tmp_path):
    launch(sharded.hsdp, 4, tmp_path)


@pytest.mark.slow
def test_inductor(tmp_path):
    launch(sharded.compiled, WORLD, tmp_path)


# --- data parallel --------------------------------------------------------------------------------


def train_ddp(me: RankContext, prepare: Callable[[DDP], None] = lambda model: None,
              **options: Any) -> list[Tensor]:  # fmt: skip
    model = net()
    if me.rank:  # DDP takes the parameters of rank 0
        for p in model.parameters():
            p.detach().zero_()
    ddp = DDP(model, **options)
    prepare(ddp)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, me.rank, step).backward()
        optimizer.step()
    return parameters_of(model)


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many buckets": {"bucket_cap_mb": 0.0005},
    "views": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


@pytest.mark.parametrize("options", DDP_OPTIONS)
def test_ddp_trains_as_one_process(options, tmp_path):
    job = functools.partial(train_ddp, **DDP_OPTIONS[options])
    for rank in launch_twice(job, WORLD, tmp_path):
        close(rank, alone(WORLD))


def test_ddp_with_a_compressing_hook_trains_nearly_as_one_process(tmp_path):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def job(me: RankContext) -> list[Tensor]:
        return train_ddp(me, lambda ddp: ddp.register_comm_hook(None, fp16_compress_hook))

    results = launch_twice(job, WORLD, tmp_path)
    for rank in results:
        assert_same(rank, results[0])
        for ours, wanted in zip(rank, alone(WORLD), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0.1, atol=0.05)


def test_ddp_with_an_unused_branch(tmp_path):
    def job(me: RankContext) -> list[Tensor]:
        torch.manual_seed(0)
        branches = nn.ModuleList(nn.Linear(10, 4) for _ in range(me.world + 1))
        x, _ = batch(me.rank, 0)
        ddp = DDP(OneOf(branches), find_unused_parameters=True)
        ddp(x, me.rank).sum().backward()
        return [b.weight.grad if b.weight.grad is not None else torch.zeros(0) for b in branches]

    results = launch_twice(job, WORLD, tmp_path)
    for rank in results:
        for n in range(WORLD):
            close([rank[n]], [batch(n, 0)[0].sum(0).expand(4, 10) / WORLD])
        assert rank[WORLD].numel() == 0 or not rank[WORLD].any()


class OneOf(nn.Module):
    """Applies one of its branches."""

    def __init__(self, branches: nn.ModuleList) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: Tensor, n: int) -> Tensor:
        return self.branches[n](x)


def test_ddp_without_synchronisation_accumulates(tmp_path):
    def job(me: RankContext) -> list[Tensor]:
        ddp = DDP(net())
        with ddp.no_sync():
            loss_of(ddp, me.rank, 0).backward()
        loss_of(ddp, me.rank, 1).backward()
        return [p.grad for p in ddp.parameters()]

    model = net()
    (sum(loss_of(model, r, s) for r in range(WORLD) for s in (0, 1)) / WORLD).backward()
    for rank in launch_twice(job, WORLD, tmp_path):
        close(rank, [p.grad for p in model.parameters()])


def test_ddp_with_dropout_draws_as_a_process_of_each_rank(tmp_path):
    def loss(model: nn.Module, rank: int) -> Tensor:
        x, y = batch(rank, 0)
        hidden = nn.functional.dropout(model(x), 0.5, training=True)
        return nn.functional.mse_loss(nn.functional.dropout(hidden, 0.3), y)

    def job(me: RankContext) -> list[Tensor]:
        ddp = DDP(net())
        torch.manual_seed(me.rank)
        dist.barrier()
        loss(ddp, me.rank).backward()
        return [p.grad for p in ddp.parameters()]

    model, losses = net(), []
    for rank in range(WORLD):
        torch.manual_seed(rank)
        losses.append(loss(model, rank))
    (sum(losses) / WORLD).backward()
    for rank in launch_twice(job, WORLD, tmp_path):
        close(rank, [p.grad for p in model.parameters()])


def test_the_zero_optimizer_trains_as_one_process(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def job(me: RankContext) -> list[Tensor]:
        ddp = DDP(net())
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, me.rank, step).backward()
            optimizer.step()
        return parameters_of(ddp)

    for rank in launch_twice(job, WORLD, tmp_path):
        close(rank, alone(WORLD))
