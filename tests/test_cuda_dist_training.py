"""DDP and FSDP2 with CUDA tensors on several processes train a model as one process does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from devices import cpu_by_default
from dist_pool import OURS, RankContext, fresh
from sites import EMULATED, REAL, sites
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
BATCH, STEPS = 36, 4  # every world size divides the batch


def perceptron() -> nn.Sequential:
    """A perceptron with layer sizes that no world size divides."""
    net = nn.Sequential(
        nn.Linear(30, 203), nn.ReLU(), nn.Linear(203, 101), nn.ReLU(), nn.Linear(101, 10)
    )
    made = torch.Generator().manual_seed(5)  # not torch's own, which ranks that run at once share
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=made) / 10)
    return net


def train(net: nn.Module, me: RankContext, ranks: Sequence[int]) -> None:
    """Train some steps on the rows that belong to these ranks."""
    torch.backends.cuda.matmul.allow_tf32 = False
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        made = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 30, generator=made)
        y = torch.randint(10, (BATCH,), generator=made)
        optimizer.zero_grad()
        for rank in ranks:
            mine, right = (t.tensor_split(me.world)[rank].to(me.site.device) for t in (x, y))
            (nn.functional.cross_entropy(net(mine), right) / len(ranks)).backward()
        optimizer.step()


def parameters(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).cpu()


@cpu_by_default
def train_alone(me: RankContext) -> Tensor:
    """Train with the rows of all ranks in one process, adding gradients rank by rank."""
    net = perceptron().to(me.site.device)
    train(net, me, range(me.world))
    return parameters(net)


@cpu_by_default
def train_with_ddp(me: RankContext, bucket_mb: float, views: bool) -> Tensor:
    net = perceptron().to(me.site.device)
    ddp = DistributedDataParallel(net, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=views)
    train(ddp, me, [me.rank])
    return parameters(net)


@pytest.mark.parametrize("bucket_mb", [0.01, 25.0])
@pytest.mark.parametrize("site", sites(*EMULATED, *REAL))
def test_ddp_equals_one_process(pools, site, bucket_mb):
    for world in (2, 4) if site in REAL else (2,):
        pool = pools(world, site=site)
        wanted = pool.run(train_alone)[0]
        for views in (False, True):
            found = pool.run(train_with_ddp, bucket_mb, views)
            assert all(torch.equal(found[0], other) for other in found)
            assert site in REAL or torch.equal(found[0], wanted)
            torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)


@cpu_by_default
def train_with_fsdp2(me: RankContext, reshard: bool) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(me.site.device).type, (me.world,))
    net = perceptron().to(me.site.device)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh)
    train(net, me, [me.rank])
    whole = [p.full_tensor().detach().reshape(-1) for p in net.parameters()]  # type: ignore[attr-defined]
    return torch.cat(whole).cpu()


@pytest.mark.slow
@pytest.mark.parametrize("site", sites("late", *REAL))
def test_fsdp2_equals_one_process(site: str) -> None:
    """FSDP2 gives the parameters of a single process, with and without resharding."""
    with fresh(4, site=site) as pool:
        wanted = pool.run(train_alone)[0]
        for reshard in (True, False):
            for found in pool.run(train_with_fsdp2, reshard, seconds=180.0):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
