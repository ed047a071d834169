"""Times by the GPU's own clock, without a call's cost in Python.

A call is queued behind a delay kernel, so that all of its work is issued before any of it runs; the
events around it then measure GPU work alone. A graph of many calls is timed the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycollect._timing import Sampler

# Number of calls captured into one graph, over which the cost of a replay is spread.
GRAPH_CALLS = 100
# Above any GPU's clock rate, so that a delay is never shorter than requested.
_CYCLES_PER_SECOND = 2.5e9
# Delay for a call: this many times its measured issue time, plus the least delay in seconds.
_MARGIN, _LEAST_DELAY = 2.0, 50e-6
_cuda: Any = torch.cuda  # torch has no type annotations for its events


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _issue_seconds(run: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """Return the slowest of three host times until `run` returns; `run` must be warm."""
    slowest = 0.0
    for _ in range(3):
        _synchronize(devices)
        begin = time.perf_counter()
        run()
        slowest = max(slowest, time.perf_counter() - begin)
    _synchronize(devices)
    return slowest


def gpu_time(
    run: Callable[[], object],
    rewrite: Callable[[], object],
    devices: Sequence[torch.device],
    calls_in_run: int = 1,
) -> Sampler:
    """Time `run` by events, each after an untimed `rewrite`; seconds per call in `run`.

    With several devices the time is the slowest one's. The first sample determines the delay.
    """
    distinct = sorted(set(devices), key=str)
    cycles: list[int] = []

    def sample(calls: int) -> list[float]:
        if not cycles:
            delay = _LEAST_DELAY + _MARGIN * _issue_seconds(run, distinct)
            cycles.append(int(delay * _CYCLES_PER_SECOND))
        return [once() / calls_in_run for _ in range(calls)]

    def once() -> float:
        rewrite()
        _synchronize(distinct)
        events = [(_event(), _event(), torch.cuda.current_stream(d)) for d in distinct]
        for device, (start, _, stream) in zip(distinct, events, strict=True):
            with torch.cuda.device(device):
                _cuda._sleep(cycles[0])
            start.record(stream)
        run()
        for _, end, stream in events:
            end.record(stream)
        _synchronize(distinct)
        return max(float(start.elapsed_time(end)) for start, end, _ in events) / 1e3

    return sample


def _event() -> Any:
    return _cuda.Event(enable_timing=True)


def graph_of(run: Callable[[], object], calls: int) -> Callable[[], None]:
    """Capture `calls` calls of `run`, which must be warm, and return the replay of all."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay
