"""Losses must be sums over the examples; a loss that declares or shows otherwise is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch.nn.functional as F
from torch import nn
from train_cases import perceptron, replicas_of, same_bits, trained


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(), "reduction='mean', and must be a sum"),
        (nn.CrossEntropyLoss(reduction="none"), "reduction='none', and must be a sum"),
        (F.cross_entropy, "reduction='mean', and must be a sum"),
        (partial(F.cross_entropy, reduction="mean"), "reduction='mean', and must be a sum"),
    ],
)
def test_a_loss_that_is_not_a_sum_is_refused(loss: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replicas_of(perceptron(), 2, loss=loss)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(reduction="sum"), partial(F.cross_entropy, reduction="sum")]
)
def test_a_custom_loss(loss: object) -> None:
    mine = trained(perceptron(), 2, [5], loss=loss)
    assert same_bits(mine.modules[0], trained(perceptron(), 2, [5]).modules[0])


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be one number.* has shape \[3\]"):
        trained(perceptron(), 2, [6], loss=lambda scores, y: scores.sum(dim=1))
