"""The training loop: epochs over shuffled batches, for one run or several alternating runs.

Alternating runs train on the same batches at the same time, so a comparison is fair on a machine
whose speed drifts. The training step itself is in replica_trainer.py, that of a DDP process in
ddp.py.
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
from .output import Log, ProgressPrinter
from .prepared_run import PreparedRun, prepare
from .records import RunResult
from .reduce import GRADIENT_REDUCTIONS
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
    config = prepared.config
    printer.line(f"{prepared}, reduced by {prepared.reducer}")
    with Log(config.log, append=prepared.stored is not None) as log, prepared.repeatable():
        log.write("start", **prepared.described())
        run = start_run(prepared, config.reduce, log)
        train_epochs(prepared, run, printer, consensus=consensus)
        result = run.result(prepared.settings)
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
    if first > prepared.settings.epochs:
        printer.notice(
            f"nothing is left to train: the run has had {first - 1} epochs, of "
            f"{prepared.settings.epochs}; pass more epochs to go on"
        )
        save(prepared, run)
        return
    alone = prepared.backend is None
    enabled = prepared.config.checkpoint is not None and (alone or consensus is not None)
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
    config = prepared.config
    started = time.perf_counter()
    exact = compared or config.exact_times
    engine: Engine
    if prepared.backend is not None:
        prefetch = prepared.loading.prefetch
        engine = DDPEngine(prepared.module, prepared.settings, exact_times=exact, prefetch=prefetch)
    else:
        engine = SingleProcessEngine(
            prepared.module,
            prepared.settings,
            reduction=GRADIENT_REDUCTIONS[name],
            options=prepared.options(
                overlap=not compared if config.overlap is None else config.overlap,
                exact_times=exact,
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
    """Train a model data-parallel, with one replica per rank, and return the `RunResult`.

    Without `quiet` it prints a line per epoch. Equal options give equal bits, whatever the load of
    the machine, but not with `weights="auto"`, nor on GPUs without `deterministic`. These options
    decide the result. One that is None or left out has the value of the checkpoint to resume, or
    its default:

    devices: one rank per device that `pycollect.devices` returns, or a number of GPUs, as in Dive
        into Deep Learning (of CPU ranks where there is no GPU); default: all GPUs, else 2 CPU ranks
    num_gpus: the same number of GPUs, in place of `devices`
    batch_size: examples of all ranks together; default: that of data set and model
    lr, epochs: learning rate on the mean loss and passes over the data; default: as for batch_size
    scale_batch, scale_lr: multiply batch size or learning rate by the number of ranks (False)
    data: "auto", "digits", "fashion-mnist" or "folder", as in `load_dataset`; or examples of your
        own: a map-style data set, a pair of tensors (images and labels), or a `Data` ("auto")
    test_data: the test set of your own examples; without it the accuracy is that of training
    data_dir, image_size: further arguments of `load_dataset` ("data"; 320 pixels)
    model: a name in `MODELS` or an nn.Module; default: that of the data set
    seed, momentum, weight_decay, weights, microbatch, sync_batchnorm, strict, shuffle, drop_last:
        as in `RunSettings`, with its defaults; `weights` may also be a string such as "80,20"

    A checkpoint does not hold the other options, which decide how the training runs:

    reduce: a name in `GRADIENT_REDUCTIONS` ("pycollect")
    overlap: reduce gradients while the backward pass runs (True)
    prefetch: batches prepared ahead; default: 2 if files are decoded or a GPU is used, else 0
    graph: replay the step as a CUDA graph, with all ranks on one GPU (False)
    compile: run the steps after the first as one graph of torch.compile; True, or the name of one
        of its backends (False)
    deterministic: only use algorithms of torch that give the same bits every time (False)
    exact_times: wait for the GPUs at every time measurement (False)
    checkpoint: a file to write after every epoch, and at Ctrl-C or SIGTERM after the current step
    resume: a checkpoint to continue
    init_from: a checkpoint whose parameters and buffers a new run starts with; ranks, learning rate
        and all else may differ. `load_model` does the same for a module of yours
    replay_shares: a checkpoint whose measured shares are used again, step for step
    log: a file for JSON lines with every step and epoch
    plot: a picture of loss, accuracy and times to write (.png, .svg or .pdf)

    Raises ValueError for a bad value, TypeError for an unknown option or a value of another type,
    DatasetError if the data is not available, CheckpointError if a checkpoint cannot be read,
    written or resumed, OutputError if log or plot cannot be written, and KeyboardInterrupt at a
    signal, once the checkpoint is written.

    >>> train("cpu*2", data="digits", epochs=1, quiet=True).epochs[0].number
    1
    """
    asked = {"devices": devices, "batch_size": batch_size, "lr": lr, **options}
    prepared = prepare(Config.of(asked))
    printer = ProgressPrinter(quiet)
    printer.notice(prepared.data.notice)
    return run(prepared, printer)
