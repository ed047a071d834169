"""Timing of a candidate's turn on one rank: call by call or in batches, by host or device clock.

Before every single timed call each rank rewrites its buffer, and all ranks pass a barrier. A batch
runs on zeros, which no reduction changes. Its caches then hold the last call's own result, as if
a producer had just written it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Protocol

from ..comparison import GPU, RETURN, WALL
from .candidate import Candidate
from .rank_device import RankDevice
from .spin_barrier import SpinBarrier

# Largest size in bytes at which calls between CPUs are timed in batches, because they are short.
LARGEST_IN_BATCHES = 16 << 10
# Least seconds of a batch (also with more ranks than cores), and its least and largest number of
# calls. They hide the skew of the ranks at its beginning: some microseconds, plus a time slice of
# another rank for each rank more than cores; 8 ranks on 2 cores lost 100 us to it.
_BATCH_SECONDS, _CROWDED_BATCH_SECONDS, _LEAST_BATCH, _MOST_BATCH = 500e-6, 5e-3, 8, 1_000
# Least number of calls in a batch on a device, over which the gap before the first call is spread;
# it is small because a call of gloo may take a second.
_LEAST_ON_DEVICE = 2

Seconds = dict[str, list[float]]  # by clock


class Stopwatch(Protocol):
    """A way of timing candidates on one rank; all ranks call it at the same time."""

    def warm(self, candidate: Candidate, calls: int) -> float:
        """Run at least `calls` untimed calls; return the approximate seconds of one sample."""

    def sample(self, candidate: Candidate, n: int) -> Seconds:
        """Take `n` samples; return their seconds per call, by clock."""


def _slowest(spin_barrier: SpinBarrier, run: Callable[[], object]) -> float:
    """Return the seconds that `run` takes on the slowest rank; collective."""
    spin_barrier.barrier()
    begin = time.perf_counter()
    run()
    return max(spin_barrier.gather(time.perf_counter() - begin))


class CallByCall:
    """Times single calls until they return and until the device is done; equal on a CPU."""

    def __init__(self, spin_barrier: SpinBarrier, rank_device: RankDevice, apart: bool) -> None:
        self._meeting, self._place, self._apart = spin_barrier, rank_device, apart

    def warm(self, candidate: Candidate, calls: int) -> float:
        """See Watch."""
        _slowest(self._meeting, lambda: self.sample(candidate, max(1, calls)))
        return _slowest(self._meeting, lambda: self.sample(candidate, 1))

    def sample(self, candidate: Candidate, n: int) -> Seconds:
        """See Watch."""
        call, synchronize = candidate.call, self._place.synchronize
        returned, done = [], []
        for _ in range(n):
            candidate.rewrite(1)
            synchronize()
            self._meeting.barrier()
            begin = time.perf_counter()
            call()
            returned.append(time.perf_counter() - begin)
            synchronize()
            done.append(time.perf_counter() - begin)
        return {WALL: done, RETURN: returned} if self._apart else {WALL: returned}


class InBatches:
    """Times batches of calls by the process's clock."""

    def __init__(self, spin_barrier: SpinBarrier) -> None:
        self._meeting, self._batch = spin_barrier, _LEAST_BATCH

    def warm(self, candidate: Candidate, calls: int) -> float:
        """See Watch; also sets the batch size such that the ranks' initial skew is negligible."""
        crowded = self._meeting.world > len(os.sched_getaffinity(0))
        wanted = _CROWDED_BATCH_SECONDS if crowded else _BATCH_SECONDS
        self._batch = max(_LEAST_BATCH, calls)
        while True:
            took = _slowest(self._meeting, lambda: self.sample(candidate, 1))
            if took >= wanted or self._batch == _MOST_BATCH:
                return took
            self._batch = min(_MOST_BATCH, math.ceil(1.1 * self._batch * wanted / took))

    def sample(self, candidate: Candidate, n: int) -> Seconds:
        """See Watch."""
        call, turns, seconds = candidate.call, range(self._batch), []
        candidate.rewrite(0)
        for _ in range(n):
            self._meeting.barrier()
            begin = time.perf_counter()
            for _ in turns:
                call()
            seconds.append((time.perf_counter() - begin) / self._batch)
        return {WALL: seconds}


class OnDevice:
    """Times batches of calls by the device's clock, with events on the current stream.

    Time in which the stream waits for the host between two calls counts.
    """

    def __init__(self, spin_barrier: SpinBarrier, rank_device: RankDevice) -> None:
        self._meeting, self._place, self._batch = spin_barrier, rank_device, _LEAST_ON_DEVICE

    def warm(self, candidate: Candidate, calls: int) -> float:
        """See Watch; also sets the number of calls in a batch."""
        each = _slowest(self._meeting, lambda: self.sample(candidate, 1)) / self._batch
        wanted = math.ceil(_BATCH_SECONDS / each)
        self._batch = min(_MOST_BATCH, max(_LEAST_ON_DEVICE, wanted))
        return each * self._batch

    def sample(self, candidate: Candidate, n: int) -> Seconds:
        """See Watch."""
        call, turns, seconds = candidate.call, range(self._batch), []
        candidate.rewrite(0)
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
