"""One run in progress: who trains, what was measured, and everything that a checkpoint keeps."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from . import history
from .history import Epoch, Step, mean_loss
from .loader import Batch
from .log import Log
from .one_process import Trainee
from .step_clock import wait_for

# Steps between two readings of the losses, each of which waits for the GPUs: rare enough to cost
# nothing, often enough to follow a log. Counted in steps so that all processes read at once.
_READ_EVERY = 50


@dataclass
class Contestant:
    """Somebody who trains, and the records of it."""

    name: str
    trainee: Trainee
    log: Log
    started: float = field(default_factory=time.perf_counter)  # before the replicas were made
    steps: list[Step] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    first_batch: float | None = None  # seconds from the start to the end of the first step
    _unread: list[tuple[Step, Sequence[Tensor]]] = field(default_factory=list)

    def step(self, batch: Batch, epoch: int, number: int) -> None:
        """Train on one batch and take the times."""
        losses = self.trainee.step(batch)
        unknown = float("nan")
        step = Step(
            epoch,
            number,
            batch.examples,
            unknown,
            batch.waited,
            self.trainee.seconds,
            self.trainee.shares,
        )
        self._unread.append((step, losses))
        if self.first_batch is None:
            wait_for(self.trainee.devices)
            self.first_batch = time.perf_counter() - self.started
        if len(self._unread) >= _READ_EVERY:
            self.read()

    def latest_loss(self) -> float:
        """Give the mean loss of the last step, as far as this process knows it; waits for GPUs."""
        if not self._unread:
            return self.steps[-1].loss
        return sum(map(float, self._unread[-1][1])) / max(1, self.trainee.covered())

    def read(self) -> None:
        """Turn the losses so far into numbers; all processes do it at once."""
        sums = self.trainee.total([sum(map(float, losses)) for _, losses in self._unread])
        for (step, _), loss in zip(self._unread, sums, strict=True):
            self.steps.append(replace(step, loss=loss / step.examples))
            self.log.step(self.steps[-1])
        self._unread = []

    def finish_epoch(self, number: int, test: Iterable[Batch]) -> None:
        """Evaluate and record the epoch."""
        start = time.perf_counter()
        wait_for(self.trainee.devices)
        tail = time.perf_counter() - start
        self.read()
        steps = [step for step in self.steps if step.epoch == number]
        seconds = sum(step.seconds.total for step in steps) + tail
        waited = sum(step.waited for step in steps)
        accuracy = self.trainee.evaluate(test)
        self.epochs.append(Epoch(number, seconds, mean_loss(steps), accuracy, waited))
        self.log.epoch(self.epochs[-1])

    def state_dict(self) -> dict[str, Any]:
        """Give everything that the continuation needs to give the same bits."""
        self.read()
        return {
            "trainee": self.trainee.state_dict(),
            **history.stored(self.steps, self.epochs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self.trainee.load_state_dict(state["trainee"])
        self.steps, self.epochs = history.restored(state)

    @property
    def next_step(self) -> tuple[int, int]:
        """The epoch to go on with, from 1, and how many of its steps are done."""
        epoch = len(self.epochs) + 1
        return epoch, sum(step.epoch == epoch for step in (*self.steps, *self._done()))

    def _done(self) -> list[Step]:
        return [step for step, _ in self._unread]
