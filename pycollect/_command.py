"""What all commands do around their work: Ctrl-C, SIGTERM, and standard output that takes no more.

Imports next to nothing, because it is at work while torch is being imported.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ._files import OutputError

BAD_INPUT = 2
BY_SIGNAL = 128  # and its number, as a shell reports it: 130 after Ctrl-C, 143 after SIGTERM


class Stopped(KeyboardInterrupt):
    """The work was asked to stop, and what it has is in order; the message says where that is."""

    def __init__(self, number: int = signal.SIGINT, message: str = "interrupted") -> None:
        super().__init__(message)
        self.number = number  # of the signal


class Unheard(Exception):
    """Standard output takes no more: its reader has gone, or the disk is full."""


class Interruption:
    """Ends a block at Ctrl-C or SIGTERM, so that what it has done so far can be kept.

    >>> with Interruption() as interruption:
    ...     raise KeyboardInterrupt
    >>> bool(interruption)
    True
    """

    def __init__(self) -> None:
        self.number = 0  # of the signal
        self._before: Any = None

    def __bool__(self) -> bool:
        return self.number != 0

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # no other may, or needs to
            self._before = signal.signal(signal.SIGTERM, _stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if isinstance(error, KeyboardInterrupt):
            self.number = getattr(error, "number", signal.SIGINT)
        return self.number != 0

    def reraise(self, kept: object = None) -> None:
        """Stop here if the block was stopped; `kept` is the file with what it had done."""
        if self.number:
            where = f"; what there was by then is in {kept}" if kept else ""
            raise Stopped(self.number, f"interrupted{where}")


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


@contextmanager
def interrupts_kept_from_children(by_multiprocessing: bool = False) -> Iterator[None]:
    """Start processes that never hear Ctrl-C: this one does, behind the block, and ends them.

    A terminal sends it to all of them, and each would print a traceback; so would one whose start
    is broken off. A blocked signal is inherited. `by_multiprocessing`: that module starts them;
    before its first one it starts a process of its own, and unblocks the signal behind that.
    """
    if by_multiprocessing:
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()
    with _interrupts_later():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """What Python would do at SIGINT and SIGTERM, it does at the end of the block.

    Blocking them is not enough: other threads of this process take them for it.
    """
    came: list[int] = []
    before: dict[int, Any] = {}
    later = True

    def hear(number: int, frame: FrameType | None) -> None:
        if later:
            came.append(number)
        else:
            before[number](number, frame)

    if threading.current_thread() is threading.main_thread():  # no other is interrupted
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {n: signal.getsignal(n) for n in numbers if callable(signal.getsignal(n))}
    try:
        for number in before:
            signal.signal(number, hear)
        yield
    finally:
        # A signal that arrives while the handlers are put back may raise and leave `hear` in place
        # for the other signal; `hear` then passes that one on.
        later = False
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def run(program: str, work: Callable[[], int]) -> int:
    """Do the work of a command and return its exit status, that of a signal or of lost output too.

    A reader that goes, as `head` does, is met with silence, a disk that is full with a sentence.
    """
    ours = _heed_interrupts()
    try:
        return _heard(work)
    except KeyboardInterrupt as stop:
        if ours:  # who presses Ctrl-C again while all ends gets no traceback for it
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        say(str(stop) or "interrupted")
        return BY_SIGNAL + getattr(stop, "number", signal.SIGINT)
    except OutputError as error:
        say(f"{program}: error: {error}")
        return BAD_INPUT
    except Unheard as unheard:
        with suppress(OSError, ValueError):  # or the end of Python tries once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        cause = unheard.__cause__
        if isinstance(cause, BrokenPipeError):
            return BY_SIGNAL + signal.SIGPIPE
        why = cause.strerror if isinstance(cause, OSError) else cause
        say(f"{program}: error: standard output cannot be written ({why})")
        return BAD_INPUT


def say(line: str) -> None:
    """Print a line on standard error, if anybody is there."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _heard(work: Callable[[], int]) -> int:
    if sys.stdout is None:  # closed by who started this process, who wants to hear nothing
        return work()
    output: Any = _Output(sys.stdout)
    with redirect_stdout(output):
        try:
            return work()
        finally:
            output.flush()


class _Output:
    """A stream that tells failures of its own from those of files and of pipes to processes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError as error:
            raise Unheard from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise Unheard from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def quiet_imports() -> None:
    """Let Ctrl-C end one of our own commands in silence, from here until `run` begins.

    A variable of the environment with a bad value is one sentence meanwhile. In another program
    both stay as they are: there they are the program's own matter.
    """
    if not _is_command(sys.argv[0] if sys.argv else "", sys.orig_argv):
        return
    sys.excepthook = _say_bad_value
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _end_at_once)


def _say_bad_value(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, ValueError):
        say(f"pycollect: error: {error}")
    else:
        sys.__excepthook__(kind, error, traceback)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(BY_SIGNAL + number)  # an exception would be a traceback through all of torch


def _heed_interrupts() -> bool:
    """End what `quiet_imports` began; tell whether this process is one of our commands."""
    if sys.excepthook is _say_bad_value:
        sys.excepthook = sys.__excepthook__
    ours = signal.getsignal(signal.SIGINT) is _end_at_once
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return ours


def _is_command(script: str, arguments: list[str]) -> bool:
    """Tell whether a process that imports this is one of our commands, by how it was started.

    >>> _is_command("-m", ["python", "-m", "pycollect.train"]), _is_command("mine.py", ["python"])
    (True, False)
    """
    if script == "-m":  # until Python has found the module
        modules = [b for a, b in pairwise(arguments) if a == "-m"]
        return modules[:1] != [] and modules[0].partition(".")[0] == "pycollect"
    path = Path(script)
    ours = Path(__file__).resolve().parents[1] / "bench"  # of a checkout
    return path.name == "pycollect" or path.resolve().parent == ours
