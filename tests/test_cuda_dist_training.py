"""DDP and FSDP2 with CUDA tensors on several processes train a model as one process does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from devices import cpu_by_default
from dist_pool import OURS, RankContext
from sites import EMULATED, PROCESSES, REAL, only_on, sites
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


@cpu_by_default
def train_alone(me: RankContext) -> Tensor:
    """Train with the rows of all ranks in one process, adding gradients rank by rank."""
    net = perceptron().to(me.site.device)
    train(net, me, range(me.world))
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).cpu()


def in_ddp(net: nn.Module, me: RankContext, bucket_mb: float) -> nn.Module:
    return DistributedDataParallel(
        net, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=bucket_mb < 1
    )


def in_fsdp2(net: nn.Sequential, me: RankContext, reshard: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(me.site.device).type, (me.world,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(net, mesh=mesh)


@cpu_by_default
def train_together(me: RankContext, wrap: Callable[..., nn.Module], how: float | bool) -> Tensor:
    net = perceptron().to(me.site.device)
    train(wrap(net, me, how), me, [me.rank])
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in net.parameters()]
    return torch.cat([t.reshape(-1) for t in whole]).cpu()


WRAPPED = [(in_ddp, 0.01), (in_ddp, 25.0)]
WRAPPED += [
    pytest.param(in_fsdp2, how, marks=[pytest.mark.slow, only_on(PROCESSES, "as in torchrun")])
    for how in (True, False)
]


@pytest.mark.parametrize(("wrap", "how"), WRAPPED)
@pytest.mark.parametrize("site", sites(*EMULATED, *REAL))
def test_models_train_as_in_one_process(pools, site, wrap, how):
    """DDP and FSDP2, with and without resharding."""
    pool = pools(4 if wrap is in_fsdp2 or site in REAL else 2, site=site)
    wanted = pool.run(train_alone)[0]
    first, *others = pool.run(train_together, wrap, how, seconds=180.0)
    assert all(torch.equal(first, other) for other in others)
    assert site in REAL or wrap is in_fsdp2 or torch.equal(first, wanted)
    torch.testing.assert_close(first, wanted, rtol=1e-4, atol=1e-5)
