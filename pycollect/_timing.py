"""Timing in rounds: candidates take turns in every round, so that a disturbance affects all.

A ratio is taken within a round, and the median over the rounds is reported. This module is
independent of the measured calls.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# A candidate's timed loop: for n calls it returns their n times in seconds. Its first use warms up,
# and may determine the size of batches; the returned times are then ignored.
Sampler = Callable[[int], list[float]]
# Returns the names in the order of the round of this number.
Order = Callable[[Sequence[str], int], Sequence[str]]

# Odd, so that the median is a measured value. Fewer rounds cannot outvote two disturbed ones.
ROUNDS = 7
# Largest number of rounds of single calls; more would not make the result more certain.
MOST_ROUNDS = 301
# Ratio of the slowest to the fastest round above which a run counts as disturbed; a quiet machine
# stays under 1.2.
MOST_SPREAD = 1.5
# Largest number of samples of one candidate in one round; more add time, not certainty.
MOST_CALLS = 1_000


@dataclass(frozen=True)
class Effort:
    """Measurement effort for a case: `iterations` calls per candidate, or `seconds` for all.

    With `single_calls` a round has one call of each candidate. This is for long calls, few of which
    fit into `seconds`: a disturbance then affects all candidates.
    """

    seconds: float = 1.0
    iterations: int | None = None
    warmup: int = 3
    single_calls: bool = False

    def calls(self, seconds: Sequence[float]) -> list[list[int]]:
        """Return each candidate's number of calls by round; `seconds` are those of a call of each.

        >>> Effort(iterations=10).calls([1e-3])
        [[2, 2, 2, 1, 1, 1, 1]]
        >>> Effort(iterations=3, single_calls=True).calls([1e-3])
        [[1, 1, 1]]
        """
        if self.iterations is not None:
            rounds = self.iterations if self.single_calls else min(ROUNDS, self.iterations)
            return [[len(range(i, self.iterations, rounds)) for i in range(rounds)]] * len(seconds)
        if self.single_calls:
            fitting = int(self.seconds / sum(seconds)) | 1  # odd, like ROUNDS
            return [[1] * min(MOST_ROUNDS, max(ROUNDS, fitting))] * len(seconds)
        share = self.seconds / (ROUNDS * len(seconds))
        return [[min(MOST_CALLS, max(1, int(share / each)))] * ROUNDS for each in seconds]


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


def median_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the median over the rounds of the time of `slow` divided by that of `fast`.

    >>> median_ratio([4.0, 9.0], [2.0, 3.0])
    2.5
    """
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


def nothing() -> None:
    """Do nothing."""


def host_time(
    run: Callable[[], object],
    rewrite: Callable[[], object] = nothing,
    synchronize: Callable[[], object] = nothing,
    *,
    barrier: Callable[[], object] = nothing,
    calls_in_run: int = 1,
) -> Sampler:
    """Time `run` until the devices are done, after an untimed `rewrite` of the buffers.

    A time is seconds per call in `run`. Ranks that measure together pass a barrier, so that all
    begin at the same time.
    """

    def sample(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            rewrite()
            synchronize()
            barrier()
            begin = time.perf_counter()
            run()
            synchronize()
            seconds.append((time.perf_counter() - begin) / calls_in_run)
        return seconds

    return sample


def batched(
    run: Callable[[], object], batch: int, timer: Callable[..., Sampler] = host_time
) -> Sampler:
    """Time `batch` calls of `run` in one go; a sample is the time of one call."""
    calls = range(batch)

    def run_all() -> None:
        for _ in calls:
            run()

    return timer(run_all, calls_in_run=batch)


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


def rotated(names: Sequence[str], number: int) -> Sequence[str]:
    """Return the order in which, over the rounds, every candidate runs in every position."""
    return [*names[number % len(names) :], *names[: number % len(names)]]


def shuffled(seed: int) -> Order:
    """Return new orders, equal for equal seeds: no candidate always follows the same other one."""
    generator = random.Random(seed)
    return lambda names, number: generator.sample(names, len(names))


def turns(names: Sequence[str], rounds: int, order: Order = rotated) -> Iterator[tuple[int, str]]:
    """Yield the number of the round and the name of each turn; a round has a turn of every name.

    >>> [name for _, name in turns("ab", 2)]
    ['a', 'b', 'b', 'a']
    """
    for number in range(rounds):
        for name in order(names, number):
            yield number, name


def estimate(sampler: Sampler, calls: int = 1) -> float:
    """Return the seconds of this number of samples, with their untimed parts."""
    begin = time.perf_counter()
    sampler(calls)
    return time.perf_counter() - begin


def interleave(
    samplers: Mapping[str, Sampler],
    effort: Effort,
    order: Order = rotated,
    agreed: Callable[[float], float] = float,
) -> dict[str, Timing]:
    """Measure all samplers in turns and return their timings under the same names.

    Ranks that measure together pass the same `order`, and `agreed`, which returns the same number
    on all ranks: that of the slowest rank.

    >>> sorted(interleave({"a": lambda n: [1.0] * n}, Effort(iterations=2))["a"].rounds)
    [1.0, 1.0]
    """
    if not samplers:
        return {}
    seconds = []
    samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in samplers}
    with no_garbage_collection():
        for sampler in samplers.values():
            took = agreed(estimate(sampler, max(1, effort.warmup)))  # the ranks end it together
            seconds.append(took if effort.iterations else agreed(estimate(sampler)))
        calls = dict(zip(samplers, effort.calls(seconds), strict=True))
        rounds = len(next(iter(calls.values())))
        for number, name in turns(list(samplers), rounds, order):
            samples[name].append(tuple(samplers[name](calls[name][number])))
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}
