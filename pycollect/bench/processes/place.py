"""Where a rank's tensors are: how to wait for that device, and how it tells the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class _HostEvent:
    """An event where there is no device: the time at which it is recorded."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: _HostEvent) -> float:
        """Milliseconds, as CUDA's events have it."""
        return (end._at - self._at) * 1e3


class Place:
    """A device; `event()` makes one that can be recorded on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.event: Callable[[], Any] = _HostEvent
        self.synchronize: Callable[[], object] = _nothing
        if device.type == "cuda":
            cuda: Any = torch.cuda  # whose events have no types in torch
            self.event = lambda: cuda.Event(enable_timing=True)
            self.synchronize = lambda: cuda.synchronize(device)


def _nothing() -> None:
    """The CPU is done when a call returns."""
