"""Timing in rounds: candidates take turns in every round, so that a disturbance affects all.

A ratio is taken within a round, and the median over the rounds is reported. This module is
independent of the measured calls.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# A candidate's timed loop: for n calls it returns their n times in seconds.
Sampler = Callable[[int], list[float]]

# Odd, so that the median is a measured value. Fewer rounds cannot outvote two disturbed ones.
ROUNDS = 7
# Ratio of the slowest to the fastest round above which a run counts as disturbed; a quiet machine
# stays under 1.2.
MOST_SPREAD = 1.5
# Largest number of samples of one candidate in one round; more add time, not certainty.
MOST_CALLS = 1_000


@dataclass(frozen=True)
class Effort:
    """Measurement effort for a case: `iterations` calls per candidate, or `seconds` for all."""

    seconds: float = 1.0
    iterations: int | None = None
    warmup: int = 3

    def calls(self, seconds_each: float, candidates: int) -> list[int]:
        """Return the number of calls of one candidate in each round.

        >>> Effort(iterations=10).calls(1e-3, 4)
        [2, 2, 2, 1, 1, 1, 1]
        """
        if self.iterations is not None:
            rounds = min(ROUNDS, self.iterations)
            return [len(range(i, self.iterations, rounds)) for i in range(rounds)]
        share = self.seconds / (ROUNDS * candidates)
        return [min(MOST_CALLS, max(1, int(share / seconds_each)))] * ROUNDS


@dataclass(frozen=True)
class Timing:
    """Seconds per call, by round.

    >>> Timing(((1.0, 2.0, 3.0), (4.0, 4.0))).rounds
    [2.0, 4.0]
    """

    samples: tuple[tuple[float, ...], ...]

    @property
    def rounds(self) -> list[float]:
        """The median of each round."""
        return [statistics.median(r) for r in self.samples]

    @property
    def count(self) -> int:
        """The number of timed calls."""
        return sum(map(len, self.samples))

    @property
    def spread(self) -> float:
        """The ratio of the slowest to the fastest round: about 1 on a quiet machine."""
        return max(self.rounds) / min(self.rounds)

    @property
    def tail(self) -> float:
        """The ratio of the 99th percentile to the median."""
        return self.percentile(99) / self.percentile(50)

    def percentile(self, percent: float) -> float:
        """Return the smallest time that `percent` % of all calls did not exceed."""
        ordered = sorted(t for r in self.samples for t in r)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """Return the time of `slow` divided by that of `fast`, round by round.

    >>> ratios([4.0, 9.0], [2.0, 3.0])
    [2.0, 3.0]
    """
    return [s / f for s, f in zip(slow, fast, strict=True)]


def after_rewrite(
    run: Callable[[], object],
    rewrite: Callable[[], object],
    synchronize: Callable[[], object],
) -> Sampler:
    """Time single calls of `run`, each after an untimed `rewrite` of the buffers."""

    def sample(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            rewrite()
            synchronize()
            begin = time.perf_counter()
            run()
            synchronize()
            seconds.append(time.perf_counter() - begin)
        return seconds

    return sample


def batched(run: Callable[[], object], batch: int) -> Sampler:
    """Time `batch` calls of `run` in one go, as timeit does; a sample is the time of one call."""
    turns = range(batch)

    def sample(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            begin = time.perf_counter()
            for _ in turns:
                run()
            seconds.append((time.perf_counter() - begin) / batch)
        return seconds

    return sample


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector in this context, to keep it out of the times."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def interleave(samplers: Mapping[str, Sampler], effort: Effort) -> dict[str, Timing]:
    """Measure all samplers in turns and return their timings under the same names.

    >>> sorted(interleave({"a": lambda n: [1.0] * n}, Effort(iterations=2))["a"].rounds)
    [1.0, 1.0]
    """
    names = list(samplers)
    samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    with no_garbage_collection():
        calls = {}
        for name, sampler in samplers.items():
            sampler(max(1, effort.warmup))
            begin = time.perf_counter()
            sampler(1)
            calls[name] = effort.calls(time.perf_counter() - begin, len(names))
        for i in range(len(calls[names[0]])):
            # Rotate the order: over the rounds every candidate runs in every position.
            for name in names[i % len(names) :] + names[: i % len(names)]:
                samples[name].append(tuple(samplers[name](calls[name][i])))
    return {name: Timing(tuple(rounds)) for name, rounds in samples.items()}
