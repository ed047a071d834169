"""FSDP2 with several processes on one GPU trains as one process does, whoever holds which shard."""

from __future__ import annotations

import pytest
import torch
from dist_pool import Me, fresh
from homes import GPU, MARKS
from torch import Tensor, nn

from pycollect import _C

pytestmark = MARKS
WORLD, BATCH, STEPS = 4, 32, 4
RUNGS = _C.cuda_rungs()[1:]


def model() -> nn.Sequential:
    """Sizes that no number of ranks divides."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(30, 203), nn.ReLU(), nn.Linear(203, 101), nn.ReLU(), nn.Linear(101, 10)
    ).to(GPU)


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 30, generator=made)
    return x.to(GPU), torch.randint(10, (BATCH,), generator=made).to(GPU)


def train(net: nn.Module, rank: int, world: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, y = (t.tensor_split(world)[rank] for t in batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def sharded(me: Me, reshard: bool) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(GPU).type, (me.world,))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh)
    train(net, me.rank, me.world)
    whole = [p.full_tensor().detach().reshape(-1) for p in net.parameters()]  # type: ignore[attr-defined]
    return torch.cat(whole).cpu()


@pytest.mark.slow
@pytest.mark.parametrize("rung", RUNGS)
def test_as_one_process(rung: str) -> None:
    alone = model()
    train(alone, 0, 1)
    wanted = torch.cat([p.detach().reshape(-1) for p in alone.parameters()]).cpu()
    with fresh(WORLD, environ=(("PYCOLLECT_CUDA_SYNC", rung),)) as pool:
        for reshard in (True, False):
            for found in pool.run(sharded, reshard, seconds=180.0):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
