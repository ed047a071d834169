"""What a run has measured: a record of every step and of every epoch.

Losses are means per training example, times are seconds, accuracies are between 0 and 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class StepTimes:
    """The seconds of one step by what they were spent on.

    On a GPU they are true only when the clock waits for the device, see `--exact-times`.

    >>> times = StepTimes(data=0.1, split=0.0, compute=0.7, reduction=0.1, update=0.1)
    >>> round(times.step, 3)
    0.9
    """

    data: float  # waiting for the batch
    split: float  # cutting it into shards, and moving these to their devices
    compute: float  # forward and backward, less what the reduction took in their midst
    reduction: float  # summing the gradients over the ranks
    update: float  # the optimizer

    @property
    def step(self) -> float:
        """The seconds of the training step itself, without waiting for the batch."""
        return self.split + self.compute + self.reduction + self.update


PARTS = ("data", "split", "compute", "reduction", "update")


@dataclass(frozen=True)
class Step:
    """One training step."""

    epoch: int  # from 1
    number: int  # within the epoch, from 1
    examples: int  # of all ranks
    loss: float
    times: StepTimes
    shares: tuple[int, ...] = ()  # examples of each rank


@dataclass(frozen=True)
class Epoch:
    """What one epoch gave: seconds without evaluation, mean loss per example, test accuracy 0..1.

    >>> print(Epoch(3, 1.94, 0.4118, 0.8712))
    epoch 3, time 1.9 sec, loss 0.412, test acc 0.87
    """

    number: int  # from 1
    seconds: float  # of the training steps
    loss: float
    accuracy: float
    data_seconds: float = 0.0  # of waiting for batches, besides

    def __str__(self) -> str:
        return (
            f"epoch {self.number}, time {self.seconds:.1f} sec, loss {self.loss:.3f}, "
            f"test acc {self.accuracy:.2f}"
        )


def typical(steps: Sequence[Step]) -> StepTimes:
    """Give the median of every part of the steps' times, the first step's left out if it can be.

    The first is the initialisation: libraries choose their kernels, and memory is allocated.
    """
    counted = steps[1:] or steps
    if not counted:
        return StepTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    return StepTimes(*(median(getattr(step.times, part) for step in counted) for part in PARTS))
