"""A training run in progress: its loop, its measurements, and its checkpoint state."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch import Tensor

from .._command import Stopped
from . import checkpoint, records
from .engine import Engine
from .interrupt import Interrupt
from .loader import Batch, LoaderOptions
from .output import Log, ProgressPrinter
from .prepared_run import PreparedRun
from .records import EpochRecord, RunResult, StepRecord, mean_loss, wait_for

# Steps between two reads of the losses, each of which waits for the GPUs: rare enough to cost
# nothing, often enough to follow a log. Counted in steps so that all processes read at once.
_READ_EVERY = 50
# Examples of all ranks in an evaluation batch, unless a training batch is larger.
_TEST_BATCH = 1024


class TrainingRun:
    """A training run at its first step, or at that of its checkpoint: its engine and records."""

    def __init__(self, prepared: PreparedRun, printer: ProgressPrinter, log: Log) -> None:
        self._started = time.perf_counter()  # before the replicas are created
        self._prepared, self._printer, self._log = prepared, printer, log
        self.engine = Engine(prepared)
        self.steps: list[StepRecord] = []
        self.epochs: list[EpochRecord] = []
        self.first_batch: float | None = None  # seconds from the start to the end of the first step
        self._unread: list[tuple[StepRecord, Sequence[Tensor]]] = []
        self._train = self.engine.loader(prepared.data.train, prepared.loading)
        # Images from files may be large: a batch size that fits for training fits here, too.
        small = _TEST_BATCH if isinstance(prepared.data.test, tuple) else 0
        test_size = max(small, prepared.options.batch_size)
        in_order = LoaderOptions(test_size, shuffle=False, prefetch=prepared.loading.prefetch)
        self._test = self.engine.loader(prepared.data.test, in_order, ahead=False)
        if prepared.shares is not None and self.engine.auto is not None:
            self.engine.auto.replay(prepared.shares)
        if prepared.stored is not None:
            self.load_state_dict(prepared.stored["run"])

    def run(self, interrupt: Interrupt) -> None:
        """Train to the end, with a printed line and a checkpoint per epoch.

        If a checkpoint is to be written, a signal takes effect after the current step.
        """
        epochs = self._prepared.options.epochs
        if len(self.epochs) >= epochs:
            self._printer.notice(
                f"nothing is left to train: the run has had {len(self.epochs)} epochs, of "
                f"{epochs}; pass more epochs to go on"
            )
            self.save()
            return
        try:
            for number in range(len(self.epochs) + 1, epochs + 1):
                self._epoch(number, interrupt)
                self._printer.line(self.epochs[-1])
                self.save()
                interrupt.check()
        except Stopped:
            self.save()
            raise

    def _epoch(self, number: int, interrupt: Interrupt) -> None:
        """Train one epoch, or what is left of it, and evaluate the model."""
        done = sum(step.epoch == number for step in self.steps)  # before the checkpoint
        images = self._train.examples(number)
        bar = self._printer.bar(f"epoch {number}", sum(images), sum(images[:done]))
        with closing(self._train.epoch(number, done)) as batches, bar:
            for step, batch in enumerate(batches, done + 1):
                self.step(batch, number, step)
                bar.step(batch.examples, self.latest_loss)
                interrupt.check()
        self._finish_epoch(number)

    def step(self, batch: Batch, epoch: int, number: int) -> None:
        """Train on one batch and record the times; the loss is read later."""
        losses, engine = self.engine.step(batch), self.engine
        times = batch.waited, engine.seconds, engine.shares
        step = StepRecord(epoch, number, batch.examples, float("nan"), *times)
        self._unread.append((step, losses))
        if self.first_batch is None:
            wait_for(engine.devices)
            self.first_batch = time.perf_counter() - self._started
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
            self._log.step(self.steps[-1])
        self._unread = []

    def _finish_epoch(self, number: int) -> None:
        """Evaluate the model, and record and log the epoch."""
        start = time.perf_counter()
        wait_for(self.engine.devices)
        tail = time.perf_counter() - start
        self.read()
        steps = [step for step in self.steps if step.epoch == number]
        seconds = sum(step.seconds.total for step in steps) + tail
        waited = sum(step.waited for step in steps)
        with closing(self._test.epoch()) as batches:
            accuracy = self.engine.evaluate(batches)
        evaluated = self._prepared.data.evaluated
        record = EpochRecord(number, seconds, mean_loss(steps), accuracy, waited, evaluated)
        self.epochs.append(record)
        self._log.epoch(record)

    def save(self) -> None:
        """Write the checkpoint if the config names one; collective over processes."""
        prepared = self._prepared
        if prepared.options.checkpoint is None:
            return
        state = {
            "settings": prepared.options.stored(),
            "identity": prepared.identity(),
            "source": prepared.source,
            "run": self.state_dict(),
        }
        if self.engine.is_main_process:
            checkpoint.save(prepared.options.checkpoint, state)
        self.engine.total([0.0])  # a barrier: no process continues before the file is written

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

    def result(self) -> RunResult:
        """Return the result of the finished run."""
        settings, modules = self._prepared.options, self.engine.modules
        name = self._prepared.options.reduce
        return RunResult(name, settings, self.epochs, self.steps, modules, self.first_batch)
