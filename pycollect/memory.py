"""Ordinary tensors that live in memory that the processes of a group share, on the CPU or a GPU.

A collective whose tensors all lie there copies nothing: ranks read and write each other's memory
where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import _C

_NAMES = {"cpu": "CPU", "cuda": "CUDA"}


class Usage(NamedTuple):
    """Of one rank, in bytes."""

    used: int  # in tensors that are alive; on a GPU, in the blocks that torch divides among them
    cached: int  # free, with memory that will be used again
    reserved: int  # of address space: what tensors may take at the most; on a GPU, used and cached


class Allocator:
    """Makes tensors in memory that a group's ranks share; the default group's unless one is given.

    Its tensors are ordinary ones, on the CPU unless `device` is a GPU; they may stay when the group
    has gone. Memory of a GPU comes from torch's caching allocator, in a pool of its own.

    When a call has failed (`PeerLost`, `Timeout`) a slow rank may still be writing to its tensors:
    their memory is not used again, and no more of the CPU's is given out by this group.

    >>> import pycollect as pc, torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("pycollect", store=store, rank=0, world_size=1)
    >>> x = pc.Allocator().empty(2, 3).zero_()
    >>> dist.all_reduce(x); x.shape
    torch.Size([2, 3])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        """Use the memory that `group` shares on `device`: "cpu", or a GPU such as "cuda:0"."""
        if not dist.is_initialized():
            raise ValueError(
                "there is no group whose memory a tensor could lie in; call "
                "torch.distributed.init_process_group('pycollect') first"
            )
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"group is a {type(group).__name__}; pass a ProcessGroup, or None")
        try:
            self._device = torch.device("cpu" if device is None else device)
        except RuntimeError as error:
            raise ValueError(f"device is {device!r}, which torch does not know: {error}") from None
        if self._device.type not in _NAMES:
            raise ValueError(f"device is '{self._device}'; allowed are 'cpu' and GPUs ('cuda:0')")
        self._backend = _backend_of(dist.group.WORLD if group is None else group, self._device)

    def empty(self, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized tensor of this shape; `size` is as torch.empty has it."""
        given = size[0] if len(size) == 1 and isinstance(size[0], Iterable) else size
        shape = torch.Size(_C.int_from(n, "empty", "size") for n in given)
        if any(n < 0 for n in shape):
            raise ValueError(f"size is {tuple(shape)}; no dimension may be negative")
        chosen = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(chosen, torch.dtype):
            raise TypeError(f"dtype is a {type(dtype).__name__}; pass a torch.dtype, or None")
        if math.prod(shape) * chosen.itemsize >= 1 << 63:
            raise ValueError(f"size is {tuple(shape)}, which is more bytes than 64 bits count")
        made: torch.Tensor = self._backend.allocate_tensor(
            math.prod(shape), dtype=chosen, device=self._device
        )
        return made.view(shape)

    def usage(self) -> Usage:
        """Return how much of this rank's part of that memory is in use: the CPU's, or all GPUs'."""
        if self._device.type == "cuda":
            on_gpus = _C.symmetric_memory_usage(self._backend)
            found = None if on_gpus is None else (*on_gpus, sum(on_gpus))
        else:
            found = _C.symmetric_heap_usage(self._backend)
        if found is None:
            raise ValueError("the group's backend is wrapped (TORCH_DISTRIBUTED_DEBUG=DETAIL)")
        return Usage(*found)


def _backend_of(group: Any, device: torch.device) -> Any:
    """Return what serves tensors on the device, if it is ours."""
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError as error:
        raise ValueError(
            f"the group has no backend for {_NAMES[device.type]} tensors; make it with 'pycollect'"
        ) from error
    if device.type == "cuda":
        shares = _C.symmetric_memory_usage(backend) is not None
    else:
        shares = backend.name() == "pycollect" and backend.supports_tensor_alloc(device)
    if not shares:
        raise ValueError(
            f"the group's backend for {_NAMES[device.type]} tensors, {backend.name()!r}, has no "
            "memory that its ranks share; make the group with 'pycollect'"
            + (", in a build with CUDA" if device.type == "cuda" else "")
        )
    return backend


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return an uninitialized tensor in memory that a group's ranks share; see `Allocator`.

    It is on the CPU unless `device` is a GPU.

    >>> import pycollect as pc, torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("pycollect", store=store, rank=0, world_size=1)
    >>> pc.empty(2, 3, dtype=torch.float16).shape
    torch.Size([2, 3])
    >>> dist.destroy_process_group()
    """
    return Allocator(group, device).empty(*size, dtype=dtype)
