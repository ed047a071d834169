"""SGD for every rank, and learning rates that scale with the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pycollect.train import GluonTrainer, ReplicaTrainer, linear_lr, sgd_factory


def test_it_is_torchs_sgd() -> None:
    torch.manual_seed(0)
    mine, plain = nn.Parameter(torch.randn(50)), nn.Parameter(torch.empty(50))
    plain.data.copy_(mine.detach())
    ours = sgd_factory(0.1, momentum=0.9, weight_decay=0.01)([mine])
    theirs = torch.optim.SGD([plain], lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(5):
        grad = torch.randn(50)
        for param, optimizer in ((mine, ours), (plain, theirs)):
            param.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(mine, plain)


def test_complex_parameters_are_trained_too() -> None:
    param = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    param.grad = torch.full((2,), 1j)
    sgd_factory(0.5)([param]).step()
    assert param.tolist() == [1 - 0.5j] * 2


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"lr": 0.1, "momentum": -1.0}])
def test_torch_refuses_values_out_of_range(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        sgd_factory(**bad)([nn.Parameter(torch.ones(1))])


def test_learning_rates_scale_with_the_batch() -> None:
    assert linear_lr(0.1, 64, 256) == 0.025
    with pytest.raises(ValueError, match="at least 1: 0 and 256"):
        linear_lr(0.1, 0, 256)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        ReplicaTrainer(nn.Linear(2, 2), "cpu*2", optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        GluonTrainer([nn.Linear(2, 2)], "lbfgs")
