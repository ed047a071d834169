"""DistributedDataParallel with several processes on one GPU trains as one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dist_pool import Me, fresh
from dist_rungs import RUNGS, on_rung
from homes import GPU, MARKS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = MARKS
BATCH, STEPS = 32, 5


def lenet() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    ).to(GPU)  # fmt: skip


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 1, 28, 28, generator=made)
    return x.to(GPU), torch.randint(10, (BATCH,), generator=made).to(GPU)


def train(model: nn.Module, rank: int, world: int) -> torch.Tensor:
    """The parameters after some steps on this rank's rows of every batch."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = (t.tensor_split(world)[rank] for t in batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()


def trained(me: Me, bucket_mb: float) -> torch.Tensor:
    ddp = DistributedDataParallel(lenet(), bucket_cap_mb=bucket_mb)
    mine = train(ddp, me.rank, me.world)
    everybody = [torch.empty_like(mine) for _ in range(me.world)]
    dist.all_gather(everybody, mine)
    assert all(torch.equal(mine, other) for other in everybody)
    return mine


@pytest.mark.parametrize("bucket_mb", [0.05, 25.0])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rung", RUNGS)
def test_as_one_process(rung, world, bucket_mb):
    with fresh(world, environ=on_rung(rung)) as pool:
        found = pool.run(trained, bucket_mb, seconds=180.0)
    torch.testing.assert_close(found[0], train(lenet(), 0, 1), rtol=1e-4, atol=1e-5)
