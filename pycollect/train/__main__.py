"""`python -m pycollect.train`: trains a model on the command line, see --help."""

import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

from .. import _command
from .._command import BAD_INPUT, BY_SIGNAL, Stopped, Unheard, say
from .._files import OutputError
from .checkpoint import CheckpointError
from .compare import check as check_comparison
from .compare import check_options
from .compare import run as compare
from .data import DataError
from .job import Job, prepare
from .options import config, parser
from .processes import (
    Family,
    check_backend,
    rank_of_this_process,
    run_rank,
    torchrun_family,
    with_devices,
)
from .report import Report
from .trainer import run

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; give the exit code: 0, 2 for bad input, 130 or 143 after a signal."""
    command = parser()
    return _command.run(command.prog, lambda: _main(command, arguments))


def _main(command: ArgumentParser, arguments: Sequence[str] | None) -> int:
    with nullcontext() if rank_of_this_process() == 0 else redirect_stderr(None):
        args = command.parse_args(arguments)
    family = Family()
    try:
        try:
            check_backend(args.backend)
            family = torchrun_family(args.backend)
            job, notice = family.after_rank_0(lambda: _prepare(args, family.world))
        except ValueError as error:
            # Processes that have not met yet all find the same; then rank 0 speaks for them.
            if family.first_to_fail() and (family.store or rank_of_this_process() == 0):
                command.error(str(error))
            return BAD_INPUT
        if notice and family.rank == 0:
            print(notice, flush=True)
        _run(args, job, family)
    except (DataError, CheckpointError, OutputError) as error:
        if family.first_to_fail():
            say(f"{command.prog}: error: {error}")
        return BAD_INPUT
    except KeyboardInterrupt as stop:
        number = getattr(stop, "number", signal.SIGINT)
        if family.first_to_fail():
            raise Stopped(number, _interrupted(args.checkpoint)) from None
        return BY_SIGNAL + number
    except Unheard:  # who reads the output, or the disk that it goes to, takes no more
        family.first_to_fail()
        raise
    except Exception:
        if family.first_to_fail():
            raise
        return FAILED
    return 0


def _prepare(args: Namespace, world: int) -> tuple[Job, str]:
    if args.compare:
        check_options(vars(args))
    asked = config(args)
    if args.backend is not None:
        asked = with_devices(asked, args.backend, world)
    job, notice = prepare(asked, args.backend)
    if args.compare:
        check_comparison(job, args.compare, args.ddp_backend)
    elif args.ddp_backend is not None:
        raise ValueError("--ddp-backend is for --compare; of torchrun's processes it is --backend")
    return job, notice


def _run(args: Namespace, job: Job, family: Family) -> None:
    if job.backend is not None:
        run_rank(job, family)
    elif args.compare:
        compare(job, args.compare, Report(), args.ddp_backend)
    else:
        run(job, Report())


def _interrupted(checkpoint: Path | None) -> str:
    if checkpoint is not None and checkpoint.exists():
        return f"interrupted; --resume {checkpoint} --checkpoint {checkpoint} goes on from here"
    return "interrupted"


if __name__ == "__main__":
    sys.exit(main())
