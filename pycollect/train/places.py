"""Files that a run writes: looked at before any time is spent; one sentence if it fails then."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class OutputError(RuntimeError):
    """A log or a picture cannot be written; the message is one sentence."""


def check_place(what: str, path: Path | str, *, moved: bool = False) -> None:
    """Raise ValueError unless a file can be written there, as far as one can see.

    What is there may be written though its folder is not; what is written beside and then `moved`
    there needs the folder alone.

    >>> check_place("log", ".")
    Traceback (most recent call last):
    ValueError: the log must be a file, and . is a folder
    """
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"the {what} must be a file, and {path} is a folder")
    if path.exists() and not moved:
        if not os.access(path, os.W_OK):
            raise ValueError(f"the {what} {path} is there already and not writable")
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"the folder of the {what} {path} is not there or not writable")


@contextmanager
def writing(what: str, path: Path | str) -> Iterator[None]:
    """Turn what the system refuses into an OutputError.

    >>> with writing("log", "run.jsonl"):
    ...     raise OSError(28, "No space left")
    Traceback (most recent call last):
    pycollect.train.places.OutputError: the log run.jsonl cannot be written (No space left)
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the {what} {path} cannot be written ({error.strerror or error})"
        ) from error
