"""The result of a training run: what `train` returns, and `compare_reductions` for every run."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from .options import Options, device_list
from .records import PARTS, EpochRecord, StepRecord, divergence, typical


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors bit by bit, so that equal NaNs are equal and -0.0 is not 0.0.

    >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    a, b = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)


@dataclass(frozen=True)
class RunResult:
    """A finished run: its settings, a record of every epoch and step, and the trained model.

    `name` is that of the gradient reduction ("pycollect" or "naive"), or "ddp". `epochs` and
    `steps` include those before a checkpoint that was resumed. `modules` are the trained replicas
    of this process, in rank order, on their ranks' devices; of "ddp" there is only rank 0's, on the
    device of the given model. `first_batch` is the seconds from the start, before the replicas are
    created, to the end of the first step; None for "ddp". Times are the host's, and exact on GPUs
    only with `exact_times` and in a comparison.
    """

    name: str
    settings: Options
    epochs: Sequence[EpochRecord]
    steps: Sequence[StepRecord]
    modules: Sequence[nn.Module]
    first_batch: float | None = None

    @property
    def module(self) -> nn.Module:
        """The trained replica of rank 0, or of this process's rank if each rank is a process."""
        return self.modules[0]

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters of `module`."""
        return [param.detach() for param in self.module.parameters()]

    @property
    def losses(self) -> list[float]:
        """The mean loss per example of every step."""
        return [step.loss for step in self.steps]

    @property
    def accuracy(self) -> float:
        """The accuracy after the last epoch, 0..1: of the test set, or of training without one."""
        return self.epochs[-1].accuracy

    @property
    def parts(self) -> list[float]:
        """The median seconds of data, split, compute, reduction and update in a step.

        The first step is left out if there are more, because it includes initialisation.
        """
        return [typical(self.steps)[part] for part in PARTS]

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

    @property
    def seconds_per_epoch(self) -> tuple[float, float]:
        """The mean seconds of an epoch, without data loading and with it."""
        seconds = sum(epoch.seconds for epoch in self.epochs) / len(self.epochs)
        return seconds, seconds + sum(e.data_seconds for e in self.epochs) / len(self.epochs)

    @property
    def times(self) -> str:
        """The printed line with the seconds of the first batch and of an epoch."""
        without, with_data = self.seconds_per_epoch
        first = "" if self.first_batch is None else f"first batch: {self.first_batch:.1f} sec; "
        return f"{first}epoch: {without:.1f} sec, {with_data:.1f} sec with data loading"

    @property
    def divergence(self) -> str:
        """A sentence if the loss or the model is not finite at the end; "" if both are finite."""
        return divergence(self.steps, self.module.state_dict().values())

    def difference(self, other: "RunResult") -> float:
        """Return the largest absolute difference in any parameter of the ranks that both have.

        The result is 0 only if all bits are the same; it is NaN if only signs of zeros differ.
        """
        pairs = [
            (a.detach().cpu(), b.detach().cpu())
            for mine, theirs in zip(self.modules, other.modules, strict=False)
            for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)
        ]
        if all(same_bits(a, b) for a, b in pairs):
            return 0.0
        return max(float((a - b).abs().max()) for a, b in pairs) or float("nan")

    def __str__(self) -> str:
        where = device_list(self.settings.devices)
        seconds, _ = self.seconds_per_epoch
        acc = f"{self.epochs[-1].evaluated} acc: {self.accuracy:.2f}"
        return f"{acc}, {seconds:.1f} sec/epoch on {where}"
