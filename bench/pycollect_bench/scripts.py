"""Common parts of the scripts in bench/: checked options, Ctrl-C, and error messages."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from pycollect import _command

from .output import check_files


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; exit if a number is not positive or a file is not writable."""
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        numbers = value if isinstance(value, list) else [value]
        if name != "dims" and not all(map(_positive, numbers)):
            parser.error(f"--{name} must be positive, not {value}")
    try:
        check_files(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True  # only numbers are checked
    return math.isfinite(value) and value > 0


def run(name: str, work: Callable[[], int]) -> int:
    """Run `work` of bench/NAME.py and return its exit status; print a ValueError as one line."""
    program = f"bench/{name}.py"

    def refusing() -> int:
        try:
            return work()
        except ValueError as error:
            _command.print_error(f"{program}: error: {error}")
            return _command.BAD_INPUT

    return _command.run(program, refusing)
