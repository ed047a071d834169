"""Ways to time a candidate on one rank: call by call or in batches, by host or device clock.

Before every timed call or batch all ranks rewrite their buffers and pass a barrier. A batch runs on
zeros, which no reduction changes. The caches then hold the result of the last call, as if a
producer had just written it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial

import torch

from pycollect._timing import Sampler, batched, estimate, host_time

from ..cases import Call
from ..comparison import GPU, clocked
from ..gpu import gpu_time, synchronizer
from .candidate import Candidate
from .spin_barrier import SpinBarrier

# Largest size in bytes at which calls between CPUs are timed in batches, because they are short.
LARGEST_IN_BATCHES = 16 << 10
# Least seconds of a batch, the same with more ranks than cores, and the least and largest number of
# calls in a batch. They hide the skew of the ranks at its beginning: some microseconds, and a time
# slice of another rank for each rank in excess of the cores; it cost 8 ranks on 2 cores 100 us.
_BATCH_SECONDS, _CROWDED_BATCH_SECONDS, _LEAST_BATCH, _MOST_BATCH = 500e-6, 5e-3, 8, 1_000
# Least number of calls in a batch on a device, over which the gap before the first call is spread.
# It is small because a call of gloo may take a second.
_LEAST_ON_DEVICE = 2


class Clocks:
    """Makes the samplers of one rank. All ranks make the same, and run them at the same time.

    With `both_clocks`, `returned[name]` has the seconds until each call returned, warm-up included.
    """

    def __init__(self, spin_barrier: SpinBarrier, device: torch.device, both_clocks: bool) -> None:
        self._barrier, self._device, self._both_clocks = spin_barrier, device, both_clocks
        self.returned: dict[str, list[float]] = {}

    def slowest(self, seconds: float) -> float:
        """Return the seconds of the slowest rank; collective."""
        return max(self._barrier.gather(seconds))

    def samplers(self, candidate: Candidate, nbytes: int) -> dict[str, Sampler]:
        """Return the candidate's samplers by row name: one, or one each for host and device."""
        name, call, barrier = candidate.name, candidate.call, self._barrier.barrier
        zeros, ones = (partial(candidate.rewrite, value) for value in (0, 1))
        synchronize = synchronizer([self._device])
        if self._both_clocks:
            once = recorded(call, self.returned.setdefault(name, []))
            on_device = partial(
                gpu_time, rewrite=zeros, devices=[self._device], barrier=barrier, delayed=False
            )
            return {
                name: host_time(once, ones, synchronize, barrier=barrier),
                clocked(name, GPU): self._batched(
                    partial(batched, call, timer=on_device), _BATCH_SECONDS, _LEAST_ON_DEVICE
                ),
            }
        if nbytes > LARGEST_IN_BATCHES or candidate.always_rewritten:
            return {name: host_time(call, ones, synchronize, barrier=barrier)}
        on_host = partial(host_time, rewrite=zeros, barrier=barrier)
        crowded = self._barrier.world > len(os.sched_getaffinity(0))
        wanted = _CROWDED_BATCH_SECONDS if crowded else _BATCH_SECONDS
        return {name: self._batched(partial(batched, call, timer=on_host), wanted, _LEAST_BATCH)}

    def _batched(self, make: Callable[[int], Sampler], wanted: float, least: int) -> Sampler:
        """Return a sampler of batches that take about `wanted` seconds, equal on all ranks.

        The warm-up determines the number of calls in a batch, and counts calls instead of batches.
        """
        sized: list[Sampler] = []

        def sample(calls: int) -> list[float]:
            batch, begun = least, 0
            while not sized:
                took = self.slowest(estimate(sampler := make(batch)))
                begun += batch
                if begun >= calls and (took >= wanted or batch == _MOST_BATCH):
                    sized.append(sampler)
                    return []
                batch = min(_MOST_BATCH, max(batch, math.ceil(1.1 * batch * wanted / took)))
            return sized[0](calls)

        return sample


def recorded(call: Call, seconds: list[float]) -> Call:
    """Return a function that calls `call` and appends the seconds until it returns.

    >>> seconds = []
    >>> recorded(lambda: None, seconds)()
    >>> 0 <= seconds[0] < 1
    True
    """

    def run() -> None:
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)

    return run
