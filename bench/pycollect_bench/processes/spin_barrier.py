"""Barrier and exchange of the measured ranks, independent of every measured library.

A page mapped by all ranks has a counter and a number of each rank. Its barrier takes a microsecond
and releases all ranks at once, whatever library is timed after it.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

# Offsets in 8-byte words: a rank's counter and number are 64 bytes apart, two ranks 128 bytes, so
# that no rank's writes slow another rank's reads.
_LINE, _NUMBER = 16, 8
# Polls before yielding the core, if every rank has its own core: about 0.2 ms.
_PATIENCE = 2_000
# Yields between two reads of the clock.
_YIELDS = 1 << 12


def page_bytes(world: int) -> int:
    """Return the size in bytes of the file that the ranks map."""
    return world * _LINE * 8


class SpinBarrier:
    """The mapped page and state of one rank.

    Raises:
        TimeoutError: from the constructor, `barrier` and `gather`, with the missing ranks.
    """

    def __init__(self, path: str, rank: int, world: int, timeout: float = 300.0) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), page_bytes(world))
        self._counters = memoryview(self._memory).cast("q")
        self._numbers = memoryview(self._memory).cast("d")
        self.rank, self.world, self._timeout = rank, world, timeout
        self._met = 0
        self._patience = _PATIENCE if world <= len(os.sched_getaffinity(0)) else 0
        self.barrier()
        if rank == 0:
            Path(path).unlink()  # all ranks have mapped it, so no file can be left behind

    def barrier(self) -> None:
        """Return when all ranks have called it, on all ranks at nearly the same time."""
        self._met = met = self._met + 1
        counters = self._counters
        counters[self.rank * _LINE] = met
        for peer in range(self.world):
            at, looks = peer * _LINE, self._patience
            while counters[at] < met and looks:
                looks -= 1
            if counters[at] < met:
                self._wait(at, met)

    def _wait(self, at: int, met: int) -> None:
        begin = time.monotonic()
        while True:
            for _ in range(_YIELDS):
                if self._counters[at] >= met:
                    return
                os.sched_yield()
            if time.monotonic() - begin > self._timeout:
                missing = [r for r in range(self.world) if self._counters[r * _LINE] < met]
                raise TimeoutError(
                    f"ranks {missing} did not reach the barrier within {self._timeout:g} s"
                )

    def post(self, number: float) -> None:
        """Publish this rank's number for the other ranks."""
        self._numbers[self.rank * _LINE + _NUMBER] = number

    def posted(self) -> list[float]:
        """Return the latest posted number of every rank, in rank order."""
        return [self._numbers[r * _LINE + _NUMBER] for r in range(self.world)]

    def gather(self, number: float) -> list[float]:
        """Return the numbers of all ranks, in rank order; collective."""
        self.post(number)
        self.barrier()
        numbers = self.posted()
        self.barrier()  # before any rank posts its next number
        return numbers
