"""Runs: a prepared run from its first line to its result, in one thread or one for each rank."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from inspect import cleandoc
from typing import Any

import torch
import torch.distributed

from pycollect import threads
from pycollect.devices import DeviceSpec

from . import curves
from .interrupt import Interrupt, StopConsensus
from .options import Options
from .output import Log, ProgressPrinter
from .prepared_run import PreparedRun, prepare
from .records import RunResult, wait_for
from .training_run import TrainingRun

_dist: Any = torch.distributed  # torch's type stubs lack exports


def run(
    prepared: PreparedRun, printer: ProgressPrinter, consensus: StopConsensus | None = None
) -> RunResult:
    """Train, print a line per epoch, and return the result; see `train`.

    Several processes need `consensus` to write a checkpoint at a signal, after the same step.
    """
    if not torch.is_grad_enabled():
        raise ValueError("training records gradients, which is switched off here")
    printer.line(f"{prepared}, reduced by {prepared.reducer}")
    with Log(prepared.options.log, append=prepared.stored is not None) as log:
        log.write("start", **prepared.described())
        with prepared.repeatable():
            if prepared.needs_threads:
                result = _run_as_threads(prepared, printer, log)
            else:
                result = _trained(prepared, printer, log, consensus)
        finish(result, prepared, printer, log)
    return result


def _trained(
    prepared: PreparedRun,
    printer: ProgressPrinter,
    log: Log,
    consensus: StopConsensus | None = None,
    interrupt: Interrupt | None = None,
) -> RunResult:
    """Train the ranks of this process; with `interrupt`, another thread receives the signals."""
    alone = prepared.backend is None
    enabled = prepared.options.checkpoint is not None and (alone or consensus is not None)
    training = TrainingRun(prepared, printer, log)
    with Interrupt(enabled, consensus, interrupt) as stop:
        training.run(stop)
    return training.result()


def _run_as_threads(prepared: PreparedRun, printer: ProgressPrinter, log: Log) -> RunResult:
    """Train with a thread for each rank, as batch statistics over all ranks need."""
    devices, store = list(prepared.options.devices), _dist.HashStore()
    prepared, quiet = replace(prepared, backend="pycollect"), ProgressPrinter(quiet=True)
    enter_modes = _thread_modes()

    def run_rank(rank: int, world: int) -> RunResult:
        consensus = StopConsensus(store, rank, world, lambda: wait_for([devices[rank]]))
        output = (printer, log) if rank == 0 else (quiet, Log(None))
        with ExitStack() as stack:
            enter_modes(stack)
            return _trained(prepared, *output, consensus, interrupt)

    with Interrupt(prepared.options.checkpoint is not None) as interrupt:
        results = threads.launch(run_rank, len(devices), device=devices)
    first: RunResult = results[0]
    return replace(first, modules=[result.module for result in results])


def _thread_modes() -> Callable[[ExitStack], None]:
    """Return a function that enters the caller's modes of torch that are a thread's own."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    cached, device = torch.is_autocast_cache_enabled(), torch.get_default_device()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def enter(stack: ExitStack) -> None:
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        if device.type != "cpu":  # a mode for the default device costs some time in every call
            stack.enter_context(device)
        if hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))

    return enter


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
