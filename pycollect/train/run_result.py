"""The result of a finished training run, as a comparison needs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from .history import Epoch, Step


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors bit by bit, so that equal NaNs are equal and -0.0 is not 0.0.

    >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    a, b = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run; `replicas` are its parameters as [rank][parameter]."""

    name: str
    epochs: Sequence[Epoch]
    steps: Sequence[Step]
    replicas: Sequence[Sequence[Tensor]]

    @property
    def reduce_seconds(self) -> float:
        """The median seconds of one reduction of all gradients."""
        return median(step.seconds.reduction for step in self.steps)

    @property
    def step_seconds(self) -> float:
        """The median seconds of one step."""
        return median(step.seconds.total for step in self.steps)

    @property
    def epoch_seconds(self) -> float:
        """The median seconds of one epoch without evaluation."""
        return median(epoch.seconds for epoch in self.epochs)

    def difference(self, other: "RunResult") -> float:
        """Return the largest difference in any parameter of any rank; 0 only for the same bits."""
        pairs = [
            (a.detach().cpu(), b.detach().cpu())
            for mine, theirs in zip(self.replicas, other.replicas, strict=False)
            for a, b in zip(mine, theirs, strict=True)
        ]
        if all(same_bits(a, b) for a, b in pairs):
            return 0.0
        return max(float((a - b).abs().max()) for a, b in pairs) or float("nan")
