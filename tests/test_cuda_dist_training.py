"""Models that several processes train with CUDA tensors are trained as by one: DDP and FSDP2."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
from dist_pool import OURS, Me, fresh, pools_of_sites
from dist_site import EMULATED, GPU, REAL, SLABS, by_hand, each, sites
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(not OURS, reason="moves CUDA tensors in ways of its own")
pools = pytest.fixture(pools_of_sites, scope="module")
BATCH, STEPS = 36, 4  # which all worlds divide


def lenet() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def perceptron() -> nn.Sequential:
    """Sizes that no number of ranks divides."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 203), nn.ReLU(), nn.Linear(203, 101), nn.ReLU(),
        nn.Linear(101, 10),
    )  # fmt: skip


def train(net: nn.Module, device: str, rank: int = 0, world: int = 1) -> None:
    """Some steps on this rank's rows of every batch."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        made = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 1, 28, 28, generator=made).tensor_split(world)[rank]
        y = torch.randint(10, (BATCH,), generator=made).tensor_split(world)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
        optimizer.step()


def alone(model: Callable[[], nn.Module]) -> Tensor:
    net = model().to(GPU if torch.cuda.is_available() else "cpu")
    train(net, next(net.parameters()).device.type)
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).cpu()


@by_hand
def replicated(me: Me, bucket_mb: float, placed: bool) -> Tensor:
    os.environ["DDP_DISABLE_COMM_MEM"] = "01"[not placed]
    net = lenet().to(me.site.device)
    ddp = DistributedDataParallel(net, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=placed)
    train(ddp, me.site.device, me.rank, me.world)
    reached = [me.site.reaches(p.grad) for p in net.parameters() if p.grad is not None]
    assert reached == [placed] * len(reached) or (me.spec.site in REAL and not me.site.real)
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).cpu()


@pytest.mark.parametrize("bucket_mb", [0.05, 25.0])
@pytest.mark.parametrize(("site", "world"), each(*EMULATED, *REAL))
def test_replicas(pools, site, world, bucket_mb):
    wanted = alone(lenet)
    for placed in (False, True)[: 1 + site.endswith("stream")]:
        found = pools(world, site=site).run(replicated, bucket_mb, placed)
        assert all(torch.equal(found[0], other) for other in found)
        torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)


@by_hand
def gradients(me: Me) -> float:
    """Those of DDP, which come through futures, beside the sum of all ranks' own."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    ddp = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=0.001)

    def of(model: nn.Module, rank: int) -> Tensor:
        model.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))
        model(x).square().sum().backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    wanted = sum(of(net, rank) / me.world for rank in range(me.world))
    return (of(ddp, me.rank) - wanted).abs().max().item()


@pytest.mark.parametrize("site", EMULATED)
def test_gradients_to_the_bit(pools, site):
    # Two ranks: the sum of two numbers has one order.
    assert pools(2, site=site).run(gradients) == [0.0, 0.0]


@by_hand
def sharded(me: Me, reshard: bool) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(me.site.device).type, (me.world,))
    net = perceptron().to(me.site.device)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh)
    train(net, me.site.device, me.rank, me.world)
    whole = [p.full_tensor().detach().reshape(-1) for p in net.parameters()]  # type: ignore[attr-defined]
    return torch.cat(whole).cpu()


@pytest.mark.slow
@pytest.mark.parametrize("site", sites(*SLABS, *REAL))
def test_shards(site: str) -> None:
    """Whoever holds which."""
    wanted = alone(perceptron)
    with fresh(4, site=site) as pool:
        for reshard in (True, False):
            for found in pool.run(sharded, reshard, seconds=180.0):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
