"""GPU time of calls, without their cost in Python.

A call is enqueued after a delay kernel, so that all of its work is issued before any of it runs.
The events around the call then measure GPU work alone. A graph of many calls is timed the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycollect._timing import Sampler, host_time, nothing

# Number of calls in one graph, over which the cost of a replay is spread.
GRAPH_CALLS = 100
# Above any GPU's clock rate, so that a delay is never shorter than requested.
_CYCLES_PER_SECOND = 2.5e9
# The delay is _MARGIN times the measured issue time of a call, plus the least delay in seconds.
_MARGIN, _LEAST_DELAY = 2.0, 50e-6
_cuda: Any = torch.cuda  # torch has no type annotations for its events


def synchronizer(devices: Sequence[torch.device]) -> Callable[[], None]:
    """Return a function that waits for the GPUs among the devices, each once."""
    gpus = sorted({d for d in devices if d.type == "cuda"}, key=str)
    if not gpus:
        return nothing

    def synchronize() -> None:
        for device in gpus:
            torch.cuda.synchronize(device)

    return synchronize


class _HostEvent:
    """An event on the CPU: the host's time at which it is recorded."""

    def record(self, stream: object) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: _HostEvent) -> float:
        """Return the milliseconds until `end`, like CUDA events."""
        return (end._at - self._at) * 1e3


def _recorded(device: torch.device) -> Any:
    """Return an event that is recorded on the device's current stream."""
    gpu = device.type == "cuda"
    event = _cuda.Event(enable_timing=True) if gpu else _HostEvent()
    event.record(torch.cuda.current_stream(device) if gpu else None)
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

    With several devices it is the time of the slowest. The first sample determines the delay. Calls
    that wait for other processes cannot be issued before they run: with `delayed=False` there is no
    delay, and time in which the stream waits for the host is included. For `barrier` see
    `host_time`.
    """
    distinct, synchronize = sorted(set(devices), key=str), synchronizer(devices)
    cycles: list[int] = []

    def sample(calls: int) -> list[float]:
        if delayed and not cycles:
            issue = max(host_time(run, synchronize)(3))  # until `run` returns; it must be warm
            cycles.append(int((_LEAST_DELAY + _MARGIN * issue) * _CYCLES_PER_SECOND))
        return [once() / calls_in_run for _ in range(calls)]

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

    return sample


def graph_of(run: Callable[[], object], calls: int) -> Callable[[], None]:
    """Capture `calls` calls of `run`, which must be warm, and return the graph's replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may call
        for _ in range(calls):
            run()
    return graph.replay
