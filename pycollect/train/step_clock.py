"""Times of the parts of a training step, and of each rank's shard on its device."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepSeconds:
    """The host's seconds for the parts of a step; all are 0 by default.

    `split` is the split of the batch. `compute` is forward and backward, with the overlapped part
    of the reduction. `reduction` is the time that the step waits for the reduction, and `update`
    that of the optimizers. GPU work may still be running when its calls return, unless the times
    are exact (`exact_times`).

    >>> StepSeconds(split=1.0, compute=2.0).total
    3.0
    """

    split: float = 0.0
    compute: float = 0.0
    reduction: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of the whole step."""
        return self.split + self.compute + self.reduction + self.update


class StepClock:
    """Measures the consecutive parts of a step, and the ranks' forward and backward passes.

    An exact clock waits until the devices are idle before it reads the time. The host can then no
    longer issue work ahead of a GPU, so only a comparison is exact at every step.

    Ranks on GPUs are timed by events on their streams; only `rank_seconds` waits for them.
    """

    def __init__(self, devices: Sequence[torch.device], exact: bool) -> None:
        self._devices, self._exact = list(devices), exact
        self.begin()

    def begin(self) -> None:
        """Discard the times of the last step and start the next."""
        self._parts: dict[str, float] = {}
        self._host = [0.0] * len(self._devices)
        self._events: list[list[tuple[Any, Any]]] = [[] for _ in self._devices]
        self._last = self._now()

    def end_of(self, part: str) -> None:
        """Add the time since the end of the last part to this part."""
        now = self._now()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def _now(self) -> float:
        if self._exact:
            wait_for(self._devices)
        return time.perf_counter()

    @property
    def seconds(self) -> StepSeconds:
        """The parts of the step so far."""
        return StepSeconds(**self._parts)

    @contextmanager
    def ranks(self, ranks: Sequence[int]) -> Iterator[None]:
        """Add the time of the context to each of these ranks, except in a graph capture."""
        timed = [rank for rank in ranks if not is_captured(self._devices[rank])]
        starts = [mark(self._devices[rank]) for rank in timed]
        yield
        for rank, start in zip(timed, starts, strict=True):
            end = mark(self._devices[rank])
            if isinstance(start, float):
                self._host[rank] += end - start
            else:
                self._events[rank].append((start, end))

    def rank_seconds(self) -> list[float]:
        """Return the seconds that every rank has taken for its shard; waits for busy GPUs."""
        return [
            host + sum(seconds_between(*pair) for pair in events)
            for host, events in zip(self._host, self._events, strict=True)
        ]


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until all work issued to the devices so far is done."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def is_captured(device: torch.device) -> bool:
    """Return whether the device's work is currently captured into a CUDA graph.

    >>> is_captured(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def mark(device: torch.device) -> Any:
    """Return a time stamp: the host's time, or for a GPU an event on its current stream.

    >>> seconds_between(mark(torch.device("cpu")), mark(torch.device("cpu"))) >= 0
    True
    """
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks of one device; waits until a GPU has reached `end`.

    >>> seconds_between(1.5, 2.0)
    0.5
    """
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
