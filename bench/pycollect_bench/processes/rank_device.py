"""The device of a rank's tensors: how to wait for it, and the events that time it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class _HostEvent:
    """An event on the CPU: the host's time at which it is recorded."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: _HostEvent) -> float:
        """Return the milliseconds until `end`, like CUDA events."""
        return (end._at - self._at) * 1e3


class RankDevice:
    """A device; `event()` makes an event, which `record()` puts on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.event: Callable[[], Any] = _HostEvent
        self.synchronize: Callable[[], object] = _nothing
        if device.type == "cuda":
            cuda: Any = torch.cuda  # torch has no type annotations for its events
            self.event = lambda: cuda.Event(enable_timing=True)
            self.synchronize = lambda: cuda.synchronize(device)


def _nothing() -> None:
    """Do nothing: on the CPU a call is done when it returns."""
