"""Ctrl-C as a request: the step under way is finished, then the run stops where it can go on."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Stopped(KeyboardInterrupt):
    """Ctrl-C was pressed, and everything is between two steps."""


class Interrupt:
    """While it lasts, the first Ctrl-C is only noted, and the second interrupts at once.

    One that is not `wanted` leaves Ctrl-C as it is, and so does any outside of the main thread,
    which never gets signals.

    >>> with Interrupt(wanted=True) as interrupt:
    ...     interrupt.check()
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> "Interrupt":
        if self._wanted:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._wanted:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raise Stopped if Ctrl-C was pressed."""
        if self._asked:
            raise Stopped
