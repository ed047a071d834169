"""Emulated GPUs for calls on lists: collectives on their tensors, callers' work, checks of it all.

The calls run with the same code as on CUDA, from Python's arguments to single operations on
streams, and their work runs late: `Gpus.check` looks for accesses that nothing orders, then runs
what is left in a random order that streams and events allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pycollect import _testing

Stream = _testing.Stream
# Arguments that pycollect.collectives passes by position, with their defaults.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "sum", "algorithm": None, "order": "rank"},
    "all_reduce_coalesced": {"op": "sum", "algorithm": None, "order": "rank"},
    "reduce": {"dst": 0, "op": "sum", "algorithm": None, "order": "rank"},
    "broadcast": {"src": 0, "algorithm": None},
    "broadcast_coalesced": {"src": 0},
    "all_gather": {"dim": 0, "algorithm": None, "out": None},
    "reduce_scatter": {"op": "sum", "dim": 0, "algorithm": None, "order": "rank", "out": None},
    "tree_sum": {"dtype": None},
    "all_to_all": {"dim": 0, "split_sizes": None, "out": None},
    "copy_": {"src": None},
}
LAST: dict[str, Any] = {"async_op": False, "streams": None, "peer_access": True}


class Gpus:
    """Some emulated GPUs, and the tensors whose final values a test expects."""

    def __init__(self, devices: int) -> None:
        self.torch = _testing.EmulatedTorch(devices)
        self.cuda = self.torch.cuda
        self._expected: list[tuple[Tensor, Tensor]] = []

    def close(self) -> None:
        self.torch.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a collective: `gpus.all_reduce(tensors, "max", streams=...)`."""
        return partial(self._call, name)

    def _call(self, name: str, tensors: object, *args: object, **more: object) -> Any:
        call = getattr(_testing.collectives, name)
        settings = ARGUMENTS[name] | LAST
        settings |= dict(zip(settings, args, strict=False)) | more
        assert list(settings) == list(ARGUMENTS[name] | LAST), settings
        return call(tensors, *settings.values())

    # --- the caller's work ------------------------------------------------------------------------

    def stream(self, device: int = 0) -> Stream:
        return self.cuda.stream(device)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make the stream the current one of its device."""
        before = self.torch.current(stream.device)
        self.torch.use(stream)
        yield
        self.torch.use(before)

    def empty(self, *sizes: int, device: int = 0) -> Tensor:
        return self.torch.empty(list(sizes), device)

    def tensor(self, values: Tensor, device: int = 0, stream: Stream | None = None) -> Tensor:
        """Return a tensor that is allocated and written on a stream."""
        with self.on(stream or self.torch.current(device)):
            made = self.empty(*values.shape, device=device)
            self.torch.write(made, values)
        return made

    def expect(self, tensor: Tensor, values: Tensor, stream: Stream | None = None) -> None:
        """Read the tensor on a stream; `check` compares what was read."""
        if tensor.device.type == "cpu":
            self._expected.append((tensor, values))
            return
        with self.on(stream or self.torch.current(tensor.device.index)):
            self._expected.append((self.torch.read(tensor), values))

    def fork(self, earlier: Stream, later: Stream) -> None:
        """Make a stream wait for another one, which also makes it join that stream's capture."""
        self.cuda.set_device(earlier.device)
        event = self.cuda.event(earlier.device)
        self.cuda.record(event, earlier)
        self.cuda.set_device(later.device)
        self.cuda.wait(later, event)
        self.cuda.destroy(event)
        self.cuda.set_device(0)

    # --- checks -----------------------------------------------------------------------------------

    def check(self, seed: int = 0) -> None:
        """Fail if an access is not ordered, or a value is wrong in a random order."""
        assert self.cuda.race is None, self.cuda.race
        self.torch.run(seed)
        for found, values in self._expected:
            assert torch.equal(found, values), (found, values)
        self._expected.clear()

    def count(self, act: Callable[[], object]) -> Counter[str]:
        """Return the number of CUDA calls by name while `act` runs."""
        before = Counter(self.cuda.counters())
        act()
        counted = Counter(self.cuda.counters())
        counted.subtract(before)
        return Counter({name: n for name, n in counted.items() if n and name != "tasks"})

    @contextmanager
    def capture(self, stream: Stream, by_torch: bool = True) -> Iterator[list[int]]:
        """Capture the work of a stream; the yielded list gets the capture's number."""
        number: list[int] = []
        self.torch.begin_capture(stream, by_torch)
        with self.on(stream):
            yield number
        number.append(self.torch.end_capture(stream))


class Array:
    """An array of a library that uses its memory on a stream of its own, as CuPy does."""

    def __init__(self, gpus: Gpus, of: Tensor, stream: Stream, tells: bool = True) -> None:
        self.memory = gpus.tensor(of, stream=stream)
        self.stream = stream
        self.tells = tells  # whether its interface names the stream

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"version": 3} | ({"stream": self.stream.stream_id} if self.tells else {})

    def __dlpack_device__(self) -> tuple[int, int]:
        return (12, 0)  # DLPack's kDLExtDev is torch's PrivateUse1

    def __dlpack__(self, **_: object) -> object:
        return torch.utils.dlpack.to_dlpack(self.memory)


def values(world: int, *sizes: int, seed: int = 0) -> list[Tensor]:
    """Return each rank's values: small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    shape = sizes or (8,)
    return [torch.randint(-99, 99, shape, generator=generator).float() for _ in range(world)]


def total(of: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(of)).sum(0)


def on_ranks(gpus: Gpus, of: Sequence[Tensor], devices: int = 1) -> list[Tensor]:
    """Return each rank's tensor; the ranks take turns on the devices."""
    return [gpus.tensor(v, device=r % devices) for r, v in enumerate(of)]
