"""The training loop: epochs over shuffled batches, for one run or several alternating runs.

Alternating runs train on the same batches at the same time, so a comparison is fair on a machine
whose speed drifts. The training step itself is in replica_trainer.py, that of a DDP process in
ddp.py.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from inspect import cleandoc
from typing import Any

from pycollect.devices import DeviceSpec

from .._command import Stopped
from . import checkpoint, curves
from .ddp import DDPEngine
from .engine import Engine
from .graph import GraphedStep
from .interrupt import Interrupt, StopConsensus
from .loader import LoaderOptions
from .log import Log
from .options import Options, StepOptions
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
    printer: ProgressPrinter,
    interrupt: Interrupt | None = None,
) -> Iterator[Sequence[TrainingRun]]:
    """Train the runs on the same batches; yield them after every epoch.

    Their order alternates from step to step. All must be at the same step when training starts.
    """
    options, engine = prepared.options, runs[0].engine
    train = engine.loader(prepared.data.train, prepared.loading)
    # Images from files may be large: a batch size that fits in memory for training fits here too.
    small = _TEST_BATCH if isinstance(prepared.data.test, tuple) else 0
    test_size = max(small, options.batch_size)
    in_order = LoaderOptions(test_size, shuffle=False, prefetch=prepared.loading.prefetch)
    test = engine.loader(prepared.data.test, in_order, ahead=False)
    first, done = runs[0].next_step
    for epoch in range(first, options.epochs + 1):
        images = train.examples(epoch)
        bar = printer.bar(f"epoch {epoch}", sum(images), sum(images[:done]))
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
                run.finish_epoch(epoch, batches, prepared.data.evaluated)
        yield runs


def run(
    prepared: PreparedRun, printer: ProgressPrinter, consensus: StopConsensus | None = None
) -> RunResult:
    """Train one run and print a line per epoch; see `train` and `train_epochs`."""
    options = prepared.options
    printer.line(f"{prepared}, reduced by {prepared.reducer}")
    with Log(options.log, append=prepared.stored is not None) as log, prepared.repeatable():
        log.write("start", **prepared.described())
        run = start_run(prepared, options.reduce, log)
        train_epochs(prepared, run, printer, consensus=consensus)
        result = run.result(prepared.options)
        finish(result, prepared, printer, log)
    return result


def train_epochs(
    prepared: PreparedRun,
    run: TrainingRun,
    printer: ProgressPrinter,
    suffix: str = "",
    consensus: StopConsensus | None = None,
) -> None:
    """Train one run to the end, with a printed line and a checkpoint per epoch.

    If a checkpoint is to be written, Ctrl-C takes effect after the current step. Several processes
    need `consensus` for this, which makes them stop at the same step.
    """
    first, _ = run.next_step
    if first > prepared.options.epochs:
        printer.notice(
            f"nothing is left to train: the run has had {first - 1} epochs, of "
            f"{prepared.options.epochs}; pass more epochs to go on"
        )
        save(prepared, run)
        return
    alone = prepared.backend is None
    enabled = prepared.options.checkpoint is not None and (alone or consensus is not None)
    with Interrupt(enabled, consensus) as interrupt:
        try:
            for _ in fit(prepared, [run], printer, interrupt):
                printer.line(f"{run.epochs[-1]}{suffix}")
                save(prepared, run)
                interrupt.check()
        except Stopped:
            save(prepared, run)
            raise


def start_run(prepared: PreparedRun, name: str, log: Log, *, compared: bool = False) -> TrainingRun:
    """Return a training run at its first step, or at the step of the checkpoint to resume.

    With `compared` its reduction is timed exactly, and by default runs after the backward pass.
    """
    options = prepared.options
    started = time.perf_counter()
    exact = compared or options.exact_times
    engine: Engine
    if prepared.backend is not None:
        prefetch = prepared.loading.prefetch
        engine = DDPEngine(prepared.module, prepared.options, exact_times=exact, prefetch=prefetch)
    else:
        engine = SingleProcessEngine(
            prepared.module,
            prepared.options,
            reduction=GRADIENT_REDUCTIONS[name],
            options=StepOptions(
                microbatch=options.microbatch,
                overlap=not compared if options.overlap is None else options.overlap,
                sync_batchnorm=options.sync_batchnorm,
                strict=options.strict,
                exact_times=exact,
                compile=options.compile,
            ),
            capture=GraphedStep.of if options.graph else None,
        )
    if prepared.shares is not None and engine.auto is not None:
        engine.auto.replay(prepared.shares)
    run = TrainingRun(name, engine, log, started)
    if prepared.stored is not None:
        run.load_state_dict(prepared.stored["run"])
    return run


def save(prepared: PreparedRun, run: TrainingRun) -> None:
    """Write the checkpoint if the options name one; collective over processes."""
    if prepared.options.checkpoint is None:
        return
    state = {
        "settings": prepared.options.stored(),
        "identity": prepared.identity(),
        "source": prepared.source,
        "run": run.state_dict(),
    }
    if run.engine.is_main_process:
        checkpoint.save(prepared.options.checkpoint, state)
    run.engine.total([0.0])  # a barrier: no process continues before the file is written


def finish(result: RunResult, prepared: PreparedRun, printer: ProgressPrinter, log: Log) -> None:
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
    printer.line(result.times)
    printer.line(result)
    if result.divergence:
        printer.warning(f"{result.divergence}; a smaller learning rate may help")
    if prepared.options.plot is not None:
        on_gpu = any(device.type == "cuda" for device in prepared.options.devices)
        hint = " (times of the host)" if on_gpu and not prepared.options.exact_times else ""
        curves.plot([result], prepared.options.plot, f"{prepared}{hint}")


def train(
    devices: DeviceSpec = None,
    batch_size: int | None = None,
    lr: float | None = None,
    *,
    quiet: bool = False,
    **options: Any,
) -> RunResult:
    """Train a model data-parallel, with one replica per rank, and return the `RunResult`.

    Without `quiet` it prints a line per epoch. Equal options give equal bits, whatever the load of
    the machine, but not with `weights="auto"`, nor on GPUs without `deterministic`. An option that
    is None or left out has the value of the checkpoint to resume, or its default.

    Raises ValueError for a bad value, TypeError for an unknown option or a value of another type,
    DatasetError if the data is not available, CheckpointError if a checkpoint cannot be read,
    written or resumed, OutputError if log or plot cannot be written, and KeyboardInterrupt at a
    signal, once the checkpoint is written.

    >>> train("cpu*2", data="digits", epochs=1, quiet=True).epochs[0].number
    1
    """
    asked = {"devices": devices, "batch_size": batch_size, "lr": lr, **options}
    prepared = prepare(Options.of(asked))
    printer = ProgressPrinter(quiet)
    printer.notice(prepared.data.notice)
    return run(prepared, printer)


train.__doc__ = f"{cleandoc(train.__doc__ or '')}\n\n{Options.documentation()}"
