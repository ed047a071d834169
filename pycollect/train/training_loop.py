"""The training loop: epochs over shuffled batches, for one run or several alternating runs.

Alternating runs train on the same batches at the same time, so a comparison is fair on a machine
whose speed drifts. The training step itself is in replicas.py.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from pycollect.devices import DeviceSpec

from .._command import Stopped
from . import checkpoint, curves
from .config import Config
from .ddp import DDPEngine
from .engine import Engine
from .graph import GraphedStep
from .interrupt import Interrupt, StopConsensus
from .loader import LoaderOptions
from .log import Log
from .prepared_run import PreparedRun, prepare
from .progress_printer import ProgressPrinter
from .reduce import GRADIENT_REDUCTIONS
from .run_result import RunResult
from .single_process import SingleProcessEngine
from .training_run import TrainingRun

# Examples of all ranks in an evaluation batch, unless a training batch is larger.
_TEST_BATCH = 1024


def fit(
    prepared: PreparedRun,
    runs: Sequence[TrainingRun],
    report: ProgressPrinter,
    interrupt: Interrupt | None = None,
) -> Iterator[Sequence[TrainingRun]]:
    """Train the runs on the same batches; yield them after every epoch.

    Their order alternates from step to step. All must be at the same step when training starts.
    """
    settings, engine = prepared.settings, runs[0].engine
    train = engine.loader(prepared.data.train, prepared.loading)
    # Images from files may be large: a batch size that fits in memory for training fits here too.
    small = _TEST_BATCH if isinstance(prepared.data.test, tuple) else 0
    test_size = max(small, settings.batch_size)
    in_order = LoaderOptions(test_size, shuffle=False, prefetch=prepared.loading.prefetch)
    test = engine.loader(prepared.data.test, in_order, ahead=False)
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


def run(
    prepared: PreparedRun, report: ProgressPrinter, consensus: StopConsensus | None = None
) -> RunResult:
    """Train one run and print a line per epoch; see `train` and `train_epochs`."""
    config = prepared.config
    report.line(f"{prepared}, reduced by {prepared.reducer}")
    with Log(config.log, append=prepared.stored is not None) as log, prepared.repeatable():
        log.write("start", **prepared.described())
        run = start_run(prepared, config.reduce, log)
        train_epochs(prepared, run, report, consensus=consensus)
        result = run.result(prepared.settings)
        finish(result, prepared, report, log)
    return result


def train_epochs(
    prepared: PreparedRun,
    run: TrainingRun,
    report: ProgressPrinter,
    suffix: str = "",
    consensus: StopConsensus | None = None,
) -> None:
    """Train one run to the end, with a printed line and a checkpoint per epoch.

    If a checkpoint is to be written, Ctrl-C takes effect after the current step. Several processes
    need `consensus` for this, which makes them stop at the same step.
    """
    alone = prepared.backend is None
    enabled = prepared.config.checkpoint is not None and (alone or consensus is not None)
    with Interrupt(enabled, consensus) as interrupt:
        try:
            for _ in fit(prepared, [run], report, interrupt):
                report.line(f"{run.epochs[-1]}{suffix}")
                save(prepared, run)
                interrupt.check()
        except Stopped:
            save(prepared, run)
            raise


def start_run(prepared: PreparedRun, name: str, log: Log, *, compared: bool = False) -> TrainingRun:
    """Return a training run at its first step, or at the step of the checkpoint to resume.

    With `compared` its reduction is timed exactly, and by default runs after the backward pass.
    """
    config = prepared.config
    started = time.perf_counter()
    exact = compared or config.exact_times
    engine: Engine
    if prepared.backend is not None:
        prefetch = prepared.loading.prefetch
        engine = DDPEngine(
            prepared.module, prepared.settings, exact_seconds=exact, prefetch=prefetch
        )
    else:
        engine = SingleProcessEngine(
            prepared.module,
            prepared.settings,
            reduction=GRADIENT_REDUCTIONS[name],
            options=prepared.options(
                overlap=not compared if config.overlap is None else config.overlap,
                exact_seconds=exact,
            ),
            capture=GraphedStep.of if config.graph else None,
        )
    if prepared.shares is not None and engine.auto is not None:
        engine.auto.replay(prepared.shares)
    run = TrainingRun(name, engine, log, started)
    if prepared.stored is not None:
        run.load_state_dict(prepared.stored["run"])
    return run


def save(prepared: PreparedRun, run: TrainingRun) -> None:
    """Write the checkpoint if the config names one; collective over processes."""
    if prepared.config.checkpoint is None:
        return
    state = {
        "settings": prepared.settings.stored(),
        "identity": prepared.identity(),
        "source": prepared.source,
        "run": run.state_dict(),
    }
    if run.engine.is_main_process:
        checkpoint.save(prepared.config.checkpoint, state)
    run.engine.total([0.0])  # a barrier: no process continues before the file is written


def finish(result: RunResult, prepared: PreparedRun, report: ProgressPrinter, log: Log) -> None:
    """Print, log and plot the result of a run."""
    without, with_data = result.seconds_per_epoch
    log.write(
        "end",
        accuracy=result.accuracy,
        seconds_per_epoch=without,
        seconds_per_epoch_with_data=with_data,
        first_batch_seconds=result.first_batch,
        diverged=result.divergence or None,
    )
    report.line(result.times)
    report.line(result)
    if result.divergence:
        report.warning(f"{result.divergence}; a smaller learning rate may help")
    if prepared.config.plot is not None:
        on_gpu = any(device.type == "cuda" for device in prepared.settings.devices)
        hint = " (times of the host)" if on_gpu and not prepared.config.exact_times else ""
        curves.plot([result], prepared.config.plot, f"{prepared}{hint}")


def train(
    devices: DeviceSpec = None,
    batch_size: int | None = None,
    lr: float | None = None,
    *,
    quiet: bool = False,
    **options: Any,
) -> RunResult:
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
    prepared, notice = prepare(Config.of(asked))
    report = ProgressPrinter(quiet)
    if notice:
        report.line(notice)
    return run(prepared, report)
