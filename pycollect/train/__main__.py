"""The command line `python -m pycollect.train`, which trains a model; see --help."""

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import fields
from pathlib import Path

from .. import _command
from .._command import BAD_INPUT, BY_SIGNAL, StdoutError, Stopped, print_error
from .._files import OutputError
from .checkpoint import CheckpointError
from .comparison import COMPARED, check_options
from .comparison import run as compare
from .data import DatasetError
from .options import GROUPS, Options
from .output import ProgressPrinter
from .prepared_run import PreparedRun, prepare
from .torchrun import (
    LaunchContext,
    check_backend,
    rank_of_this_process,
    run_rank,
    torchrun_context,
    under_torchrun,
    with_devices,
)
from .training_run import run

FAILED = 1
EPILOG = """\
The line of an epoch gives the seconds of its training steps (splitting the batch, forward,
backward, reduction, update) without the evaluation and without waiting for data, the mean loss per
training example, and the share of test examples that are classified correctly. All ranks evaluate,
each a part of the test set. If loss or model are not finite at the end, a last line on standard
error reports it, and so does the log; the exit status is still 0.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m pycollect.train",
        usage="%(prog)s [option ...]",  # the full list would hide an error message below it
        description="Train a model data-parallel: one replica per rank, the batch scattered over "
        "the ranks, the gradients summed in one collective.",
        epilog=EPILOG,
    )
    groups = {title: p.add_argument_group(title) for title in GROUPS}
    for title, group in groups.items():
        Options.add_arguments(group, title)
    groups["reduction"].add_argument(
        "--compare",
        action="store_true",
        help=f"train with {' and then with '.join(COMPARED)} on the same batches, and print the "
        "ratios of the median times of a reduction, a step and an epoch",
    )
    groups["reduction"].add_argument(
        "--backend",
        metavar="NAME",
        help="pycollect, gloo or nccl: one process per rank, started by torchrun",
    )
    return p


def options(args: argparse.Namespace) -> Options:
    """Return the options of the run that a parsed command line asks for."""
    names = {option.name for option in fields(Options)}
    return Options.of({name: value for name, value in vars(args).items() if name in names})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 on failure, 2 for bad input, 130 or 143 after a signal."""
    command = parser()
    return _command.run(command.prog, lambda: _main(command, arguments))


def _main(command: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    with nullcontext() if rank_of_this_process() == 0 else redirect_stderr(None):
        args = command.parse_args(arguments)
    launch_context = LaunchContext()
    try:
        try:
            if args.compare:
                _check_comparison(args)
            check_backend(args.backend)
            launch_context = torchrun_context(args.backend)
            prepared = launch_context.after_rank_0(lambda: _prepare(args, launch_context.world))
        except ValueError as error:
            # Before the rendezvous every process raises the same error; then only rank 0 prints it.
            if launch_context.first_to_fail() and (
                launch_context.store or rank_of_this_process() == 0
            ):
                command.error(str(error))
            return BAD_INPUT
        ProgressPrinter(quiet=launch_context.rank != 0).notice(prepared.data.notice)
        _run(args, prepared, launch_context)
    except (DatasetError, CheckpointError, OutputError) as error:
        if launch_context.first_to_fail():
            print_error(f"{command.prog}: error: {error}")
        return BAD_INPUT
    except KeyboardInterrupt as stop:
        number = getattr(stop, "number", signal.SIGINT)
        if launch_context.first_to_fail():
            raise Stopped(number, _interrupted(args.checkpoint)) from None
        return BY_SIGNAL + number
    except StdoutError:  # the reader of standard output is gone, or the disk is full
        launch_context.first_to_fail()
        raise
    except Exception:
        if launch_context.first_to_fail():
            raise
        return FAILED
    return 0


def _check_comparison(args: argparse.Namespace) -> None:
    if args.backend is not None or under_torchrun():
        raise ValueError(
            "a comparison is of reductions within one process; --backend and torchrun are for one "
            "process per rank"
        )
    check_options(vars(args))


def _prepare(args: argparse.Namespace, world: int) -> PreparedRun:
    asked = options(args)
    if args.backend is not None:
        asked = with_devices(asked, args.backend, world)
    return prepare(asked, args.backend)


def _run(args: argparse.Namespace, prepared: PreparedRun, launch_context: LaunchContext) -> None:
    if args.compare:
        compare(prepared, ProgressPrinter())
    elif prepared.backend is not None:
        run_rank(prepared, launch_context, ProgressPrinter())
    else:
        run(prepared, ProgressPrinter())


def _interrupted(checkpoint: Path | None) -> str:
    if checkpoint is not None and checkpoint.exists():
        return f"interrupted; continue with --resume {checkpoint} --checkpoint {checkpoint}"
    return "interrupted"


if __name__ == "__main__":
    sys.exit(main())
