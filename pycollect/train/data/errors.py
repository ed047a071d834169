"""What can be wrong with data that is asked for by name: it is damaged, or it is not there."""

import re

_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class DataError(RuntimeError):
    """A data set cannot be loaded; the message is one sentence that says why."""


class Unavailable(DataError):
    """A data set is not here and cannot be downloaded."""


def first_line(error: object) -> str:
    """Give the first line of an error's message, or its type when it has none.

    What torch adds for terminals, bold letters, is left out.

    >>> first_line(ValueError("it is \\x1b[1mnot\\x1b[0m there:\\nlook elsewhere"))
    'it is not there'
    """
    plain = _TERMINAL.sub("", str(error))
    return (plain.splitlines() or [type(error).__name__])[0].rstrip(":")
