"""What the device of a rank's tensors can do: host memory, emulated devices, or a GPU.

sites.py names them. On emulated devices, CPU tensors stand for CUDA tensors. A job's tensors are
created on its site's device unless it names another device. `thread_devices.py` has the emulated
devices of ranks that are threads.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from reference import viewed_as, whole_memory
from sites import GPU, is_real
from torch import Tensor

LARGE = 300_000  # elements; more than one piece through the group's memory
_CYCLES = 10_000_000  # GPU cycles, about 5 ms


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Poll until the condition is true or the time is over; return its last value."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.001)
    return found


def cpu_by_default(job: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a job that names the device of each tensor: the default device is the CPU."""

    @functools.wraps(job)
    def run(*args: Any) -> Any:
        with torch.device("cpu"):
            return job(*args)

    return run


class Site:
    """Host memory as a site, and the interface of all sites."""

    device = "cpu"  # device of tensors
    real = False
    options: Any = None  # pg_options of groups on the site
    fake: Any = None

    def as_default_device(self) -> Any:
        return contextlib.nullcontext()

    def begin_rank(self) -> None:
        """Prepare a rank that is a thread, before its job and its groups."""

    def fill_later(self, x: Tensor, value: float) -> None:
        """Enqueue the fill on the current stream, behind all earlier work (on a GPU, delayed)."""
        x.fill_(value)

    def put(self, x: Tensor) -> Tensor:
        """The tensor's whole memory and the same view of it, on the device."""
        return x

    def empty(self, count: int) -> Tensor:
        """A tensor from a stream-ordered cache: once freed, its memory is reused on its stream."""
        return torch.empty(count)

    def host(self, x: Tensor) -> Tensor:
        """The tensor in host memory; on emulated devices, marked as an ordinary CPU tensor."""
        return x.cpu()

    def synchronize(self) -> None:
        """Wait until the caller's streams have finished all their work."""

    def stall(self, seconds: float = 0.2) -> None:
        """Block the caller's stream for this time (GPU) or until `resume` (emulated)."""

    def resume(self) -> None:
        """End `stall` and `run_ahead`."""

    def run_ahead(self, pace: float | None = None) -> None:
        """Let waits return without draining streams; `pace`: seconds per piece of stream work."""

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        self.stall()
        try:
            yield
        finally:
            self.resume()

    def second_stream(self) -> Any:
        return contextlib.nullcontext()

    def calls(self) -> list[str]:
        return []

    def pinned(self) -> int:
        """Number of pinned allocations, on emulated devices."""
        return 0

    def violations(self) -> list[str]:
        return []

    def unreleased(self) -> dict[str, int]:
        """Counts of resources that have not been released."""
        return {}


class Emulated(Site):
    def __init__(self, name: str, own_thread: bool = False) -> None:
        """`own_thread`: a thread runs the streams' work, as a GPU does."""
        import pycollect as pc  # imported late: only in the rank's process
        from pycollect import _testing

        self.options = pc.distributed.options()
        self.fake = _testing.emulate(self.options, name == "eager", own_thread)
        self.stream = self.fake.current()
        self.calls = self.fake.cuda.calls

    def fill_later(self, x: Tensor, value: float) -> None:
        self.fake.write(x, torch.full(x.shape, value, dtype=x.dtype))

    def empty(self, count: int) -> Tensor:
        return self.fake.empty([count])

    def synchronize(self) -> None:
        self.fake.cuda.finish(self.stream)

    def host(self, x: Tensor) -> Tensor:
        self.fake.put_on_host(x)
        return x

    def stall(self, seconds: float = 0.2) -> None:
        self.fake.cuda.drain_waits(False)
        self.fake.stall(self.stream)
        self.fill_later(torch.zeros(1), 0.0)  # keeps the stream busy until `resume`

    def run_ahead(self, pace: float | None = None) -> None:
        self.fake.cuda.drain_waits(False)
        if pace is not None:
            self.fake.cuda.set_pause(pace)

    def resume(self) -> None:
        self.fake.resume()
        self.fake.cuda.drain_waits(True)
        self.fake.cuda.set_pause(0.0001)

    @contextlib.contextmanager
    def second_stream(self) -> Iterator[None]:
        self.fake.use(self.fake.cuda.stream(0))
        yield
        self.fake.use(self.stream)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self.fake.begin_capture(self.stream)
        yield
        self.fake.end_capture(self.stream)

    def pinned(self) -> int:
        return self.fake.cuda.counters().get("empty_pinned", 0)

    def violations(self) -> list[str]:
        return self.fake.cuda.violations()

    def alive(self) -> dict[str, int]:
        kept = ("events",)
        return {name: n for name, n in self.fake.cuda.counters().items() if name in kept and n != 0}

    def unreleased(self) -> dict[str, int]:
        """Counts of live resources, after up to 2 s for the streams to release finished work."""
        until(lambda: not self.alive(), 2.0)
        return self.alive()


class Gpu(Site):
    device, real = GPU, is_real(GPU)

    def as_default_device(self) -> Any:
        return torch.device(self.device) if self.real else super().as_default_device()

    def put(self, x: Tensor) -> Tensor:
        return viewed_as(whole_memory(x).to(self.device), x)

    def fill_later(self, x: Tensor, value: float) -> None:
        if self.real:
            torch.cuda._sleep(_CYCLES)
        x.fill_(value)

    def synchronize(self) -> None:
        if self.real:
            torch.cuda.synchronize()

    def stall(self, seconds: float = 0.2) -> None:
        for _ in range(int(20 * seconds)):  # few: about 1,000 pending launches block the host
            torch.cuda._sleep(10 * _CYCLES)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        self.synchronize()
        self.stall(0.5)
        yield
        assert not torch.cuda.current_stream().query(), "the stream was idle: nothing was tested"

    @contextlib.contextmanager
    def second_stream(self) -> Iterator[None]:
        with torch.cuda.stream(torch.cuda.Stream()) if self.real else super().second_stream():
            yield

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture a graph around the body; then replay it, to check that the capture is intact."""
        graph, x = torch.cuda.CUDAGraph(), torch.ones(3)
        self.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            yield
            y = x + 1
            graph.capture_end()
        graph.replay()
        self.synchronize()
        assert y.tolist() == [2.0] * 3


HOST = Site()


def of(name: str) -> Any:
    if not name:
        return HOST
    return Gpu() if is_real(name) else Emulated(name)
