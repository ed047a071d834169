"""Ctrl-C and SIGTERM as requests to stop: the current step finishes, then the run can be resumed.

Schedulers and torchrun send SIGTERM.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from .._command import Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Context that records the first Ctrl-C or SIGTERM; a second one takes effect at once.

    Signal handlers stay unchanged if `enabled` is false, and outside of the main thread, the only
    one that handles signals. `consensus` decides for processes that must stop at the same check.
    Checks of a rank's thread look at the signals of `source`, a context of the main thread.

    >>> with Interrupt(enabled=True) as interrupt:
    ...     interrupt.check()
    """

    def __init__(
        self,
        enabled: bool,
        consensus: "StopConsensus | None" = None,
        source: "Interrupt | None" = None,
    ) -> None:
        self._source = self if source is None else source
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._consensus = consensus
        self._received, self._checks = 0, 0  # number of the received signal, 0 for none
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if self._enabled:
            self._before = {number: signal.signal(number, self._record) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not installed from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def check(self) -> None:
        """Raise Stopped if a signal was received, and all processes stop at this check."""
        self._checks += 1
        number = self._source._received
        if number and (self._consensus is None or self._consensus.reached(self._checks)):
            raise Stopped(number)


class StopConsensus:
    """Stop consensus: all processes stop at the same check, whenever each receives the signal.

    Each process publishes once, in the store, the check at which it has the signal. All stop at the
    check after the latest of these, and continue until every process has published. Between two
    checks there is a collective that ends only after all processes have begun it, so no process is
    further by then. `synchronize` waits for all work issued to GPUs, because GPU collectives end
    later than their calls. torchrun sends SIGKILL 30 seconds after its signal; two steps and the
    checkpoint must finish before it.

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> a, b = (StopConsensus(store, rank, 2, lambda: None) for rank in (0, 1))
    >>> a.reached(4), b.reached(5), a.reached(5), b.reached(6), a.reached(6)
    (False, False, False, True, True)
    """

    def __init__(self, store: Any, rank: int, world: int, synchronize: Callable[[], None]) -> None:
        self._store, self._synchronize = store, synchronize
        self._keys = [f"pycollect.train/stop/{rank}" for rank in range(world)]
        self._own = self._keys[rank]
        self._published = False
        self._last = 0  # the check to stop at, 0 while unknown

    def reached(self, check: int) -> bool:
        """Return whether all processes stop at this check, counted from 1."""
        self._synchronize()
        if not self._published:
            self._store.set(self._own, str(check))
            self._published = True
        if not self._last and self._store.check(self._keys):
            self._last = 1 + max(int(self._store.get(key)) for key in self._keys)
        return 0 < self._last <= check
