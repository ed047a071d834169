"""Times and results of a training run: of the parts of steps, of steps, epochs and the whole run.

Losses are means per training example, times are seconds, accuracies are between 0 and 1.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from itertools import takewhile
from math import isfinite
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from .options import Options, device_list


@dataclass(frozen=True)
class StepSeconds:
    """The host's seconds for the parts of a step; all are 0 by default.

    `split` is the split of the batch. `compute` is forward and backward, with the overlapped part
    of the reduction. `reduction` is the time that the step waits for the reduction, and `update`
    that of the optimizers. GPU work may still be running when its calls return, unless the times
    are exact (`exact_times`).

    >>> StepSeconds(split=1.0, compute=2.0).total
    3.0
    """

    split: float = 0.0
    compute: float = 0.0
    reduction: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of the whole step."""
        return self.split + self.compute + self.reduction + self.update


# Names of the parts of a step's time, in order: waiting for the batch, then those of StepSeconds.
PARTS = ("data", *(field.name for field in fields(StepSeconds)))


class StepClock:
    """Measures the consecutive parts of a step, and the ranks' forward and backward passes.

    An exact clock waits until the devices are idle before it reads the time. The host can then no
    longer issue work ahead of a GPU, so only a comparison is exact at every step.

    Ranks on GPUs are timed by events on their streams; only `rank_seconds` waits for them.
    """

    def __init__(self, devices: Sequence[torch.device], exact: bool) -> None:
        self._devices, self._exact = list(devices), exact
        self.begin()

    def begin(self) -> None:
        """Discard the times of the last step and start the next."""
        self._parts: dict[str, float] = {}
        self._marks: list[list[tuple[Any, Any]]] = [[] for _ in self._devices]
        self._last = self._now()

    def end_of(self, part: str) -> None:
        """Add the time since the end of the last part to this part."""
        now = self._now()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def _now(self) -> float:
        if self._exact:
            wait_for(self._devices)
        return time.perf_counter()

    @property
    def seconds(self) -> StepSeconds:
        """The parts of the step so far."""
        return StepSeconds(**self._parts)

    @contextmanager
    def ranks(self, ranks: Sequence[int]) -> Iterator[None]:
        """Add the time of the context to each of these ranks, except in a graph capture."""
        timed = [rank for rank in ranks if not is_captured(self._devices[rank])]
        starts = [mark(self._devices[rank]) for rank in timed]
        yield
        for rank, start in zip(timed, starts, strict=True):
            self._marks[rank].append((start, mark(self._devices[rank])))

    def rank_seconds(self) -> list[float]:
        """Return the seconds that every rank has taken for its shard; waits for busy GPUs."""
        return [sum((seconds_between(*pair) for pair in mine), 0.0) for mine in self._marks]


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until all work issued to the devices so far is done."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def is_captured(device: torch.device) -> bool:
    """Return whether the device's work is currently captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def mark(device: torch.device) -> Any:
    """Return a time stamp: the host's time, or for a GPU an event on its current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks of one device; waits until a GPU has reached `end`.

    >>> seconds_between(1.5, 2.0)
    0.5
    """
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


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

    `epochs` and `steps` include those before a checkpoint that was resumed. `modules` are the
    trained replicas of this process, in rank order, on their ranks' devices. `first_batch` is the
    seconds from the start, before the replicas are created, to the end of the first step; None if
    the run had no step. Times are the host's, and exact on GPUs only with `exact_times` and in a
    comparison.
    """

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
    def parts(self) -> dict[str, float]:
        """The median seconds of data, split, compute, reduction and update in a step, by name.

        The first step is left out if there are more, because it includes initialisation: libraries
        choose kernels and memory is allocated. Without any step all are 0.
        """
        counted = self.steps[1:] or self.steps
        return {part: median([step.parts[part] for step in counted] or [0.0]) for part in PARTS}

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
        seconds = fmean(epoch.seconds for epoch in self.epochs)
        return seconds, seconds + fmean(epoch.data_seconds for epoch in self.epochs)

    @property
    def times(self) -> str:
        """The printed line with the seconds of the first batch and of an epoch."""
        without, with_data = self.seconds_per_epoch
        first = "" if self.first_batch is None else f"first batch: {self.first_batch:.1f} sec; "
        return f"{first}epoch: {without:.1f} sec, {with_data:.1f} sec with data loading"

    @property
    def divergence(self) -> str:
        """A sentence if the loss or the model is not finite at the end; "" if both are finite."""
        lost = list(takewhile(lambda step: not isfinite(step.loss), reversed(self.steps)))
        if lost:
            loss, number, epoch = lost[-1].loss, lost[-1].number, lost[-1].epoch
            return f"the loss is {loss} from step {number} of epoch {epoch} to the end"
        tensors = self.module.state_dict().values()
        if all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point()):
            return ""
        return "the model holds numbers that are not finite"

    def difference(self, other: "RunResult") -> float:
        """Return the largest absolute difference in any parameter of any rank.

        The result is 0 only if all bits are the same; it is NaN if only signs of zeros differ.
        Raises ValueError for another number of ranks.
        """
        if len(self.modules) != len(other.modules):
            ranks = f"{len(self.modules)} and {len(other.modules)}"
            raise ValueError(f"the runs have {ranks} ranks, which cannot be compared")
        pairs = [
            (a.detach().cpu(), b.detach().cpu())
            for mine, theirs in zip(self.modules, other.modules, strict=True)
            for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)
        ]
        if all(same_bits(a, b) for a, b in pairs):
            return 0.0
        found = [float((a - b).abs().max()) for a, b in pairs if a.numel()]
        return float(torch.tensor(found, dtype=torch.float64).max()) or float("nan")

    def __str__(self) -> str:
        where = device_list(self.settings.devices)
        seconds, _ = self.seconds_per_epoch
        acc = f"{self.epochs[-1].evaluated} acc: {self.accuracy:.2f}"
        return f"{acc}, {seconds:.1f} sec/epoch on {where}"
