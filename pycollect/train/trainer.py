"""The training loop: epochs over shuffled batches, for one way of reducing or several in turn.

Several are contestants that see the same batches in the same minutes, so that a comparison is
fair on a machine whose speed drifts. What happens inside a step is not here, see step.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pycollect.devices import DeviceSpec

from .data import Data
from .models import init_lenet, lenet
from .reduce import REDUCTIONS, Clock, Timed
from .report import Epoch, Report
from .settings import Choice, Settings, device_list
from .step import evaluate, replicate, train_batch


@dataclass
class Contestant:
    """One way of reducing with replicas of its own, and what it has measured."""

    name: str
    replicas: list[list[Tensor]]
    reduction: Timed
    epochs: list[Epoch] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)  # of the epoch so far
    losses: list[Tensor] = field(default_factory=list)  # per step and rank, of the epoch so far

    def step(self, X: Tensor, y: Tensor, lr: float) -> None:
        """Train on one batch and take the time."""
        clock = self.reduction.clock
        start = clock()
        self.losses += train_batch(X, y, self.replicas, lr, model=lenet, reduction=self.reduction)
        self.step_seconds.append(clock() - start)

    def finish_epoch(self, data: Data) -> None:
        """Evaluate, record the epoch, and start the next one."""
        clock = self.reduction.clock
        start = clock()
        clock.wait()
        seconds = sum(self.step_seconds) + clock() - start
        loss = sum(float(loss) for loss in self.losses) / len(data.train[0])
        accuracy = evaluate(*data.test, self.replicas, model=lenet)
        self.epochs.append(Epoch(len(self.epochs) + 1, seconds, loss, accuracy))
        self.step_seconds, self.losses = [], []


@dataclass(frozen=True)
class History:
    """A finished run: its settings, an Epoch per epoch, and the trained replicas."""

    settings: Settings
    epochs: list[Epoch]
    replicas: list[list[Tensor]]  # [rank][parameter]

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters, as rank 0 has them."""
        return [param.detach() for param in self.replicas[0]]

    @property
    def accuracy(self) -> float:
        """The test accuracy after the last epoch, 0..1."""
        return self.epochs[-1].accuracy

    def __str__(self) -> str:
        seconds = sum(epoch.seconds for epoch in self.epochs) / len(self.epochs)
        where = device_list(self.settings.devices)
        return f"test acc: {self.accuracy:.2f}, {seconds:.1f} sec/epoch on {where}"


def batches(examples: int, settings: Settings, epoch: int) -> list[Tensor]:
    """Give the indices of every batch of one epoch, shuffled; the last batch may be smaller.

    The order depends on seed and epoch alone, so that a run could be continued at any epoch.
    """
    # An odd multiplier keeps the orders of all epochs and of neighbouring seeds apart.
    mixed = (settings.seed + 0x9E3779B97F4A7C15 * epoch) % 2**63
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(mixed))
    return list(torch.split(order, settings.batch_size))


def fit(
    data: Data, settings: Settings, names: Sequence[str], report: Report
) -> Iterator[list[Contestant]]:
    """Train one contestant for every name of a reduction; give all of them after every epoch.

    Each contestant sees the same batches, and who goes first alternates. Only several are timed
    exactly. Raises ValueError for a name that is not in REDUCTIONS.
    """
    for name in names:
        if name not in REDUCTIONS:
            raise ValueError(f"unknown reduction {name!r}; there are {', '.join(REDUCTIONS)}")
    params = init_lenet(settings.seed)
    clock = Clock(settings.devices, exact=len(names) > 1)
    contestants = [
        Contestant(name, replicate(params, settings.devices), Timed(REDUCTIONS[name], clock))
        for name in names
    ]
    X, y = data.train
    for epoch in range(1, settings.epochs + 1):
        steps = batches(len(X), settings, epoch)
        for i, batch in enumerate(report.progress(steps, f"epoch {epoch}")):
            for contestant in contestants[:: -1 if i % 2 else 1]:
                contestant.step(X[batch], y[batch], settings.lr)
        for contestant in contestants:
            contestant.finish_epoch(data)
        yield contestants


def run(data: Data, settings: Settings, reduce: str, report: Report) -> History:
    """Train LeNet with one way of reducing, a line per epoch; see `train`."""
    report.line(f"LeNet on {data}: {settings}, reduced by {reduce}")
    for (contestant,) in fit(data, settings, [reduce], report):
        report.line(contestant.epochs[-1])
    history = History(settings, contestant.epochs, contestant.replicas)
    report.line(history)
    return history


def train(
    devices: DeviceSpec = None,
    batch_size: int | None = None,
    lr: float | None = None,
    *,
    data: Data | str = "auto",
    data_dir: Path | str = "data",
    epochs: int | None = None,
    seed: int = 0,
    reduce: str = "pycollect",
    quiet: bool = False,
) -> History:
    """Train LeNet data-parallel, one replica for every device that `pycollect.devices` gives.

    `batch_size` counts the examples of all ranks together; what is None is the data set's
    default. `data` is a Data or a name: "auto", "digits" or "fashion-mnist". The same arguments
    give the same bits, whichever way of reducing is chosen. Raises ValueError for a bad value
    and DataError if the data cannot be had.

    >>> train("cpu*2", data="digits", epochs=1, quiet=True).epochs[0].number
    1
    """
    choice = Choice(devices, batch_size, lr, epochs, seed, data, data_dir)
    data, settings, notice = choice.prepare()
    report = Report(quiet)
    if notice:
        report.line(notice)
    return run(data, settings, reduce, report)
