"""Ctrl-C as a request: the step under way is finished, then the run stops where it can go on.

So is SIGTERM, which schedulers and torchrun send.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from .._command import Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While it lasts, the first Ctrl-C or SIGTERM is only noted, and the second ends all at once.

    One that is not `wanted` leaves both as they are, and so does any outside of the main thread,
    which never gets signals. `together` decides for processes that must stop at the same check.

    >>> with Interrupt(wanted=True) as interrupt:
    ...     interrupt.check()
    """

    def __init__(self, wanted: bool, together: "Together | None" = None) -> None:
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._together = together
        self._asked = 0  # the signal
        self._checks = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if self._wanted:
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: somebody outside of Python had set it, and it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def check(self) -> None:
        """Raise Stopped if the run was asked to stop."""
        self._checks += 1
        if self._asked and (self._together is None or self._together.reached(self._checks)):
            raise Stopped(self._asked)


class Together:
    """Lets processes stop at the same check, though each hears of it at a time of its own.

    Each writes down, once, at which check it has heard; all stop at the check after the latest of
    these. Between two checks there is a collective that no process ends before all have begun it,
    so that none can be further by then; `settle` returns when what was issued to GPUs is done,
    because their collectives end later than their calls. Until all have heard they go on. Who sent
    the signal may have less patience: torchrun kills after 30 seconds, which is then the time for
    two steps and the writing.

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> a, b = (Together(store, rank, 2, lambda: None) for rank in (0, 1))
    >>> a.reached(4), b.reached(5), a.reached(5), b.reached(6), a.reached(6)
    (False, False, False, True, True)
    """

    def __init__(self, store: Any, rank: int, world: int, settle: Callable[[], None]) -> None:
        self._store, self._settle = store, settle
        self._keys = [f"pycollect.train/stop/{rank}" for rank in range(world)]
        self._own = self._keys[rank]
        self._said = False
        self._last = 0  # the check to stop at, once that is known

    def reached(self, check: int) -> bool:
        """Tell whether this check, counted from 1, is where all stop."""
        self._settle()
        if not self._said:
            self._store.set(self._own, str(check))
            self._said = True
        if not self._last and self._store.check(self._keys):
            self._last = 1 + max(int(self._store.get(key)) for key in self._keys)
        return 0 < self._last <= check
