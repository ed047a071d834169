"""The training loop: epochs over shuffled batches, for one run or several alternating runs.

Alternating runs train on the same batches at the same time, so a comparison is fair on a machine
whose speed drifts. The training step itself is in replicas.py.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pycollect.devices import DeviceSpec

from .._command import Stopped
from . import checkpoint, curves
from .config import Config
from .ddp import DDPEngine
from .graph import GraphedStep
from .history import Epoch, Step, divergence
from .interrupt import Interrupt, StopConsensus
from .loader import Loading
from .log import Log
from .prepared_run import PreparedRun, prepare
from .reduce import REDUCTIONS
from .report import Report
from .settings import Settings, device_list
from .single_process import Engine, SingleProcessEngine
from .training_run import TrainingRun

# Examples of all ranks in an evaluation batch, unless a training batch is larger.
_TEST_BATCH = 1024


@dataclass(frozen=True)
class History:
    """A finished run: its settings, a record of every epoch and step, and the trained model."""

    settings: Settings
    epochs: list[Epoch]
    steps: list[Step]
    module: nn.Module  # the trained replica of rank 0
    first_batch: float | None = None  # seconds from the start to the end of the first step

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters of rank 0."""
        return [param.detach() for param in self.module.parameters()]

    @property
    def losses(self) -> list[float]:
        """The mean loss per example of every step."""
        return [step.loss for step in self.steps]

    @property
    def accuracy(self) -> float:
        """The test accuracy after the last epoch, 0..1."""
        return self.epochs[-1].accuracy

    @property
    def seconds_per_epoch(self) -> tuple[float, float]:
        """The mean seconds of an epoch, without data loading and with it."""
        seconds = sum(epoch.seconds for epoch in self.epochs) / len(self.epochs)
        return seconds, seconds + sum(e.data_seconds for e in self.epochs) / len(self.epochs)

    @property
    def divergence(self) -> str:
        """A sentence if the loss or the model is not finite at the end; "" if both are finite."""
        return divergence(self.steps, self.module.state_dict().values())

    @property
    def times(self) -> str:
        """The printed line with the seconds of the first batch and of an epoch."""
        without, with_data = self.seconds_per_epoch
        first = "" if self.first_batch is None else f"first batch: {self.first_batch:.1f} sec; "
        return f"{first}epoch: {without:.1f} sec, {with_data:.1f} sec with data loading"

    def __str__(self) -> str:
        where = device_list(self.settings.devices)
        seconds, _ = self.seconds_per_epoch
        return f"test acc: {self.accuracy:.2f}, {seconds:.1f} sec/epoch on {where}"


def fit(
    job: PreparedRun,
    runs: Sequence[TrainingRun],
    report: Report,
    interrupt: Interrupt | None = None,
) -> Iterator[Sequence[TrainingRun]]:
    """Train the runs on the same batches; yield them after every epoch.

    Their order alternates from step to step. All must be at the same step when training starts.
    """
    settings, engine = job.settings, runs[0].engine
    train = engine.loader(job.data.train, job.loading)
    # Images from files may be large: a batch size that fits in memory for training fits here too.
    small = _TEST_BATCH if isinstance(job.data.test, tuple) else 0
    test_size = max(small, settings.batch_size)
    in_order = Loading(test_size, shuffle=False, prefetch=job.loading.prefetch)
    test = engine.loader(job.data.test, in_order, ahead=False)
    first, done = runs[0].next_step
    for epoch in range(first, settings.epochs + 1):
        images = train.examples(epoch)
        bar = report.bar(f"epoch {epoch}", sum(images), sum(images[:done]))
        with closing(train.epoch(epoch, done)) as batches, bar:
            for number, batch in enumerate(batches, done + 1):
                for run in runs[:: 1 if number % 2 else -1]:
                    run.step(batch, epoch, number)
                bar.step(batch.examples, runs[0].latest_loss)
                if interrupt is not None:
                    interrupt.check()
        done = 0
        for run in runs:
            with closing(test.epoch()) as batches:
                run.finish_epoch(epoch, batches)
        yield runs


def run(job: PreparedRun, report: Report, consensus: StopConsensus | None = None) -> History:
    """Train one run and print a line per epoch; see `train` and `train_epochs`."""
    config, settings = job.config, job.settings
    report.line(f"{job.title} on {job.data}: {settings}, reduced by {job.reducer}")
    with Log(config.log, append=job.stored is not None) as log, job.repeatable():
        log.write("start", **job.described())
        run = enter(job, config.reduce, log)
        train_epochs(job, run, report, consensus=consensus)
        history = History(
            settings,
            run.epochs,
            run.steps,
            run.engine.modules[0],
            run.first_batch,
        )
        finish(history, job, report, log)
    return history


def train_epochs(
    job: PreparedRun,
    run: TrainingRun,
    report: Report,
    suffix: str = "",
    consensus: StopConsensus | None = None,
) -> None:
    """Train one run to the end, with a printed line and a checkpoint per epoch.

    If a checkpoint is to be written, Ctrl-C takes effect after the current step. Several processes
    need `consensus` for this, which makes them stop at the same step.
    """
    alone = job.backend is None
    wanted = job.config.checkpoint is not None and (alone or consensus is not None)
    with Interrupt(wanted, consensus) as interrupt:
        try:
            for _ in fit(job, [run], report, interrupt):
                report.line(f"{run.epochs[-1]}{suffix}")
                save(job, run)
                interrupt.check()
        except Stopped:
            save(job, run)
            raise


def enter(job: PreparedRun, name: str, log: Log, *, compared: bool = False) -> TrainingRun:
    """Return a run at the start of the job, or at its checkpoint.

    With `compared` its reduction is timed exactly, and by default runs after the backward pass.
    """
    config = job.config
    started = time.perf_counter()
    exact = compared or config.exact_times
    engine: Engine
    if job.backend is not None:
        prefetch = job.loading.prefetch
        engine = DDPEngine(job.module, job.settings, exact_seconds=exact, prefetch=prefetch)
    else:
        engine = SingleProcessEngine(
            job.module,
            job.settings,
            reduction=REDUCTIONS[name],
            options=job.options(
                overlap=not compared if config.overlap is None else config.overlap,
                exact_seconds=exact,
            ),
            capture=GraphedStep.of if config.graph else None,
        )
    if job.shares is not None and engine.auto is not None:
        engine.auto.replay(job.shares)
    run = TrainingRun(name, engine, log, started)
    if job.stored is not None:
        run.load_state_dict(job.stored["run"])
    return run


def save(job: PreparedRun, run: TrainingRun) -> None:
    """Write the checkpoint if the config names one; collective over processes."""
    if job.config.checkpoint is None:
        return
    state = {
        "settings": job.settings.stored(),
        "identity": job.identity(),
        "source": job.source,
        "run": run.state_dict(),
    }
    if run.engine.is_main_process:
        checkpoint.save(job.config.checkpoint, state)
    run.engine.total([0.0])  # a barrier: no process continues before the file is written


def finish(history: History, job: PreparedRun, report: Report, log: Log) -> None:
    """Print, log and plot the result of a run."""
    without, with_data = history.seconds_per_epoch
    log.write(
        "end",
        accuracy=history.accuracy,
        seconds_per_epoch=without,
        seconds_per_epoch_with_data=with_data,
        first_batch_seconds=history.first_batch,
        diverged=history.divergence or None,
    )
    report.line(history.times)
    report.line(history)
    if history.divergence:
        report.warning(f"{history.divergence}; a smaller learning rate may help")
    if job.config.plot is not None:
        on_gpu = any(device.type == "cuda" for device in job.settings.devices)
        hint = " (times of the host)" if on_gpu and not job.config.exact_times else ""
        curve = curves.Curve(job.config.reduce, history.epochs, history.steps)
        curves.plot([curve], job.config.plot, f"{job.title} on {job.data}: {job.settings}{hint}")


def train(
    devices: DeviceSpec = None,
    batch_size: int | None = None,
    lr: float | None = None,
    *,
    quiet: bool = False,
    **options: Any,
) -> History:
    """Train a model data-parallel, one replica for every device that `pycollect.devices` returns.

    `devices` or `num_gpus` may be a number of GPUs, as in Dive into Deep Learning. `batch_size`
    counts the examples of all ranks together; None means the default of model and data set.
    Further options are those of `Config` (data, model, epochs, seed, momentum, weight_decay,
    weights, microbatch, sync_batchnorm, strict, shuffle, drop_last, scale_batch, scale_lr,
    data_dir, image_size; reduce, overlap, prefetch, graph, deterministic,
    exact_times, checkpoint, resume, replay_shares, log, plot). Equal options give equal bits,
    whatever the load of the machine. Raises ValueError for a bad value, TypeError for an unknown
    option, DataError if the data is not available, CheckpointError if a checkpoint cannot be read,
    written or resumed, OutputError if log or plot cannot be written.

    >>> train("cpu*2", data="digits", epochs=1, quiet=True).epochs[0].number
    1
    """
    asked = {"devices": devices, "batch_size": batch_size, "lr": lr, **options}
    job, notice = prepare(Config.of(asked))
    report = Report(quiet)
    if notice:
        report.line(notice)
    return run(job, report)
