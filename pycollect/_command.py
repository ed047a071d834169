"""Common code of all commands: Ctrl-C, SIGTERM, and standard output that cannot be written."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType
from typing import Any

from ._files import OutputError

BAD_INPUT = 2
BY_SIGNAL = 128  # plus the signal's number, as in a shell: 130 after Ctrl-C, 143 after SIGTERM


class Stopped(KeyboardInterrupt):
    """Raised when a signal stops the work; the message names the file with the partial results."""

    def __init__(self, number: int = signal.SIGINT, message: str = "interrupted") -> None:
        super().__init__(message)
        self.number = number  # number of the signal


class StdoutError(Exception):
    """Raised if standard output cannot be written: its reader closed it, or the disk is full."""


class Interruption:
    """Ends a block at Ctrl-C or SIGTERM, so that its partial results can be kept.

    >>> with Interruption() as interruption:
    ...     raise KeyboardInterrupt
    >>> bool(interruption)
    True
    """

    def __init__(self) -> None:
        self.number = 0  # number of the signal; 0: none
        self._before: Any = None

    def __bool__(self) -> bool:
        return self.number != 0

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # only it can set handlers
            self._before = signal.signal(signal.SIGTERM, _stop)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if isinstance(error, KeyboardInterrupt):
            self.number = getattr(error, "number", signal.SIGINT)
        return self.number != 0

    def reraise(self, kept: object = None) -> None:
        """Raise Stopped if the block was stopped; `kept` is the file with its partial results."""
        if self.number:
            where = f"; the partial results are in {kept}" if kept else ""
            raise Stopped(self.number, f"interrupted{where}")


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


@contextmanager
def interrupts_kept_from_children() -> Iterator[None]:
    """Keep Ctrl-C from the processes started in the block; the caller ends them after the block.

    A terminal sends SIGINT to all processes, and each would print a traceback, even during its
    start. Blocked signals are inherited. Other threads of this process still receive them, so
    Python's handling of SIGINT and SIGTERM is postponed to the end of the block.
    """
    arrived: list[int] = []
    before: dict[int, Any] = {}
    later = True

    def postpone(number: int, frame: FrameType | None) -> None:
        if later:
            arrived.append(number)
        else:
            before[number](number, frame)

    if threading.current_thread() is threading.main_thread():  # handlers run in no other thread
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {n: signal.getsignal(n) for n in numbers if callable(signal.getsignal(n))}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        for number in before:
            signal.signal(number, postpone)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # A signal that arrives while the handlers are restored may raise and leave `postpone`
        # installed for the other signal; `postpone` then forwards that one.
        later = False
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in arrived[:1]:
            signal.raise_signal(number)


def run(program: str, work: Callable[[], int]) -> int:
    """Run a command and return its exit status, also after a signal or a failed write of output.

    Prints nothing if the reader of a pipe has gone, as with `head`, and one sentence if the disk is
    full.
    """
    try:
        return _run_with_checked_stdout(work)
    except KeyboardInterrupt as stop:
        print_error(str(stop) or "interrupted")
        return BY_SIGNAL + getattr(stop, "number", signal.SIGINT)
    except OutputError as error:
        print_error(f"{program}: error: {error}")
        return BAD_INPUT
    except StdoutError as failure:
        with suppress(OSError, ValueError):  # otherwise Python would flush it again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        cause = failure.__cause__
        if isinstance(cause, BrokenPipeError):
            return BY_SIGNAL + signal.SIGPIPE
        why = cause.strerror if isinstance(cause, OSError) else cause
        print_error(f"{program}: error: standard output cannot be written ({why})")
        return BAD_INPUT


def print_error(line: str) -> None:
    """Print a line on standard error; ignore a failure to do so."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _run_with_checked_stdout(work: Callable[[], int]) -> int:
    if sys.stdout is None:  # the parent process closed it: no output is wanted
        return work()
    output: Any = _Output(sys.stdout)
    with redirect_stdout(output):
        try:
            return work()
        finally:
            output.flush()


def escaped(text: str, encoding: str | None) -> str:
    """Return the text with an escape sequence for each character that the encoding has not.

    >>> escaped("grün", "ascii")
    'gr\\\\xfcn'
    """
    known = encoding or "ascii"
    return text.encode(known, "backslashreplace").decode(known)


class _Output:
    """A stream that raises its own failures as StdoutError, unlike those of other files."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except UnicodeEncodeError:  # a letter that the output has not must not end the work
            return int(self._stream.write(escaped(text, self._stream.encoding)))
        except OSError as error:
            raise StdoutError from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise StdoutError from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
