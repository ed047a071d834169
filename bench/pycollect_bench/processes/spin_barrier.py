"""Barrier and all-gather of the measured ranks, independent of every measured library.

A page that all ranks map has a counter and a number for each rank. The barrier takes a microsecond
and releases all ranks at nearly the same time.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

# Offsets in 8-byte words. The counter and the number of a rank are 64 bytes apart, two ranks 128
# bytes, so that the writes of one rank do not slow the reads of another.
_LINE, _NUMBER = 16, 8
# Number of polls before the core is yielded, if every rank has its own core: about 0.2 ms.
_POLLS = 2_000
# Number of yields between two reads of the clock.
_YIELDS = 1 << 12


def page_bytes(world: int) -> int:
    """Return the size in bytes of the file that the ranks map."""
    return world * _LINE * 8


class SpinBarrier:
    """The barrier of one rank: the mapped page, and the rank's state.

    Raises:
        TimeoutError: names the missing ranks; also raised by `barrier` and `gather`.
    """

    def __init__(self, path: str, rank: int, world: int, timeout: float = 300.0) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), page_bytes(world))
        self._counters = memoryview(self._memory).cast("q")
        self._numbers = memoryview(self._memory).cast("d")
        self.rank, self.world, self._timeout = rank, world, timeout
        self._barriers = 0
        self._polls = _POLLS if world <= len(os.sched_getaffinity(0)) else 0
        self.barrier()
        if rank == 0:
            Path(path).unlink()  # all ranks have mapped it; no file is left behind

    def barrier(self) -> None:
        """Return when all ranks have called it, on all ranks at nearly the same time."""
        self._barriers = barriers = self._barriers + 1
        counters = self._counters
        counters[self.rank * _LINE] = barriers
        for peer in range(self.world):
            at, polls = peer * _LINE, self._polls
            while counters[at] < barriers and polls:
                polls -= 1
            if counters[at] < barriers:
                self._wait(at, barriers)

    def _wait(self, at: int, barriers: int) -> None:
        begin = time.monotonic()
        while True:
            for _ in range(_YIELDS):
                if self._counters[at] >= barriers:
                    return
                os.sched_yield()
            if time.monotonic() - begin > self._timeout:
                missing = [r for r in range(self.world) if self._counters[r * _LINE] < barriers]
                raise TimeoutError(
                    f"ranks {missing} did not reach the barrier within {self._timeout:g} s"
                )

    def publish(self, number: float) -> None:
        """Publish this rank's number for the other ranks."""
        self._numbers[self.rank * _LINE + _NUMBER] = number

    def published(self) -> list[float]:
        """Return the number that each rank published last, in rank order."""
        return [self._numbers[r * _LINE + _NUMBER] for r in range(self.world)]

    def gather(self, number: float) -> list[float]:
        """Return the numbers of all ranks, in rank order; collective."""
        self.publish(number)
        self.barrier()
        numbers = self.published()
        self.barrier()  # before any rank publishes its next number
        return numbers
