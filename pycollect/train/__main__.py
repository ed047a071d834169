"""The command line `python -m pycollect.train`, which trains a model; see --help."""

import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

from .. import _command
from .._command import BAD_INPUT, BY_SIGNAL, StdoutError, Stopped, print_error
from .._files import OutputError
from .checkpoint import CheckpointError
from .command_line import config, parser
from .comparison import check as check_comparison
from .comparison import check_options
from .comparison import run as compare
from .data import DatasetError
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
from .training_loop import run

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 on failure, 2 for bad input, 130 or 143 after a signal."""
    command = parser()
    return _command.run(command.prog, lambda: _main(command, arguments))


def _main(command: ArgumentParser, arguments: Sequence[str] | None) -> int:
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


def _prepare(args: Namespace, world: int) -> PreparedRun:
    if args.compare:
        check_options(vars(args))
        check_comparison(args.compare, args.backend)
        return prepare(config(args))
    asked = config(args)
    if args.backend is not None:
        asked = with_devices(asked, args.backend, world)
    return prepare(asked, args.backend)


def _run(args: Namespace, prepared: PreparedRun, launch_context: LaunchContext) -> None:
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
