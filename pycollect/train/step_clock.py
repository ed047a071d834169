"""What the parts of a training step take, and what each rank's shard takes on its device."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepSeconds:
    """The host's seconds for the parts of a step.

    Work on GPUs is still under way when its calls return, unless exact seconds were asked for.

    >>> StepSeconds(split=1.0, compute=2.0).total
    3.0
    """

    split: float = 0.0
    compute: float = 0.0  # forward and backward, and what is reduced meanwhile
    reduction: float = 0.0  # what the step waits for
    update: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return self.split + self.compute + self.reduction + self.update


class StepClock:
    """Takes the time of one part of a step after the other, and of the ranks within.

    An exact one first waits until the devices are idle. That costs a GPU its head start on the CPU,
    so only a comparison is exact at every step.

    Ranks on GPUs are timed by events on their streams, so that nobody waits for them before
    `rank_seconds` asks.
    """

    def __init__(self, devices: Sequence[torch.device], exact: bool) -> None:
        self._devices, self._exact = list(devices), exact
        self.begin()

    def begin(self) -> None:
        """Forget the last step and start the next."""
        self._parts: dict[str, float] = {}
        self._host = [0.0] * len(self._devices)
        self._events: list[list[tuple[Any, Any]]] = [[] for _ in self._devices]
        self._last = self._now()

    def end_of(self, part: str) -> None:
        """Note that all since the end of the last part was this part."""
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
        """Take the time of what these ranks do together."""
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
        """Give what every rank has taken for its shard, waiting for the GPUs that still work."""
        return [
            host + sum(seconds_between(*pair) for pair in events)
            for host, events in zip(self._host, self._events, strict=True)
        ]


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until everything issued to the devices so far is done."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def is_captured(device: torch.device) -> bool:
    """Tell whether what is asked of the device now goes into a CUDA graph.

    >>> is_captured(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def mark(device: torch.device) -> Any:
    """Give the host's time, or an event on the current stream of a GPU.

    >>> seconds_between(mark(torch.device("cpu")), mark(torch.device("cpu"))) >= 0
    True
    """
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Give the seconds between two marks of one device; waits for a GPU that has still to come.

    >>> seconds_between(1.5, 2.0)
    0.5
    """
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
