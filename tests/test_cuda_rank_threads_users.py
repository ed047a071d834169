"""Users of torch.distributed on ranks as threads that share a CPU or a GPU, each as one process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it, for some seconds
import torch.distributed as dist
from dist_jobs import MOST_SECONDS
from dist_rank import OLD_TORCH
from dist_sites import GPU, is_real
from reference import assert_same
from test_dist_sharded import close
from torch import Tensor, nn

from pycollect import threads

pytestmark = pytest.mark.filterwarnings("ignore")
WORLD, STEPS = 4, 3
DEVICES = ["cpu", *([pytest.param(GPU, marks=pytest.mark.cuda)] if is_real(GPU) else [])]
device = "cpu"  # of the test that runs


@pytest.fixture(autouse=True, params=DEVICES)
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "device", request.param)


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(12, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 8)
    return nn.Sequential(*layers).to(device)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 12, generator=generator)
    return x.to(device), x[:, :8].to(device)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x), y)


def train(model: nn.Module, loss: Callable[[nn.Module, int], Tensor]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def full(parameters: Any) -> list[Tensor]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return [p.detach().cpu() for p in whole]


def alone() -> list[Tensor]:
    """Train on the mean loss of the batches of all ranks."""
    model = net()
    train(model, lambda m, step: sum(loss_of(m, r, step) for r in range(WORLD)) / WORLD)
    return full(model.parameters())


def launch_twice(program: Callable[..., list[Tensor]], **options: Any) -> list[list[Tensor]]:
    """Return the tensors of all ranks, which two launches must give alike."""
    first, second = (
        threads.launch(program, WORLD, device=device, timeout=min(100, MOST_SECONDS), **options)
        for _ in range(2)
    )
    for rank in range(WORLD):
        assert_same(first[rank], second[rank], f"rank {rank}")
    return first


def with_ddp(model: nn.Module, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **options)


def with_fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(with_ddp, id="ddp"),
        pytest.param(functools.partial(with_ddp, bucket_cap_mb=0.001), id="ddp, many buckets"),
        pytest.param(
            with_fsdp2,
            id="fsdp2",
            marks=pytest.mark.skipif(OLD_TORCH, reason="FSDP2 of this torch mixes dtypes"),
        ),
    ],
)
def test_training_is_as_on_one_gpu(prepare: Callable[[nn.Module], nn.Module], parallel: bool):
    initial = net().state_dict()  # ranks that run at once share one random state

    def program(rank: int, world: int) -> list[Tensor]:
        model = net()
        model.load_state_dict(initial)
        model = prepare(model)
        train(model, lambda m, step: loss_of(m, rank, step))
        return full(model.parameters())

    wanted = alone()
    for rank in launch_twice(program, parallel=parallel):
        close(rank, wanted)


def test_dropout_of_a_rank_is_that_of_a_process():
    def losses(rank: int, model: nn.Module, pause: Callable[[], object]) -> list[Tensor]:
        if rank > 0:  # rank 0 has the caller's random state
            torch.manual_seed(50 + rank)
        found = []
        for step in range(STEPS):
            found.append(loss_of(model, rank, step).detach())
            pause()
        return [torch.stack(found).cpu()]

    def program(rank: int, world: int) -> list[Tensor]:
        return losses(rank, model, dist.barrier)

    model = net(dropout=0.5)
    torch.manual_seed(50)
    for rank, found in enumerate(launch_twice(program)):  # which restores the caller's state
        assert_same(found, losses(rank, model, lambda: None))


def test_a_gpus_streams_are_joined_around_every_call():
    """A rank writes late on its stream, and reads the result at once on the same stream."""

    def program(rank: int, world: int) -> list[Tensor]:
        parts = []
        for n in range(20):
            x = torch.zeros(100_000, device=device)
            if is_real(device):
                torch.cuda._sleep(500_000)
            x += rank + n
            dist.all_reduce(x)
            parts.append(x[::1000] * 2)
        return [torch.cat(parts).cpu()]

    wanted = torch.cat(
        [torch.full((100,), 2.0 * sum(r + n for r in range(WORLD))) for n in range(20)]
    )
    for rank in launch_twice(program):
        assert_same(rank, [wanted])
