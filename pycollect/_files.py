"""Output files of commands: checked before the work starts; a later failure is one sentence.

A file may be new or replace a regular file, never a FIFO, a device, a socket or a folder. A
symbolic link is kept, and its target is written. Imports only the standard library, for scripts
that run without torch.
"""

import errno
import importlib.util
import io
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

# Length to which the name of a temporary file is cut, so that no file system refuses it.
_NAME_BYTES = 40
_REGULAR = "a regular file"
_KINDS = (
    (stat.S_ISREG, _REGULAR),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)
# Kinds of files to which lines may be streamed, such as terminals and pipes.
_STREAMS = ("a FIFO", "a device")
_DESCRIPTORS = {"/dev/stdout": 1, "/dev/stderr": 2}


class OutputError(RuntimeError):
    """A file cannot be written; the message is one sentence."""


def kind_of(path: Path | str) -> str:
    """Return the kind of file at a path, links followed, or "" for none; OSError if unknown.

    >>> kind_of("/dev/null"), kind_of("no such file")
    ('a device', '')
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):  # nothing, or a link to nothing
        return ""
    return next(kind for is_kind, kind in _KINDS if is_kind(mode))


def check_output_path(
    what: str, path: Path | str, *, moved: bool = False, streamed: bool = False
) -> None:
    """Raise ValueError unless a file can be written there. Tries it and leaves no file behind.

    An existing file may be writable where its folder is not. `moved`: the file is written next to
    the path and moved there, so only the folder must be writable. `streamed`: lines may also go to
    a FIFO, a terminal or another device.

    >>> check_output_path("log", ".")
    Traceback (most recent call last):
    ValueError: the log must be a file, and . is a folder
    """
    if not os.fspath(path):
        raise ValueError(f"the {what} is '', which names no file")
    try:
        kind = kind_of(path)
    except OSError as error:
        raise ValueError(f"the {what} {path} cannot be written ({error.strerror})") from None
    if streamed and kind in _STREAMS:
        return
    if kind not in ("", _REGULAR):
        regular = "file" if kind == "a folder" else "regular file"
        raise ValueError(f"the {what} must be a {regular}, and {path} is {kind}")
    try:
        if kind and not moved:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            return
    except OSError as error:
        why = f"exists and is not writable ({error.strerror})"
        raise ValueError(f"the {what} {path} {why}") from None
    try:
        with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
            pass
    except OSError as error:
        why = f"does not exist or is not writable ({error.strerror})"
        raise ValueError(f"the folder of the {what} {path} {why}") from None


def check_picture(path: Path | str) -> None:
    """Raise ValueError unless a picture can be written there; its suffix selects the format.

    >>> check_picture("run.gif")
    Traceback (most recent call last):
    ValueError: a picture ends in .png, .svg, .pdf, and run.gif does not
    """
    check_output_path("picture", path)
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"a picture ends in .png, .svg, .pdf, and {path} does not")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a picture needs matplotlib; install pycollect[train]")


def check_input(what: str, path: Path | str) -> None:
    """Raise ValueError unless the path is a regular file: a read from a FIFO might never end.

    >>> check_input("checkpoint", "/dev/zero")
    Traceback (most recent call last):
    ValueError: the checkpoint must be a regular file, and /dev/zero is a device
    """
    try:
        kind = kind_of(path)
    except OSError as error:
        raise ValueError(f"the {what} {path} cannot be read ({error.strerror})") from None
    if not kind and os.path.islink(path):
        raise ValueError(f"the {what} {path} is a link to {os.readlink(path)}, which is not there")
    if not kind:
        raise ValueError(f"there is no {what} {os.fspath(path) or repr(path)}")
    if kind != _REGULAR:
        raise ValueError(f"the {what} must be a regular file, and {path} is {kind}")


def open_lines(path: Path | str, *, append: bool) -> TextIO:
    """Open a file for writing line by line; OSError if that fails, or if a FIFO has no reader.

    Standard output and error of this process are used as they are: a file behind them is continued.
    """
    if str(path) in _DESCRIPTORS:
        return os.fdopen(os.dup(_DESCRIPTORS[str(path)]), "a", encoding="utf-8")
    how = os.O_APPEND if append else os.O_TRUNC
    try:  # without blocking: opening a FIFO otherwise waits for a reader, perhaps forever
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | how, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it has no reader; start the reader first") from error
        raise
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "a" if append else "w", encoding="utf-8")


@contextmanager
def writing(what: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError of the block into an OutputError.

    >>> with writing("log", "run.jsonl"):
    ...     raise OSError(28, "No space left")
    Traceback (most recent call last):
    pycollect._files.OutputError: the log run.jsonl cannot be written (No space left)
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the {what} {path} cannot be written ({error.strerror or error})"
        ) from error


def write(what: str, path: Path | str, content: str | bytes) -> None:
    """Write a complete file; OutputError if that fails."""
    with writing(what, path):
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)


def write_picture(figure: Any, path: Path | str) -> None:
    """Write a matplotlib figure in the format of its suffix; OutputError if that fails."""
    drawn = io.BytesIO()  # an existing picture stays until the new one is complete
    figure.savefig(drawn, dpi=150, format=Path(path).suffix[1:].lower())
    write("picture", path, drawn.getvalue())


def replace(path: Path | str, fill: Callable[[BinaryIO], object]) -> None:
    """Write a file next to the path and move it there, so that readers see only complete files.

    Raises OSError, and the exceptions of `fill`; the old file is then unchanged.
    """
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name[:_NAME_BYTES]}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    finally:
        with suppress(OSError):  # absent after a successful move, or if it was never created
            beside.unlink()
