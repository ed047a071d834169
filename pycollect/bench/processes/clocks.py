"""How a contestant's turn is timed on one rank: call by call, or in batches, by either clock.

Before every timed call each rank writes its buffer again and all ranks meet. A batch runs on zeros,
which no reduction changes, and on what the last call left in the caches: its own result, like a
producer's.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Protocol

from ..contest import GPU, RETURN, WALL
from .contestant import Contestant
from .meeting import Meeting
from .place import Place

# Up to here a call between CPUs costs so little that it is timed in batches.
LARGEST_IN_BATCHES = 16 << 10
# A batch takes so long at least, and so many calls: the skew of the ranks at its beginning must not
# count. It is some microseconds, and for each rank more than there are cores a turn of another:
# 8 ranks on 2 cores lost 100 us to it.
_BATCH_SECONDS, _CROWDED_BATCH_SECONDS, _LEAST_BATCH, _MOST_BATCH = 500e-6, 5e-3, 8, 1_000
# On a device the gap before the first call is spread over this many at least; a call of gloo may
# take a second.
_LEAST_ON_DEVICE = 2

Seconds = dict[str, list[float]]  # by clock


class Watch(Protocol):
    """One way of timing. `warm` returns about what one of the `n` of a sample takes."""

    def warm(self, contestant: Contestant, calls: int) -> float:
        """Run untimed calls; the same number on every rank."""

    def sample(self, contestant: Contestant, n: int) -> Seconds:
        """Time so many of them."""


def _slowest(meeting: Meeting, run: Callable[[], object]) -> float:
    """The seconds that it takes on the slowest rank."""
    meeting.barrier()
    begin = time.perf_counter()
    run()
    return max(meeting.gather(time.perf_counter() - begin))


class CallByCall:
    """Until the call returns, and until the device is done; on a CPU that is the same."""

    def __init__(self, meeting: Meeting, place: Place, apart: bool) -> None:
        self._meeting, self._place, self._apart = meeting, place, apart

    def warm(self, contestant: Contestant, calls: int) -> float:
        """See Watch."""
        _slowest(self._meeting, lambda: self.sample(contestant, max(1, calls)))
        return _slowest(self._meeting, lambda: self.sample(contestant, 1))

    def sample(self, contestant: Contestant, n: int) -> Seconds:
        """See Watch."""
        call, synchronize = contestant.call, self._place.synchronize
        returned, done = [], []
        for _ in range(n):
            contestant.rewrite(1)
            synchronize()
            self._meeting.barrier()
            begin = time.perf_counter()
            call()
            returned.append(time.perf_counter() - begin)
            synchronize()
            done.append(time.perf_counter() - begin)
        return {WALL: done, RETURN: returned} if self._apart else {WALL: returned}


class InBatches:
    """The process's clock around a batch of calls."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._batch = meeting, _LEAST_BATCH

    def warm(self, contestant: Contestant, calls: int) -> float:
        """See Watch; finds out how many calls take so long that their beginning does not count."""
        crowded = self._meeting.world > len(os.sched_getaffinity(0))
        wanted = _CROWDED_BATCH_SECONDS if crowded else _BATCH_SECONDS
        self._batch = max(_LEAST_BATCH, calls)
        while True:
            took = _slowest(self._meeting, lambda: self.sample(contestant, 1))
            if took >= wanted or self._batch == _MOST_BATCH:
                return took
            self._batch = min(_MOST_BATCH, math.ceil(1.1 * self._batch * wanted / took))

    def sample(self, contestant: Contestant, n: int) -> Seconds:
        """See Watch."""
        call, turns, seconds = contestant.call, range(self._batch), []
        contestant.rewrite(0)
        for _ in range(n):
            self._meeting.barrier()
            begin = time.perf_counter()
            for _ in turns:
                call()
            seconds.append((time.perf_counter() - begin) / self._batch)
        return {WALL: seconds}


class OnDevice:
    """The device's clock, by events around a batch of calls on the current stream.

    What the stream waits for the host between two calls counts: it cannot work on meanwhile.
    """

    def __init__(self, meeting: Meeting, place: Place) -> None:
        self._meeting, self._place, self._batch = meeting, place, _LEAST_ON_DEVICE

    def warm(self, contestant: Contestant, calls: int) -> float:
        """See Watch; finds out how many calls a batch has."""
        each = _slowest(self._meeting, lambda: self.sample(contestant, 1)) / self._batch
        wanted = math.ceil(_BATCH_SECONDS / each)
        self._batch = min(_MOST_BATCH, max(_LEAST_ON_DEVICE, wanted))
        return each * self._batch

    def sample(self, contestant: Contestant, n: int) -> Seconds:
        """See Watch."""
        call, turns, seconds = contestant.call, range(self._batch), []
        contestant.rewrite(0)
        for _ in range(n):
            self._place.synchronize()
            self._meeting.barrier()
            start, end = self._place.event(), self._place.event()
            start.record()
            for _ in turns:
                call()
            end.record()
            self._place.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3 / self._batch)
        return {GPU: seconds}
