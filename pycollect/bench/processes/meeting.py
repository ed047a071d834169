"""Where the ranks of a measurement meet, apart from everything that is measured.

A counter and a number of each rank in a page that all have mapped: a barrier that takes a
microsecond and lets all go at once, whatever library is timed after it.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

# Counter and number of a rank lie 64 bytes apart, those of two ranks 128: nobody's writing slows
# another's reading.
_LINE, _NUMBER = 16, 8
# Looks before the core is offered to others, where every rank has one: about 0.2 ms.
_PATIENCE = 2_000
# Between two looks at the clock.
_YIELDS = 1 << 12


def page_bytes(world: int) -> int:
    """Return how long the file must be that the ranks map."""
    return world * _LINE * 8


class Meeting:
    """One rank's end of it.

    Raises:
        TimeoutError: from `barrier` and `gather`, naming who is missing.
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
            Path(path).unlink()  # all have it: nothing is left behind, however this ends

    def barrier(self) -> None:
        """Return when all ranks have come, on all ranks at nearly the same time."""
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
                raise TimeoutError(f"ranks {missing} did not come within {self._timeout:g} s")

    def post(self, number: float) -> None:
        """Let the others read this number."""
        self._numbers[self.rank * _LINE + _NUMBER] = number

    def posted(self) -> list[float]:
        """Return what all ranks have posted so far, in their order."""
        return [self._numbers[r * _LINE + _NUMBER] for r in range(self.world)]

    def gather(self, number: float) -> list[float]:
        """Return the numbers of all ranks, in their order."""
        self.post(number)
        self.barrier()
        numbers = self.posted()
        self.barrier()  # before anybody posts the next one
        return numbers
