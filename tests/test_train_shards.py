"""Steps with shards have the same bits on any number of ranks.

Whole runs, also of processes: test_train_processes, test_train_checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import tree
from test_train_step import MOMENTUM, Partly, frozen
from torch import Tensor, nn
from train_cases import CLASSES, FEATURES, batches, perceptron, replicas_of, same_bits

import pycollect as pc
from pycollect.train import summed_cross_entropy


def by_the_tree(module: nn.Module, data: list[tuple[Tensor, Tensor]], shards: int) -> nn.Module:
    """Training in plain torch: the gradients of all shards, added by a recursive loop."""
    params = list(module.parameters())
    optimizer = MOMENTUM(params)
    for X, y in data:
        of_shards = []
        for part, labels in zip(X.tensor_split(shards), y.tensor_split(shards), strict=True):
            optimizer.zero_grad()
            if len(part):
                summed_cross_entropy(module(part.clone()), labels).backward()
            of_shards.append([p.grad for p in params])
        for param, grads in zip(params, zip(*of_shards, strict=True), strict=True):
            param.grad = None
            if any(grad is not None for grad in grads):
                wide = torch.promote_types(param.dtype, torch.float32)
                parts = [torch.zeros_like(param) if g is None else g for g in grads]
                total = tree([part.to(wide) for part in parts], torch.add)
                param.grad = total.to(param.dtype).div_(len(X))
        optimizer.step()
    return module


@pytest.mark.parametrize("shards", [8, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [perceptron, Partly, frozen])
def test_shards_are_added_by_the_tree_on_any_number_of_ranks(
    make: Callable[[], nn.Module], dtype: torch.dtype, shards: int
) -> None:
    data = [(X.to(dtype), y) for X, y in batches((24, 24, 17, 3, 1))]
    wanted = by_the_tree(make().to(dtype), data, shards)
    losses = set()
    for world in (1, 2, 4, 8) if shards == 8 else (1, 3, 6):
        one = replicas_of(make().to(dtype), world, shards=shards)
        found = [one.step(X, y) for X, y in data]
        assert all(same_bits(mine, wanted) for mine in one.modules)
        losses.add(tuple(float(pc.tree_sum(of_ranks)) for of_ranks in found))
    assert len(losses) == 1


class Remembering(nn.Module):
    """Has buffers that begin as None, change their shape, are assigned, and are its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", None)
        self.register_buffer("before", torch.zeros(CLASSES, FEATURES))
        self.register_buffer("shared", self.out.weight.detach())

    def forward(self, X: Tensor) -> Any:
        self.count += 1
        drift = 0.0 if self.seen is None else self.seen.mean()
        drift = drift + 0.01 * self.count - 0.1 * self.before.sum()
        self.seen, self.before = X.detach(), self.out.weight.detach()
        return self.out(X) + drift + self.shared.sum()


def test_buffers_of_any_kind_belong_to_a_shard() -> None:
    found = []
    for world in (8, 1, 2, 4):
        one = replicas_of(Remembering(), world, shards=8)
        losses = [one.step(X, y) for X, y in batches((24, 24, 17, 12))]
        weights = [p.clone() for p in one.modules[0].parameters()]
        assert same_bits(one.modules[0].out, one.modules[-1].out)
        found.append(([float(pc.tree_sum(of_ranks)) for of_ranks in losses], weights))
        assert all(map(torch.equal, weights, found[0][1]))
        assert found[-1][0] == found[0][0]
    one.modules[0].count += 100  # the first shard's
    one.step(*batches((24,))[0])
    assert [int(own["count"]) for own in one.state_dict()["buffers"]] == [105] + [5] * 7


@pytest.mark.parametrize("world", [1, 2, 8])
def test_parameters_that_forward_changes_are_refused_with_shards(world: int) -> None:
    class Decaying(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(input)

    one = replicas_of(Decaying(FEATURES, CLASSES), world, shards=8)
    with pytest.raises(
        ValueError, match="changes parameter weight in place, which a group or shards"
    ):
        one.step(*batches((24,))[0])
