"""Clocks: the GPU's own, by events and in graphs, and those of ranks that measure together.

A call on a GPU is enqueued after a delay kernel, so that all of its work is issued before any of it
runs. The events around the call then measure GPU work alone. A graph of many calls is timed the
same way.

Ranks as processes rewrite their buffers and pass a barrier before every timed call or batch. A
batch runs on zeros, which no reduction changes. The caches then hold the result of the last call,
as if a producer had just written it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycollect._timing import Sampler, host_time, nothing
from pycollect.gpus import synchronizer

# Number of calls in one graph, over which the cost of a replay is spread.
GRAPH_CALLS = 100
# Above any GPU's clock rate, so that a delay is never shorter than requested.
_CYCLES_PER_SECOND = 2.5e9
# The delay is _MARGIN times the measured issue time of a call, plus the least delay in seconds.
_MARGIN, _LEAST_DELAY = 2.0, 50e-6
_cuda: Any = torch.cuda  # torch has no type annotations for its events


def _recorded(device: torch.device) -> Any:
    """Return an event that is recorded on the GPU's current stream."""
    event = _cuda.Event(enable_timing=True)
    event.record(_cuda.current_stream(device))
    return event


def gpu_time(
    run: Callable[[], object],
    rewrite: Callable[[], object],
    devices: Sequence[torch.device],
    calls_in_run: int = 1,
    *,
    barrier: Callable[[], object] = nothing,
    delayed: bool = True,
) -> Sampler:
    """Time `run` by events, after an untimed `rewrite`; a time is seconds per call in `run`.

    With several devices it is the time of the slowest; without a GPU it is the host's time. The
    first sample determines the delay. Calls that wait for other processes cannot be issued before
    they run: with `delayed=False` there is no delay, and time in which the stream waits for the
    host is included. For `barrier` see `host_time`.
    """
    synchronize = synchronizer(devices)
    if synchronize is nothing:
        return host_time(run, rewrite, barrier=barrier, calls_in_run=calls_in_run)
    distinct, cycles = sorted(set(devices), key=str), list[int]()

    def once() -> float:
        rewrite()
        synchronize()
        barrier()
        if delayed:
            for device in distinct:
                with torch.cuda.device(device):
                    _cuda._sleep(cycles[0])
        starts = list(map(_recorded, distinct))
        run()
        ends = list(map(_recorded, distinct))
        synchronize()
        spans = zip(starts, ends, strict=True)
        return max(float(start.elapsed_time(end)) for start, end in spans) / 1e3

    def sample(calls: int) -> list[float]:
        if delayed and not cycles:
            issue = max(host_time(run, synchronize)(3))  # until `run` returns; it must be warm
            cycles.append(int((_LEAST_DELAY + _MARGIN * issue) * _CYCLES_PER_SECOND))
        return [once() / calls_in_run for _ in range(calls)]

    return sample


def graph_of(run: Callable[[], object], calls: int) -> Callable[[], None]:
    """Capture `calls` calls of `run`, which must be warm, and return the graph's replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may call
        for _ in range(calls):
            run()
    return graph.replay


# Least number of calls in a batch on a device, over which the gap before the first call is spread.
# It is small because a call of gloo may take a second.
LEAST_ON_DEVICE = 2
# Least seconds of a batch, the same with more ranks than cores, and the least and largest number of
# calls in a batch. They hide the skew of the ranks at its beginning: some microseconds, and a time
# slice of another rank for each rank in excess of the cores; it cost 8 ranks on 2 cores 100 us.
_BATCH_SECONDS, _CROWDED_BATCH_SECONDS, _LEAST_BATCH, _MOST_BATCH = 500e-6, 5e-3, 8, 1_000


def batch_seconds(world: int) -> float:
    """Return the least seconds of a batch of calls between CPUs."""
    crowded = world > len(os.sched_getaffinity(0))
    return _CROWDED_BATCH_SECONDS if crowded else _BATCH_SECONDS


def sized(
    make: Callable[[int], Sampler],
    slowest: Callable[[float], float] = float,
    wanted: float = _BATCH_SECONDS,
    least: int = _LEAST_BATCH,
    most: int = _MOST_BATCH,
) -> Sampler:
    """Return a sampler of batches of `make(calls)` that take about `wanted` seconds.

    The warm-up determines the number of calls in a batch, and counts calls instead of batches.
    Ranks that measure together pass `slowest`, which returns the same number on all ranks.
    """
    found: list[Sampler] = []

    def sample(calls: int) -> list[float]:
        batch, begun = least, 0
        while not found:
            sampler = make(batch)
            took = slowest(batch * sampler(1)[0])
            begun += batch
            if begun >= calls and (took >= wanted or batch == most):
                found.append(sampler)
                return []
            batch = min(most, max(batch, math.ceil(1.1 * batch * wanted / max(took, 1e-9))))
        return found[0](calls)

    return sample
