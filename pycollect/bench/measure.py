"""How time is taken: contestants take turns, round by round, so that a disturbance hits them all.

A ratio is taken within a round and the median over the rounds is reported. Nothing here knows
what is measured.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# Calls a contestant's own clock: asked for n calls, returns their n times in seconds.
Sampler = Callable[[int], list[float]]

# An odd number: a median that was measured. Fewer rounds cannot outvote two disturbed ones.
ROUNDS = 7
# The slowest round over the fastest, above which something else was going on: a quiet machine stays
# under 1.2.
MOST_SPREAD = 1.5
# More samples than this of one contestant in one round add time, not certainty.
MOST_CALLS = 1_000


@dataclass(frozen=True)
class Effort:
    """How long to measure one case: `iterations` calls each, or about `seconds` for all."""

    seconds: float = 1.0
    iterations: int | None = None
    warmup: int = 3

    def calls(self, seconds_each: float, contestants: int) -> list[int]:
        """Return the number of calls of one contestant in each round.

        >>> Effort(iterations=10).calls(1e-3, 4)
        [2, 2, 2, 1, 1, 1, 1]
        """
        if self.iterations is not None:
            rounds = min(ROUNDS, self.iterations)
            return [len(range(i, self.iterations, rounds)) for i in range(rounds)]
        share = self.seconds / (ROUNDS * contestants)
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
        """How many calls were timed."""
        return sum(map(len, self.samples))

    @property
    def spread(self) -> float:
        """The slowest round over the fastest: 1 on a quiet machine."""
        return max(self.rounds) / min(self.rounds)

    @property
    def tail(self) -> float:
        """The 99th percentile over the median."""
        return self.percentile(99) / self.percentile(50)

    def percentile(self, percent: float) -> float:
        """Return the smallest time that `percent` % of all calls did not exceed."""
        ordered = sorted(t for r in self.samples for t in r)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """Return how many times as long `slow` takes, round by round.

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
    """Keep the collector of garbage out of the times."""
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
            # Everyone is first once, and follows everyone's wake.
            for name in names[i % len(names) :] + names[: i % len(names)]:
                samples[name].append(tuple(samplers[name](calls[name][i])))
    return {name: Timing(tuple(rounds)) for name, rounds in samples.items()}
