"""Models, batches and comparisons that the tests of training steps share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycollect import threads
from pycollect.train import Data, ReplicaTrainer
from pycollect.train.shares import shares_of

CPU = torch.device("cpu")
FEATURES, CLASSES = 6, 4


class Calls(nn.Module):
    """A module with the given forward, and a parameter and a buffer for it to use."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("count", torch.zeros(()))
        self.call = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


def batches(sizes: Sequence[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Random batches of vectors with labels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn((n, FEATURES), generator=generator),
            torch.randint(CLASSES, (n,), generator=generator),
        )
        for n in sizes
    ]


def noise() -> Data:
    """Random images [1, 6, 6] of three classes, 41 to train on: of 8, the last batch has one."""
    X, y = (
        torch.randn(50, 1, 6, 6, generator=torch.Generator().manual_seed(3)),
        torch.arange(50) % 3,
    )
    return Data("noise", (X[:41], y[:41]), (X[41:], y[41:]))


def convolutional(*layers: nn.Module) -> nn.Module:
    """A convolution, the given layers for its 4 channels, and a linear layer, for `noise`."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Flatten(), nn.Linear(64, 3))


def perceptron(seed: int = 0) -> nn.Module:
    """Three layers that train within a few steps."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def replicas_of(module: nn.Module, world: int, lr: float = 0.3, **others: Any) -> ReplicaTrainer:
    """Replicas with SGD, momentum and weight decay; others are arguments of ReplicaTrainer."""
    sgd = partial(torch.optim.SGD, lr=lr, momentum=0.9, weight_decay=1e-3)
    devices = others.pop("devices", [CPU] * world)
    return ReplicaTrainer(module, devices, optimizer=sgd, **others)


def trained(module: nn.Module, world: int, sizes: Sequence[int], **others: Any) -> ReplicaTrainer:
    """Replicas after one training step on each random batch of these sizes."""
    replicas = replicas_of(module, world, **others)
    for X, y in batches(sizes):
        replicas.step(X, y)
    return replicas


def trained_ranks(
    make: Callable[[], nn.Module],
    world: int,
    data: Sequence[tuple[Tensor, Tensor]],
    shares: Sequence[int] | None = None,
    **others: Any,
) -> list[nn.Module]:
    """The modules of ranks as threads after a step on each batch, with statistics of all ranks."""

    def run(rank: int, world: int) -> nn.Module:
        mine = replicas_of(make(), 1, group=dist.group.WORLD, sync_batchnorm=True, **others)
        for X, y in data:
            sizes = shares_of(len(X), [1] * world) if shares is None else shares
            own = (part.split(list(sizes))[rank] for part in (X, y))
            assert len(mine.step(*own, shares=sizes)) == 1
        assert 0 <= mine.evaluate(data) <= 1
        return mine.modules[0]

    return threads.launch(run, world)


def same_tensors(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    one, other = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(one, other)


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    """Whether all parameters and buffers of two modules are equal bit by bit."""
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        same_tensors(mine[name], theirs[name]) for name in mine
    )


def difference(a: nn.Module, b: nn.Module) -> float:
    """The largest absolute difference between the parameters of two modules."""
    return max(
        float((p - q).abs().max().detach())
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


@torch.compile(backend="eager")
def _step(p: Tensor, g: Tensor) -> Tensor:
    return p.clone().add_(g, alpha=-0.3)


@cache
def graphs_round_alike() -> bool:
    """Whether torch's own SGD has the same bits in a graph, which it has not before torch 2.13."""
    p, g = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    return torch.equal(_step(p, g), p.add(g, alpha=-0.3))


def same_in_graphs(mine: nn.Module, theirs: nn.Module) -> bool:
    """Whether all tensors of two modules are equal, if one of them was trained in graphs."""
    return same_bits(mine, theirs) if graphs_round_alike() else difference(mine, theirs) < 1e-6
