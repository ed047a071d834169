"""Where CUDA tensors between processes are tried: on devices that are not there, or on a GPU.

"late" devices do nothing before somebody waits for it, "eager" ones all that they may at once: CPU
tensors stand for CUDA tensors, staged through the host, or with "late:stream" and "eager:stream" in
memory that processes reach. "cuda:stream" and "cuda:host" are a GPU, for which the CPU may stand in
(homes.py). What a job makes lies there, unless it says another device.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

SLABS = ("late:stream", "eager:stream")
EMULATED, REAL = (*SLABS, "late", "eager"), ("cuda:stream", "cuda:host")
SLAB_BYTES = 1 << 16  # of an emulated rank: 300,000 elements are dozens of pieces
GPU = os.environ.get("PYCOLLECT_TEST_GPU", "cuda:0")
LARGE = 300_000  # elements: more than are copied to slots in any collective
_CYCLES = 10_000_000  # some 5 ms


def is_real(name: str) -> bool:
    return name.startswith("cuda")


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Waits for it, but not for ever."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.001)
    return found


def each(*names: str, stands_in: bool = True) -> list[Any]:
    """Parameters: these sites, and worlds of three ranks, on a GPU of two and four.

    Without `stands_in`, what is to run on a GPU runs on nothing else.
    """
    return [
        pytest.param(*site.values, world, marks=site.marks, id=f"{site.id}-{world}")
        for site in sites(*names, stands_in=stands_in)
        for world in ((2, 4) if is_real(site.id) else (3,))
    ]


def sites(*names: str, stands_in: bool = True) -> list[Any]:
    """Parameters: these sites."""
    marks = [] if stands_in and not is_real(GPU) else [pytest.mark.cuda]
    return [pytest.param(n, marks=marks if is_real(n) else [], id=n) for n in names]


def by_hand(job: Callable[..., Any]) -> Callable[..., Any]:
    """A job that says where each of its tensors is to lie."""

    @functools.wraps(job)
    def run(*args: Any) -> Any:
        with torch.device("cpu"):
            return job(*args)

    return run


class Site:
    """Host memory, and what jobs ask of any site."""

    device = "cpu"  # of tensors
    gpu = GPU  # by name, for memory that is shared
    real, streams = False, False
    options: Any = None  # of groups that are made there
    fake: Any = None

    def here(self) -> Any:
        return contextlib.nullcontext()

    def fill_later(self, x: Tensor, value: float) -> None:
        """The current stream does, behind all else that it has to do."""
        x.fill_(value)

    def empty(self, count: int) -> Tensor:
        """Memory that its stream gives to the next when it is gone."""
        return torch.empty(count)

    def make(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """In memory that the group's processes reach."""
        import pycollect

        return pycollect.empty(*size, dtype=dtype, device=self.gpu)

    def reaches(self, x: Tensor) -> bool:
        """Do the other processes of the default group reach it?"""
        import pycollect

        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        return pycollect._C.in_tract(backend, x)

    def usage(self) -> Any:
        import pycollect

        return pycollect.Allocator(device=self.gpu).usage()

    def host(self, x: Tensor) -> Tensor:
        """The same in host memory."""
        return x.cpu()

    def settle(self) -> None:
        """The caller's streams do all that they have."""

    def stall(self, seconds: float = 0.2) -> None:
        """The caller's stream comes to nothing more for so long, or until `go_on`."""

    def go_on(self) -> None:
        """Ends `stall` and `run_ahead`."""

    def run_ahead(self, pace: float | None = None) -> None:
        """Hosts look at no result, and streams take so many seconds for a piece of work."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.stall()
        yield
        self.go_on()

    def second_stream(self) -> Any:
        return contextlib.nullcontext()

    def calls(self) -> list[str]:
        return []

    def fouls(self) -> list[str]:
        return []

    def given_out(self) -> int:
        """How many allocations of slabs and tensors."""
        return 0

    def left(self) -> dict[str, int]:
        """What has been given out and is not back."""
        return {}


class Emulated(Site):
    gpu = "cuda:0"  # that is not there

    def __init__(self, name: str, **options: Any) -> None:
        import pycollect as pc  # not before the process is a rank
        from pycollect import _testing

        pace, rung = (*name.split(":"), "")[:2]
        self.streams = bool(rung)
        options = {"cuda_sync": rung or "best", "slab_bytes": SLAB_BYTES, **options}
        self.options = pc.distributed.options(**options)
        self.fake = _testing.emulate(self.options, pace == "eager", self.streams)
        self.fill_later, self.empty = self.fake.fill_later, self.fake.empty
        self.calls, self.settle = self.fake.calls, self.fake.finish_caller

    def host(self, x: Tensor) -> Tensor:
        self.fake.put_on_host(x)
        return x

    def stall(self, seconds: float = 0.2) -> None:
        self.fake.look(False)
        self.fake.stall(True)
        self.fill_later(torch.zeros(1), 0.0)  # which it does not come to

    def run_ahead(self, pace: float | None = None) -> None:
        self.fake.look(False)
        if pace is not None:
            self.fake.gpu.pace(pace)

    def go_on(self) -> None:
        self.fake.stall(False)
        self.fake.look(True)
        self.fake.gpu.pace(0.0001)

    @contextlib.contextmanager
    def second_stream(self) -> Iterator[None]:
        self.fake.use_second_stream(True)
        yield
        self.fake.use_second_stream(False)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self.fake.capture(True)
        yield
        self.fake.capture(False)

    def fouls(self) -> list[str]:
        return self.fake.gpu.fouls()

    def launched(self) -> int:
        """How often this rank has launched a kernel."""
        return self.fake.gpu.books().get("launch", 0)

    def launches(self, call: Callable[[], Any]) -> int:
        before = self.launched()
        call()
        return self.launched() - before

    def given_out(self) -> int:
        return self.alive().get("allocated", 0)

    def alive(self) -> dict[str, int]:
        kept = ("allocated", "freeing", "opened", "adopted", "streams", "events")
        return {name: n for name, n in self.fake.gpu.books().items() if name in kept and n != 0}

    def left(self) -> dict[str, int]:
        """When the streams have let go of what they have done."""
        until(lambda: not self.alive(), 2.0)
        return self.alive()


class Gpu(Site):
    def __init__(self, name: str) -> None:
        self.device, self.real = GPU, is_real(GPU)
        self.streams = name == "cuda:stream"
        if name in REAL:  # or the best rung that there is
            os.environ["PYCOLLECT_CUDA_SYNC"] = name.split(":")[1]

    def here(self) -> Any:
        return torch.device(self.device) if self.real else super().here()

    def fill_later(self, x: Tensor, value: float) -> None:
        if self.real:
            torch.cuda._sleep(_CYCLES)
        x.fill_(value)

    def settle(self) -> None:
        if self.real:
            torch.cuda.synchronize()

    def stall(self, seconds: float = 0.2) -> None:
        for _ in range(int(200 * seconds)):
            torch.cuda._sleep(_CYCLES)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.settle()
        self.stall(0.5)
        yield
        assert not torch.cuda.current_stream().query(), "it was done before: nothing was tested"

    @contextlib.contextmanager
    def second_stream(self) -> Iterator[None]:
        with torch.cuda.stream(torch.cuda.Stream()) if self.real else super().second_stream():
            yield

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """The capture is whole in the end."""
        graph, x = torch.cuda.CUDAGraph(), torch.ones(3)
        self.settle()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            yield
            y = x + 1
            graph.capture_end()
        graph.replay()
        self.settle()
        assert y.tolist() == [2.0] * 3


HOST = Site()


def of(name: str) -> Any:
    if not name:
        return HOST
    return Gpu(name) if is_real(name) else Emulated(name)
