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
from .comparison import DEFAULT_BACKEND, PAIR, check_options, parse_names
from .comparison import NAMES as COMPARED
from .comparison import check as check_comparison
from .comparison import run as compare
from .data import DatasetError
from .options import GROUPS, Options
from .output import ProgressPrinter
from .prepared_run import PreparedRun, prepare
from .processes import (
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
    how = groups["reduction"].add_mutually_exclusive_group()
    for title, group in groups.items():
        Options.add_arguments(how if title == "reduction" else group, title)
    how.add_argument(
        "--compare",
        nargs="?",
        type=_names,
        const=PAIR,
        metavar="NAME,NAME",
        help=f"run several of {','.join(COMPARED)} one after the other on the same batches, and "
        "print the ratios of the median times of a reduction, a step and an epoch (alone: "
        f"{','.join(PAIR)})",
    )
    groups["reduction"].add_argument(
        "--backend",
        metavar="NAME",
        help="pycollect, gloo or nccl: one process per rank, started by torchrun, or those of "
        f"--compare (default there: {DEFAULT_BACKEND})",
    )
    return p


def options(args: argparse.Namespace) -> Options:
    """Return the options of the run that a parsed command line asks for."""
    names = {option.name for option in fields(Options)}
    return Options.of({name: value for name, value in vars(args).items() if name in names})


def _names(text: str) -> tuple[str, ...]:
    try:
        return parse_names(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
            backend = None if args.compare else args.backend
            if args.compare and under_torchrun():
                raise ValueError("a comparison starts processes itself: run it without torchrun")
            check_backend(backend)
            launch_context = torchrun_context(backend)
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


def _prepare(args: argparse.Namespace, world: int) -> PreparedRun:
    if args.compare:
        check_options(vars(args))
        check_comparison(args.compare, args.backend)
        return prepare(options(args))
    asked = options(args)
    if args.backend is not None:
        asked = with_devices(asked, args.backend, world)
    return prepare(asked, args.backend)


def _run(args: argparse.Namespace, prepared: PreparedRun, launch_context: LaunchContext) -> None:
    if args.compare:
        compare(prepared, args.compare, ProgressPrinter(), args.backend)
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
