"""A training run in progress: its engine, its measurements, and its checkpoint state."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from . import records
from .engine import Engine
from .loader import Batch
from .log import Log
from .options import Options
from .records import EpochRecord, StepRecord, mean_loss
from .run_result import RunResult
from .step_clock import wait_for

# Steps between two reads of the losses, each of which waits for the GPUs: rare enough to cost
# nothing, often enough to follow a log. Counted in steps so that all processes read at once.
_READ_EVERY = 50


@dataclass
class TrainingRun:
    """A training run in progress: its engine, and the records of its steps and epochs."""

    name: str
    engine: Engine
    log: Log
    started: float = field(default_factory=time.perf_counter)  # before the replicas are created
    steps: list[StepRecord] = field(default_factory=list)
    epochs: list[EpochRecord] = field(default_factory=list)
    first_batch: float | None = None  # seconds from the start to the end of the first step
    _unread: list[tuple[StepRecord, Sequence[Tensor]]] = field(default_factory=list)

    def step(self, batch: Batch, epoch: int, number: int) -> None:
        """Train on one batch and record the times; the loss is read later."""
        losses = self.engine.step(batch)
        unknown = float("nan")
        step = StepRecord(
            epoch,
            number,
            batch.examples,
            unknown,
            batch.waited,
            self.engine.seconds,
            self.engine.shares,
        )
        self._unread.append((step, losses))
        if self.first_batch is None:
            wait_for(self.engine.devices)
            self.first_batch = time.perf_counter() - self.started
        if len(self._unread) >= _READ_EVERY:
            self.read()

    def latest_loss(self) -> float:
        """Return the mean loss of this process's examples in the last step; waits for GPUs."""
        if not self._unread:
            return self.steps[-1].loss
        return sum(map(float, self._unread[-1][1])) / max(1, self.engine.local_examples())

    def read(self) -> None:
        """Convert the pending losses to numbers and log their steps; collective over processes."""
        sums = self.engine.total([sum(map(float, losses)) for _, losses in self._unread])
        for (step, _), loss in zip(self._unread, sums, strict=True):
            self.steps.append(replace(step, loss=loss / step.examples))
            self.log.step(self.steps[-1])
        self._unread = []

    def finish_epoch(self, number: int, test: Iterable[Batch], evaluated: str) -> None:
        """Evaluate the model on `test`, the set `evaluated`, and record and log the epoch."""
        start = time.perf_counter()
        wait_for(self.engine.devices)
        tail = time.perf_counter() - start
        self.read()
        steps = [step for step in self.steps if step.epoch == number]
        seconds = sum(step.seconds.total for step in steps) + tail
        waited = sum(step.waited for step in steps)
        accuracy = self.engine.evaluate(test)
        loss = mean_loss(steps)
        self.epochs.append(EpochRecord(number, seconds, loss, accuracy, waited, evaluated))
        self.log.epoch(self.epochs[-1])

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed run gives the same bits."""
        self.read()
        return {
            "engine": self.engine.state_dict(),
            **records.stored(self.steps, self.epochs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        self.engine.load_state_dict(state["engine"])
        self.steps, self.epochs = records.restored(state)

    def result(self, settings: Options) -> RunResult:
        """Return the result of the finished run, which had these settings."""
        modules = self.engine.modules
        return RunResult(self.name, settings, self.epochs, self.steps, modules, self.first_batch)

    @property
    def next_step(self) -> tuple[int, int]:
        """The epoch in which to continue, from 1, and the number of its finished steps."""
        epoch = len(self.epochs) + 1
        return epoch, sum(step.epoch == epoch for step in (*self.steps, *self._unread_steps()))

    def _unread_steps(self) -> list[StepRecord]:
        return [step for step, _ in self._unread]
