"""Run two ways of reducing side by side on the same batches and say what the difference is.

The two take turns at every step. Times are medians: of all steps for the reduction, of all epochs
for the epoch, and a ratio above 1 means that the second is the faster one.
"""

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from .data import Data
from .report import Report
from .settings import Settings
from .trainer import Contestant, fit

NAMES = ("naive", "pycollect")  # the baseline first


@dataclass(frozen=True)
class Comparison:
    """Two contestants that have trained on the same batches."""

    baseline: Contestant
    other: Contestant

    @property
    def reduce_seconds(self) -> tuple[float, float]:
        """The median seconds of one reduction of all gradients, baseline first."""
        return median(self.baseline.reduction.seconds), median(self.other.reduction.seconds)

    @property
    def epoch_seconds(self) -> tuple[float, float]:
        """The median seconds of one epoch without evaluation, baseline first."""
        first, second = (
            median(epoch.seconds for epoch in contestant.epochs)
            for contestant in (self.baseline, self.other)
        )
        return first, second

    @property
    def identical(self) -> bool:
        """Whether every parameter of every rank has the same bits in both."""
        return all(
            same_bits(a, b)
            for replica_a, replica_b in zip(
                self.baseline.replicas, self.other.replicas, strict=True
            )
            for a, b in zip(replica_a, replica_b, strict=True)
        )

    def __str__(self) -> str:
        steps, epochs = len(self.other.reduction.seconds), len(self.other.epochs)
        verdict = "the same bits" if self.identical else "DIFFERENT BITS"
        return "\n".join(
            (
                self._ratio(f"reduction time, median of {steps} steps", self.reduce_seconds),
                self._ratio(f"epoch time, median of {epochs} epochs", self.epoch_seconds),
                f"parameters after {steps} steps: {verdict}",
            )
        )

    def _ratio(self, what: str, seconds: tuple[float, float]) -> str:
        first, second = (
            f"{contestant.name} {1e3 * s:.3f} ms"
            for contestant, s in zip((self.baseline, self.other), seconds, strict=True)
        )
        return f"{what}: {first}, {second}, ratio {seconds[0] / seconds[1]:.2f}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare two float32 tensors bit by bit, so that equal NaNs are equal and -0.0 is not 0.0.

    >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    return torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))


def compare(data: Data, settings: Settings, report: Report) -> Comparison:
    """Train with the book's loop and with pycollect; print a line per epoch and contestant."""
    report.line(f"LeNet on {data}: {settings}, {' against '.join(NAMES)}")
    for contestants in fit(data, settings, NAMES, report):
        for contestant in contestants:
            report.line(f"{contestant.epochs[-1]} ({contestant.name})")
    comparison = Comparison(*contestants)
    report.line(comparison)
    return comparison
