"""Files that commands write: looked at before any time is spent, one sentence if it fails later.

A file takes the place of a regular file or of nothing; a FIFO, a device, a socket and a folder are
left as they are. A link stays a link: what it names is written. Imports nothing but the standard
library, for scripts that run where there is no torch.
"""

import errno
import importlib.util
import io
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

# Of a name beside the final one, which must not become too long for the file system.
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
# What takes lines one by one, as a terminal and a pipe do.
_STREAMS = ("a FIFO", "a device")
_DESCRIPTORS = {"/dev/stdout": 1, "/dev/stderr": 2}

Fill = Callable[[BinaryIO], object]


class OutputError(RuntimeError):
    """A file cannot be written; the message is one sentence."""


def kind_of(path: Path | str) -> str:
    """Say what is there, links followed, or "" for nothing; OSError if that cannot be told.

    >>> kind_of("/dev/null"), kind_of("no such file")
    ('a device', '')
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):  # nothing, or a link to nothing
        return ""
    return next(kind for is_kind, kind in _KINDS if is_kind(mode))


def check_place(
    what: str, path: Path | str, *, moved: bool = False, streamed: bool = False
) -> None:
    """Raise ValueError unless a file can be written there, which is tried; nothing is left behind.

    What is there may be written though its folder is not; what is written beside and then `moved`
    there needs the folder alone. Lines that are `streamed` may go to a FIFO, a terminal or the
    like.

    >>> check_place("log", ".")
    Traceback (most recent call last):
    ValueError: the log must be a file, and . is a folder
    """
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
        why = f"is there already and not writable ({error.strerror})"
        raise ValueError(f"the {what} {path} {why}") from None
    try:
        with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
            pass
    except OSError as error:
        why = f"is not there or not writable ({error.strerror})"
        raise ValueError(f"the folder of the {what} {path} {why}") from None


def check_picture(path: Path | str, endings: Sequence[str] = (".png", ".svg", ".pdf")) -> None:
    """Raise ValueError unless a picture can be written there: its ending tells the format.

    >>> check_picture("run.gif")
    Traceback (most recent call last):
    ValueError: a picture ends in .png, .svg, .pdf, and run.gif does not
    """
    if Path(path).suffix.lower() not in endings:
        raise ValueError(f"a picture ends in {', '.join(endings)}, and {path} does not")
    check_place("picture", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a picture needs matplotlib; install pycollect[train]")


def check_input(what: str, path: Path | str) -> None:
    """Raise ValueError unless there is a regular file to read: reading a FIFO could last for ever.

    >>> check_input("checkpoint", "/dev/zero")
    Traceback (most recent call last):
    ValueError: the checkpoint must be a regular file, and /dev/zero is a device
    """
    try:
        kind = kind_of(path)
    except OSError as error:
        raise ValueError(f"the {what} {path} cannot be read ({error.strerror})") from None
    if not kind:
        raise ValueError(f"there is no {what} {path}")
    if kind != _REGULAR:
        raise ValueError(f"the {what} must be a regular file, and {path} is {kind}")


def open_lines(path: Path | str, *, append: bool) -> TextIO:
    """Open a file that is written line by line; OSError if that cannot be, or nobody reads a FIFO.

    The standard output and error of this process are taken as they are: a file that they go to is
    gone on with.
    """
    if str(path) in _DESCRIPTORS:
        return os.fdopen(os.dup(_DESCRIPTORS[str(path)]), "a", encoding="utf-8")
    how = os.O_APPEND if append else os.O_TRUNC
    try:  # without blocking: opening a FIFO otherwise waits for a reader, perhaps for ever
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | how, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nobody reads it; start the reader first") from error
        raise
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "a" if append else "w", encoding="utf-8")


@contextmanager
def writing(what: str, path: Path | str) -> Iterator[None]:
    """Turn what the system refuses into an OutputError.

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
    """Write a whole file at once; OutputError if that fails, or if no regular file is there."""
    with writing(what, path):
        _require_regular(path)
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)


def write_picture(figure: Any, path: Path | str) -> None:
    """Write a figure of matplotlib in the format of its ending; OutputError if that fails."""
    drawn = io.BytesIO()  # the picture that is there stays until the new one is whole
    figure.savefig(drawn, dpi=150, format=Path(path).suffix[1:].lower())
    write("picture", path, drawn.getvalue())


def replace(path: Path | str, fill: Fill) -> None:
    """Write a file beside its place and move it there: who opens the path sees a whole file.

    Raises OSError, and what `fill` raises; then the old file is as it was.
    """
    _require_regular(path)
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name[:_NAME_BYTES]}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    finally:
        with suppress(OSError):  # not there any more if all went well, or never was
            beside.unlink()


def _require_regular(path: Path | str) -> None:
    """What was looked at long ago may be something else by now."""
    kind = kind_of(path)
    if kind not in ("", _REGULAR):
        raise OSError(errno.EINVAL, f"it is {kind}", str(path))
