"""The command `python -m pycollect.threads`, which runs a script written for torchrun; see --help.

All ranks are threads of this process.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from typing import NoReturn

import torch

from .. import _command
from . import script, torch_internals
from .launcher import Launch

DESCRIPTION = """\
Run a script that is written for torchrun as N ranks, which are threads of one process: with one
GPU, or none. One rank runs until it waits for others, and then the next, so that a run can be
repeated to the bit.
"""
EPILOG = """\
The script calls init_process_group itself, with any backend: pycollect serves every one. Ranks have
torchrun's environment variables, each its own view of os.environ. With --device cuda:N the variable
LOCAL_RANK is N in all ranks, because scripts choose their GPU by it.

A rank has its own module __main__, process groups and, while ranks take turns, its own random
states of torch, Python and NumPy, sys.argv, sys.path, sys.stdout, sys.stderr and print. Ranks share
imported modules and all else of a process: signal handlers (which a script cannot set), the working
directory, and the environment that code in C and started programs see.

The exit status is 0 if all ranks end, 1 after an exception, n after sys.exit(n), 2 for a bad option
and 130 after Ctrl-C. The first rank that fails ends the others, and its traceback is printed. If
all ranks wait and none can continue, that is an error at once, which names their lines.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m pycollect.threads",
        usage="%(prog)s --nproc N [option ...] script.py [argument ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--nproc", type=_count, required=True, metavar="N", help="number of ranks")
    p.add_argument(
        "--device",
        metavar="DEVICE",
        help="torch's current device in every rank, such as cuda:0 (default: the CPU)",
    )
    p.add_argument(
        "--parallel",
        action="store_true",
        help="ranks run at once, and share also what ranks that take turns have of their own",
    )
    p.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="for the whole run (default: no limit)"
    )
    p.add_argument("-m", "--module", action="store_true", help="script.py is a module's name")
    p.add_argument("script", metavar="script.py", help="the script, or with -m the module")
    p.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="argument", help="the script's arguments"
    )
    return p


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks; pass 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; pass seconds above 0")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    command, stdout = parser(), sys.stdout

    def work() -> int:
        args = command.parse_args(arguments)
        with redirect_stdout(stdout):  # the script gets Python's own stream, and its exceptions
            return _run(command, args)

    return _command.run(command.prog, work)


def _run(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        torch_internals.require_parts()
        launch = Launch(
            args.nproc,
            device=args.device,
            parallel=args.parallel,
            timeout=args.timeout,
            default_group=False,
            variables=script.rank_variables(),
        )
    except (ValueError, RuntimeError) as error:
        command.error(str(error).removeprefix("launch: "))
    try:
        find = script.find_module if args.module else script.find_script
        found = find(args.script, args.arguments)
    except script.ScriptError as error:
        command.error(str(error))
    except Exception as error:  # of the script's compilation, or of its package
        script.print_failure(error)
        return script.FAILED
    on_gpu = args.device is not None and torch.device(args.device).type == "cuda"
    return script.run(found, launch, args.nproc, on_gpu)


def _exit(status: int) -> NoReturn:
    """End the process, also if a rank could not be stopped and is still in C++ code.

    Python's finalization would end the rank's thread there, which aborts the process.
    """
    if any(t.daemon and t.name.startswith("rank ") for t in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    _exit(main())
