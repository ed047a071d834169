"""A shard of one example under batch normalisation is refused before any state changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_cases import same_bits, trained_ranks

from pycollect.train import (
    Data,
    ReplicaTrainer,
    sgd_factory,
    train,
)
from pycollect.train.module_check import SingleValueCheck


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(0.5), *layers, nn.Linear(4, 3))


def batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 2, 2), torch.arange(n) % 3


class Picky(nn.Module):
    """A module that refuses zeros, so that a dry run is inconclusive."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        assert not len(x) or x.norm() > 0
        return self.norm(x.flatten(1))


def test_before_the_step_nothing_has_changed() -> None:
    """torch's own error on rank 1 would come after rank 0's pass had changed its state."""
    norm = nn.BatchNorm1d(4)
    replicas = ReplicaTrainer(net(norm, nn.Tanh(), norm), "cpu*2", optimizer=sgd_factory(0.1))
    three = batch(3)
    before, drawn = copy.deepcopy(replicas.modules), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"rank 1 has a shard of 1, .* use larger batches"):
        replicas.step(*three)
    assert all(map(same_bits, before, replicas.modules))
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(part.training for part in replicas.modules[0].modules())
    replicas.step(*batch(4))


RUNS: list[tuple[dict[str, Any], int]] = [
    ({}, 3),
    ({"microbatch": 3}, 4),
    ({"weights": "90,10"}, 6),
    ({"sync_batchnorm": True}, 1),
    ({"sync_batchnorm": True, "microbatch": 1}, 0),
    ({"sync_batchnorm": True, "weights": "1,0"}, 1),
]


@pytest.mark.parametrize(("options", "last"), RUNS, ids=str)
def test_a_run_is_refused_before_it_begins(options: dict[str, Any], last: int) -> None:
    """Only the last batch has such a shard, which in a long run would come after hours."""
    X, y = batch(40 + last)
    options = {"data": Data("noise", (X, y), (X, y)), "epochs": 1, "quiet": True, **options}
    steps: list[int] = []
    model = net()
    model.register_forward_hook(lambda me, *_: steps.append(1) if me.training else None)
    sync = "sync_batchnorm" in options
    message = "of one example, and batch normalisation over all" if sync else "has a shard of 1"
    with pytest.raises(ValueError, match=message):
        train("cpu*2", 8, 0.1, model=model, **options)
    assert not steps
    two = {**options, "drop_last": True, "microbatch": 4, "weights": None}
    train("cpu*2", 8, 0.1, model=model, **two)
    assert steps


def test_synchronised_statistics_are_not_advised_when_they_are_on() -> None:
    """Synchronised statistics are not suggested if they are on, with a dry run or without one."""
    for make, message in ((net, "of one example"), (Picky, "take a larger batch")):
        with pytest.raises(ValueError, match=message) as caught:
            trained_ranks(make, 2, [batch(1)])
        assert "synchronised" not in str(caught.value)
    trained_ranks(net, 2, [batch(2)])


def test_one_example_of_many_values_is_enough() -> None:
    wide = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    ReplicaTrainer(wide, "cpu*2", optimizer=sgd_factory(0.1)).step(*batch(3))


def frozen() -> nn.Module:
    module = net()
    module[1].eval()  # type: ignore[index]
    return module


@pytest.mark.parametrize("make", [frozen, lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3))])
def test_layers_that_take_no_statistics_of_a_shard(make: Callable[[], nn.Module]) -> None:
    module, calls = make(), []
    module.register_forward_hook(lambda *_: calls.append(1))
    ReplicaTrainer(module, "cpu*2", optimizer=sgd_factory(0.1)).step(*batch(3))
    assert len(calls) == 2  # no dry run took place


def test_without_running_statistics_evaluation_takes_them_too() -> None:
    module = nn.BatchNorm1d(3, track_running_stats=False).eval()
    with pytest.raises(ValueError, match="rank 0 has a shard of 1"):
        SingleValueCheck(module).check([(1, 4)], torch.zeros(1, 3))


def test_a_module_that_fails_on_zeros_gets_torchs_error() -> None:
    replicas = ReplicaTrainer(Picky(), "cpu*2", optimizer=sgd_factory(0.1))
    with pytest.raises(ValueError, match="rank 1 has a shard of 1"):
        replicas.step(*batch(3))
