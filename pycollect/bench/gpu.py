"""Time on the GPU itself, where a call's cost to Python does not show.

A call is queued behind a delay, so that all of it has been issued before the first of it runs; the
events around it then see the GPU's work alone. A graph of many calls is timed the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .measure import Sampler

# So many calls are captured into one graph; the cost of a replay is spread over them.
GRAPH_CALLS = 100
# Beyond any GPU's clock, so that a delay is never shorter than it was asked to be.
_CYCLES_PER_SECOND = 2.5e9
# What issuing may vary by: twice the usual time, and a little more.
_MARGIN, _LEAST_DELAY = 2.0, 50e-6
_cuda: Any = torch.cuda  # whose events have no types in torch


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _issue_seconds(run: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """The time in which `run` returns, once it has run before."""
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
    """Time calls of `run` by events, each after an untimed `rewrite`; seconds per call in it.

    With several devices it is the slowest one's time. The first sample finds out how long the
    delay must be.
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
    """Capture so many calls of `run`, which has run before, and return the replay of all."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay
