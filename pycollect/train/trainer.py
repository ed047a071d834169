"""The training loop: epochs over shuffled batches, for one way of reducing or several in turn.

Several are contestants that see the same batches in the same minutes, so that a comparison is
fair on a machine whose speed drifts. What happens inside a step is not here, see replicas.py.
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
from .contestant import Contestant
from .graph import GraphedStep
from .history import Epoch, Step, divergence
from .interrupt import Interrupt, Together
from .job import Job, prepare
from .loader import Loading
from .log import Log
from .one_process import OneProcess, Trainee
from .one_rank import OneRank
from .reduce import REDUCTIONS
from .report import Report
from .settings import Settings, device_list

# Examples of all ranks in a batch of the evaluation, unless a training batch is larger.
_TEST_BATCH = 1024


@dataclass(frozen=True)
class History:
    """A finished run: its settings, a record of every epoch and step, and the trained model."""

    settings: Settings
    epochs: list[Epoch]
    steps: list[Step]
    module: nn.Module  # as rank 0 has it
    first_batch: float | None = None  # seconds of initialisation, up to the end of the first step

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters, as rank 0 has them."""
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
        """The words on a loss or a model that is not finite at the end; "" if all is well."""
        return divergence(self.steps, self.module.state_dict().values())

    @property
    def times(self) -> str:
        """The line on what took how long."""
        without, with_data = self.seconds_per_epoch
        first = "" if self.first_batch is None else f"first batch: {self.first_batch:.1f} sec; "
        return f"{first}epoch: {without:.1f} sec, {with_data:.1f} sec with data loading"

    def __str__(self) -> str:
        where = device_list(self.settings.devices)
        seconds, _ = self.seconds_per_epoch
        return f"test acc: {self.accuracy:.2f}, {seconds:.1f} sec/epoch on {where}"


def fit(
    job: Job, contestants: Sequence[Contestant], report: Report, interrupt: Interrupt | None = None
) -> Iterator[Sequence[Contestant]]:
    """Train the contestants on the same batches; give them after every epoch.

    Who goes first alternates. They go on where they are, which must be the same step.
    """
    settings, trainee = job.settings, contestants[0].trainee
    train = trainee.loader(job.data.train, job.loading)
    # Images from files may be large: what fits in training fits here.
    small = _TEST_BATCH if isinstance(job.data.test, tuple) else 0
    test_size = max(small, settings.batch_size)
    in_order = Loading(test_size, shuffle=False, prefetch=job.loading.prefetch)
    test = trainee.loader(job.data.test, in_order, ahead=False)
    first, done = contestants[0].next_step
    for epoch in range(first, settings.epochs + 1):
        images = train.examples(epoch)
        bar = report.bar(f"epoch {epoch}", sum(images), sum(images[:done]))
        with closing(train.epoch(epoch, done)) as batches, bar:
            for number, batch in enumerate(batches, done + 1):
                for contestant in contestants[:: 1 if number % 2 else -1]:
                    contestant.step(batch, epoch, number)
                bar.step(batch.examples, contestants[0].latest_loss)
                if interrupt is not None:
                    interrupt.check()
        done = 0
        for contestant in contestants:
            with closing(test.epoch()) as batches:
                contestant.finish_epoch(epoch, batches)
        yield contestants


def run(job: Job, report: Report, together: Together | None = None) -> History:
    """Train with one way of reducing, a line per epoch; see `train`, and `train_epochs`."""
    config, settings = job.config, job.settings
    report.line(f"{job.title} on {job.data}: {settings}, reduced by {job.reducer}")
    with Log(config.log, append=job.stored is not None) as log, job.repeatable():
        log.write("start", **job.described())
        contestant = enter(job, config.reduce, log)
        train_epochs(job, contestant, report, together=together)
        history = History(
            settings,
            contestant.epochs,
            contestant.steps,
            contestant.trainee.modules[0],
            contestant.first_batch,
        )
        finish(history, job, report, log)
    return history


def train_epochs(
    job: Job,
    contestant: Contestant,
    report: Report,
    suffix: str = "",
    together: Together | None = None,
) -> None:
    """Train one contestant to the end, a line and a checkpoint per epoch.

    Ctrl-C is kept until a step is over where there is a checkpoint to write; processes need
    something that has them stop `together`.
    """
    alone = job.backend is None
    wanted = job.config.checkpoint is not None and (alone or together is not None)
    with Interrupt(wanted, together) as interrupt:
        try:
            for _ in fit(job, [contestant], report, interrupt):
                report.line(f"{contestant.epochs[-1]}{suffix}")
                save(job, contestant)
                interrupt.check()
        except Stopped:
            save(job, contestant)
            raise


def enter(job: Job, name: str, log: Log, *, compared: bool = False) -> Contestant:
    """Make a contestant that stands where the job begins.

    One that is compared shows what its reduction takes: exactly, and after the backward pass.
    """
    config = job.config
    started = time.perf_counter()
    exact = compared or config.exact_times
    trainee: Trainee
    if job.backend is not None:
        prefetch = job.loading.prefetch
        trainee = OneRank(job.module, job.settings, exact_seconds=exact, prefetch=prefetch)
    else:
        trainee = OneProcess(
            job.module,
            job.settings,
            reduction=REDUCTIONS[name],
            options=job.options(
                overlap=not compared if config.overlap is None else config.overlap,
                exact_seconds=exact,
            ),
            capture=GraphedStep.of if config.graph else None,
        )
    if job.shares is not None and trainee.auto is not None:
        trainee.auto.replay(job.shares)
    contestant = Contestant(name, trainee, log, started)
    if job.stored is not None:
        contestant.load_state_dict(job.stored["contestant"])
    return contestant


def save(job: Job, contestant: Contestant) -> None:
    """Write the checkpoint, if one is wanted."""
    if job.config.checkpoint is None:
        return
    state = {
        "settings": job.settings.stored(),
        "identity": job.identity(),
        "source": job.source,
        "contestant": contestant.state_dict(),
    }
    if contestant.trainee.speaks:
        checkpoint.save(job.config.checkpoint, state)
    contestant.trainee.total([0.0])  # the others meet the writer here: nobody reads an old one


def finish(history: History, job: Job, report: Report, log: Log) -> None:
    """Say, log and draw what came out."""
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
    """Train a model data-parallel, one replica for every device that `pycollect.devices` gives.

    `devices` may be a number of GPUs, as in the chapters, and so may `num_gpus`. `batch_size`
    counts the examples of all ranks together; what is None is the default of model and data set.
    Further options are those of `Config` (data, model, epochs, seed, momentum, weight_decay,
    weights, microbatch, sync_batchnorm, strict, shuffle, drop_last, scale_batch, scale_lr,
    data_dir, image_size; reduce, overlap, prefetch, graph, deterministic,
    exact_times, checkpoint, resume, replay_shares, log, plot). The same choice gives the same
    bits, whatever is running. Raises ValueError for a bad value, TypeError for an unknown option,
    DataError if the data cannot be had, CheckpointError if a checkpoint cannot be read, written or
    continued, OutputError if log or picture cannot be written.

    >>> train("cpu*2", data="digits", epochs=1, quiet=True).epochs[0].number
    1
    """
    asked = {"devices": devices, "batch_size": batch_size, "lr": lr, **options}
    job, notice = prepare(Config.of(asked))
    report = Report(quiet)
    if notice:
        report.line(notice)
    return run(job, report)
