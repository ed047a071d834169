"""Records of a training run: one per step and one per epoch.

Losses are means per training example, times are seconds, accuracies are between 0 and 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import takewhile
from math import isfinite
from statistics import median
from typing import Any

from torch import Tensor

from .step_clock import StepSeconds

# Names of the parts of a step's time, in order: waiting for the batch, then those of StepSeconds.
PARTS = ("data", *(field.name for field in fields(StepSeconds)))


@dataclass(frozen=True)
class StepRecord:
    """Record of one training step.

    `epoch` and `number`, the step within the epoch, count from 1. `examples` is the number of
    examples of all ranks, and `shares` the number of each rank. `loss` is the mean per example.
    `waited` is the seconds until the batch was ready, and `seconds` has those of the parts of the
    step.

    >>> step = StepRecord(1, 1, 64, 2.3, 0.1, StepSeconds(compute=0.5), (32, 32))
    >>> step.parts["data"], step.parts["compute"]
    (0.1, 0.5)
    """

    epoch: int
    number: int
    examples: int
    loss: float
    waited: float
    seconds: StepSeconds
    shares: tuple[int, ...]

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part: data (`waited`), split, compute, reduction and update."""
        return dict(zip(PARTS, (self.waited, *astuple(self.seconds)), strict=True))


@dataclass(frozen=True)
class EpochRecord:
    """Record of one epoch.

    `number` counts from 1. `seconds` are those of the training steps, without evaluation and
    without `data_seconds`, in which they waited for batches. `loss` is the mean per training
    example, `accuracy` the fraction of examples that are classified correctly, 0..1, of the set
    `evaluated`: "test", or "train" if there is no test set.

    >>> print(EpochRecord(3, 1.94, 0.4118, 0.8712))
    epoch 3, time 1.9 sec, loss 0.412, test acc 0.87
    """

    number: int
    seconds: float
    loss: float
    accuracy: float
    data_seconds: float = 0.0
    evaluated: str = "test"

    def __str__(self) -> str:
        return (
            f"epoch {self.number}, time {self.seconds:.1f} sec, loss {self.loss:.3f}, "
            f"{self.evaluated} acc {self.accuracy:.2f}"
        )


def typical(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the median seconds of every part of a step, without the first step if there are more.

    The first step includes initialisation: libraries choose kernels and memory is allocated.
    """
    counted = steps[1:] or steps
    if not counted:
        return dict.fromkeys(PARTS, 0.0)
    return {part: median(step.parts[part] for step in counted) for part in PARTS}


def mean_loss(steps: Sequence[StepRecord]) -> float:
    """Return the mean loss per example over the steps."""
    return sum(s.loss * s.examples for s in steps) / sum(s.examples for s in steps)


def divergence(steps: Sequence[StepRecord], tensors: Iterable[Tensor]) -> str:
    """Describe a loss or model that is not finite at the end of a run; "" if both are finite.

    >>> divergence([StepRecord(1, 1, 64, float("nan"), 0.1, StepSeconds(), (64,))], [])
    'the loss is nan from step 1 of epoch 1 to the end'
    """
    lost = list(takewhile(lambda step: not isfinite(step.loss), reversed(steps)))
    if lost:
        first = lost[-1]
        return (
            f"the loss is {first.loss} from step {first.number} of epoch {first.epoch} to the end"
        )
    found = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    if all(bool(tensor.isfinite().all()) for tensor in found):
        return ""
    return "the model holds numbers that are not finite"


def stored(steps: Sequence[StepRecord], epochs: Sequence[EpochRecord]) -> dict[str, Any]:
    """Return steps and epochs as plain numbers, for a checkpoint."""
    return {"steps": [astuple(step) for step in steps], "epochs": [astuple(e) for e in epochs]}


def restored(state: Mapping[str, Any]) -> tuple[list[StepRecord], list[EpochRecord]]:
    """Return the steps and epochs from what `stored` returned.

    >>> steps = [StepRecord(1, 1, 64, 2.3, 0.1, StepSeconds(compute=0.5), (32, 32))]
    >>> restored(stored(steps, [])) == (steps, [])
    True
    """
    steps = [
        replace(StepRecord(*step), seconds=StepSeconds(*step[-2]), shares=tuple(step[-1]))
        for step in state["steps"]
    ]
    return steps, [EpochRecord(*epoch) for epoch in state["epochs"]]
