"""Emulated devices of ranks that are threads: one runtime for all ranks, one stream for each.

"late" runs no work before something waits for it; "eager" runs it at once, on a thread. Both are
sites of `devices.py`, without host staging, which threads do not need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from devices import HOST, Emulated, Gpu
from sites import is_real
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only


class DeviceMemory(TorchFunctionMode):
    """Lets torch's functions take their results' memory from the emulated device's cache.

    As on a GPU, a freed tensor's memory is the next tensor's, although other streams may still use
    it. A function runs on the host, after all work of the rank's stream.
    """

    def __init__(self, fake: Any) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (getattr(function, "__module__", None) or "").startswith("torch.distributed"):
            return function(*args, **kwargs)
        given = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if given:
            self._fake.finish()
        found = function(*args, **kwargs)
        if not isinstance(found, (Tensor, list, tuple)):
            return found
        return tree_map_only(Tensor, lambda t: t if _memory(t) in given else self.moved(t), found)

    def moved(self, made: Tensor) -> Tensor:
        """The same values, and the same strides, in the device's memory."""
        count = made.untyped_storage().nbytes() // made.itemsize
        memory = self._fake.empty([-(-count * made.itemsize // 4)]).view(torch.uint8)
        memory = memory[: count * made.itemsize].view(made.dtype)
        self._fake.finish()  # the last work on this memory
        memory.copy_(made.as_strided((count,), (1,), 0))
        return memory.as_strided(made.shape, made.stride(), made.storage_offset())


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FirstRank(Emulated):
    """Site of rank 0, on the stream that tests can stall and capture."""

    def __init__(self, name: str) -> None:
        super().__init__(name, own_thread=name == "eager")
        self.calls = list  # none, because those of the runtime are of all ranks

    def as_default_device(self) -> Any:
        return DeviceMemory(self.fake)

    def put(self, x: Tensor) -> Tensor:
        return DeviceMemory(self.fake).moved(x)


class LaterRank(FirstRank):
    """Site of another rank, on a stream of its own, which is never stalled."""

    def __init__(self, first: FirstRank) -> None:
        self.__dict__.update(vars(first))  # the same devices

    def begin_rank(self) -> None:
        self.fake.use_own_stream()

    def synchronize(self) -> None:
        self.fake.finish()

    def stall(self, seconds: float = 0.2) -> None: ...

    def resume(self) -> None: ...

    @contextlib.contextmanager
    def second_stream(self) -> Iterator[None]:
        """Another stream for the body. The rank's first stream, which is idle, is replaced too."""
        self.synchronize()
        self.fake.use_own_stream()
        yield
        self.fake.use_own_stream()


def of_ranks(name: str, world: int) -> list[Any]:
    """The site of each rank of a launch."""
    if not name:
        return [HOST] * world
    if is_real(name):
        return [Gpu() for _ in range(world)]
    first = FirstRank(name)
    return [first, *(LaterRank(first) for _ in range(1, world))]
