"""What the programs in bench/ have in common: options that are looked at, Ctrl-C, sentences."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from .. import _command
from .output import check_files


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; files that could not be written after the measuring are an error."""
    args = parser.parse_args(argv)
    try:
        check_files(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def run(name: str, work: Callable[[], int]) -> int:
    """Do the work of bench/NAME.py and return its exit status; a ValueError is a sentence."""
    program = f"bench/{name}.py"

    def refusing() -> int:
        try:
            return work()
        except ValueError as error:
            _command.say(f"{program}: error: {error}")
            return _command.BAD_INPUT

    return _command.run(program, refusing)
