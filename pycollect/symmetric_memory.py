"""Symmetric memory: tensors in host memory that all ranks of a group reach.

A collective whose tensors are all in symmetric memory is zero-copy: ranks read and write them in
place, without staging.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import _C
from .errors import shown


class Usage(NamedTuple):
    """Symmetric memory of one rank, in bytes.

    used: bytes of live tensors. cached: free bytes that are kept for later tensors, until the group
    ends. reserved: the address space, which limits all tensors together.
    """

    used: int
    cached: int
    reserved: int


class SymmetricAllocator:
    """Allocate tensors in the symmetric memory of a group (default: the default group).

    Tensors are ordinary CPU tensors of torch, and may outlive the group.

    Allocation concerns one rank alone: it is not collective, the ranks' sizes and order may differ,
    and no rendezvous call follows.

    After a call has failed (`PeerLost`, or `Timeout` at the group's timeout), a slow rank may still
    write to the call's tensors. Their memory is then not reused, and the group allocates no more.

    Raises ValueError without a process group, for a `device` other than "cpu" or None, and for a
    group whose backend for CPU tensors has no symmetric memory; TypeError for a group that is not a
    ProcessGroup.

    >>> import pycollect as pc, torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("pycollect", store=store, rank=0, world_size=1)
    >>> x = pc.SymmetricAllocator().empty(2, 3).zero_()
    >>> dist.all_reduce(x); x.shape
    torch.Size([2, 3])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        """Use the symmetric memory of `group`. `device`: "cpu", or None, which means the same."""
        if not dist.is_initialized():
            raise ValueError(
                "symmetric memory needs a process group; call "
                "torch.distributed.init_process_group('pycollect') first"
            )
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"group is a {type(group).__name__}; pass a ProcessGroup, or None")
        try:
            where = torch.device("cpu" if device is None else device)
        except RuntimeError as error:
            raise ValueError(
                f"device is {shown(device)}; torch has no such device: {error}"
            ) from None
        if where.type != "cpu":
            raise ValueError(
                f"device is '{where}'; symmetric memory is host memory, so pass device='cpu'. On "
                "GPUs, lists and ranks that are threads use ordinary tensors in place, and a "
                "process per GPU has NCCL ('cpu:pycollect,cuda:nccl') and torch's symmetric memory"
            )
        self._backend = _backend_of(dist.group.WORLD if group is None else group)

    def empty(self, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized tensor of shape `size`, as torch.empty does.

        `size` is given as several ints or as one iterable of ints; `dtype` defaults to torch's
        default dtype. The tensor is contiguous. The call is not collective: other ranks may
        allocate other sizes, in another order, or nothing.

        Raises ValueError for a negative size and for a tensor of 2**63 bytes or more; TypeError for
        another type of `size` or `dtype`; RuntimeError if the symmetric heap
        (`symmetric_heap_bytes`) has no room; CollectiveError after the group has been destroyed;
        and the group's PeerLost or Timeout after a call has failed with it.
        """
        given = size[0] if len(size) == 1 and isinstance(size[0], Iterable) else size
        shape = torch.Size(_C.int_from(n, "empty", "size") for n in given)
        if any(n < 0 for n in shape):
            raise ValueError(f"size is {tuple(shape)}; no dimension may be negative")
        chosen = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(chosen, torch.dtype):
            raise TypeError(f"dtype is a {type(dtype).__name__}; pass a torch.dtype, or None")
        if math.prod(shape) * chosen.itemsize >= 1 << 63:
            raise ValueError(f"size is {tuple(shape)}; a tensor has at most 2**63 - 1 bytes")
        made: torch.Tensor = self._backend.allocate_tensor(
            math.prod(shape), dtype=chosen, device=torch.device("cpu")
        )
        return made.view(shape)

    def usage(self) -> Usage:
        """Return this rank's usage of the group's symmetric memory, in bytes.

        The result is a pycollect.symmetric_memory.Usage with the fields used, cached and reserved.
        Raises ValueError if TORCH_DISTRIBUTED_DEBUG=DETAIL has wrapped the group's backend.
        """
        found = _C.symmetric_heap_usage(self._backend)
        if found is None:
            raise ValueError(
                "the group's backend is wrapped, which hides its usage; unset "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL"
            )
        return Usage(*found)


def _backend_of(group: Any) -> Any:
    """Return the group's backend for CPU tensors; raise ValueError without symmetric memory."""
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        raise ValueError(
            "the group has no backend for CPU tensors; make it with 'pycollect'"
        ) from error
    if backend.name() != "pycollect" or not backend.supports_tensor_alloc(torch.device("cpu")):
        raise ValueError(
            f"the group's backend for CPU tensors, {backend.name()!r}, has no memory that its "
            "ranks share; make the group with 'pycollect'"
        )
    return backend


def symmetric_empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return an uninitialized CPU tensor in the symmetric memory of a group.

    `size` and `dtype` are those of torch.empty, `device` may be "cpu" or None, which means the
    same, and `group` defaults to the default group. The call is not collective: other ranks may
    allocate other sizes, in another order, or nothing, and no rendezvous call follows. Raises the
    errors of `SymmetricAllocator` and `SymmetricAllocator.empty`; among them are the group's
    PeerLost or Timeout after a call has failed with it, and CollectiveError after the group has
    been destroyed.

    >>> import pycollect as pc, torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("pycollect", store=store, rank=0, world_size=1)
    >>> pc.symmetric_empty(2, 3, dtype=torch.float16).shape
    torch.Size([2, 3])
    >>> dist.destroy_process_group()
    """
    return SymmetricAllocator(group, device).empty(*size, dtype=dtype)
