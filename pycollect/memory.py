"""Ordinary tensors that live in the memory that the processes of a group share.

A collective whose tensors all lie there copies nothing: ranks read and write each other's memory
where it is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import _C


class Usage(NamedTuple):
    """Of one rank, in bytes."""

    used: int  # in tensors that are alive
    kept: int  # free, with memory that will be used again
    reserved: int  # of address space: what tensors may take at the most


class Allocator:
    """Makes tensors in the shared memory of a group, the default group unless another is given.

    Its tensors are ordinary ones, on the CPU; they may stay when the group has gone.

    >>> import pycollect as pc, torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("pycollect", store=store, rank=0, world_size=1)
    >>> x = pc.Allocator().empty(2, 3).zero_()
    >>> dist.all_reduce(x); x.shape
    torch.Size([2, 3])
    >>> dist.destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Use the shared memory of `group`."""
        if not dist.is_initialized():
            raise ValueError(
                "there is no group whose memory a tensor could lie in; call "
                "torch.distributed.init_process_group('pycollect') first"
            )
        cpu = torch.device("cpu")
        chosen = dist.group.WORLD if group is None else group
        self._backend: Any = chosen._get_backend(cpu)  # type: ignore[union-attr]
        if self._backend.name() != "pycollect" or not self._backend.supports_tensor_alloc(cpu):
            raise ValueError(
                f"the group's backend for CPU tensors, {self._backend.name()!r}, has no memory "
                "that its ranks share; make the group with 'pycollect'"
            )

    def empty(self, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized tensor of this shape; `size` is as torch.empty has it."""
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        if any(n < 0 for n in shape):
            raise ValueError(f"size is {tuple(shape)}; no dimension may be negative")
        chosen = torch.get_default_dtype() if dtype is None else dtype
        made: torch.Tensor = self._backend.allocate_tensor(
            math.prod(shape), dtype=chosen, device=torch.device("cpu")
        )
        return made.view(shape)

    def usage(self) -> Usage:
        """Return how much of this rank's part of the shared memory is in use."""
        found = _C.arena_use(self._backend)
        if found is None:
            raise ValueError("the group's backend is wrapped (TORCH_DISTRIBUTED_DEBUG=DETAIL)")
        return Usage(*found)


def empty(
    *size: Any, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return an uninitialized CPU tensor in the shared memory of a group; see `Allocator`.

    >>> import pycollect as pc, torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("pycollect", store=store, rank=0, world_size=1)
    >>> pc.empty(2, 3, dtype=torch.float16).shape
    torch.Size([2, 3])
    >>> dist.destroy_process_group()
    """
    return Allocator(group).empty(*size, dtype=dtype)
