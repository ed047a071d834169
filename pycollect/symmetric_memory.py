"""Symmetric memory: tensors in memory that all ranks of a group reach, on the CPU or on GPUs.

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

_NAMES = {"cpu": "CPU", "cuda": "CUDA"}


class Usage(NamedTuple):
    """Symmetric memory of one rank, in bytes.

    used: bytes of live tensors; on GPUs, of the blocks that torch's allocator divides among them.
    cached: free bytes that are kept for later tensors. reserved: on the CPU, the address space,
    which limits all tensors together; on GPUs, the sum of used and cached.
    """

    used: int
    cached: int
    reserved: int


class SymmetricAllocator:
    """Allocate tensors in the symmetric memory of a group (default: the default group).

    Tensors are ordinary torch tensors, on the CPU unless `device` is a GPU, and may outlive the
    group. GPU memory comes from torch's caching allocator, in a separate pool.

    Allocation concerns one rank alone: it is not collective, the ranks' sizes and order may differ,
    and no rendezvous call follows.

    After a call has failed (`PeerLost`, or `Timeout` at the group's timeout), a slow rank may still
    write to the call's tensors. Their memory is then not reused, and the group allocates no more
    CPU memory.

    Raises ValueError without a process group, for a device that is neither the CPU nor a GPU, and
    for a group whose backend for the device has no symmetric memory; TypeError for a group that is
    not a ProcessGroup.

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
        """Use the symmetric memory of `group` on `device`: "cpu", or a GPU such as "cuda:0"."""
        if not dist.is_initialized():
            raise ValueError(
                "symmetric memory needs a process group; call "
                "torch.distributed.init_process_group('pycollect') first"
            )
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"group is a {type(group).__name__}; pass a ProcessGroup, or None")
        try:
            self._device = torch.device("cpu" if device is None else device)
        except RuntimeError as error:
            raise ValueError(
                f"device is {shown(device)}; torch has no such device: {error}"
            ) from None
        if self._device.type not in _NAMES:
            raise ValueError(f"device is '{self._device}'; allowed are 'cpu' and GPUs ('cuda:0')")
        self._backend = _backend_of(dist.group.WORLD if group is None else group, self._device)

    def empty(self, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized tensor of shape `size`, as torch.empty does.

        `size` is given as several ints or as one iterable of ints; `dtype` defaults to torch's
        default dtype. The tensor is contiguous. The call is not collective: other ranks may
        allocate other sizes, in another order, or nothing.

        Raises ValueError for a negative size, for a tensor of 2**63 bytes or more, and during the
        capture of a CUDA graph on the device; TypeError for another type of `size` or `dtype`;
        RuntimeError if the symmetric heap (`symmetric_heap_bytes`) or the GPU has no room;
        CollectiveError after the group has been destroyed; and on the CPU, the group's PeerLost or
        Timeout after a call has failed with it.
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
            math.prod(shape), dtype=chosen, device=self._device
        )
        return made.view(shape)

    def usage(self) -> Usage:
        """Return this rank's usage in bytes: of the CPU's symmetric memory, or of all GPUs'.

        The result is a pycollect.symmetric_memory.Usage with the fields used, cached and reserved.
        Raises ValueError if TORCH_DISTRIBUTED_DEBUG=DETAIL has wrapped the group's backend.
        """
        if self._device.type == "cuda":
            on_gpus = _C.symmetric_memory_usage(self._backend)
            found = None if on_gpus is None else (*on_gpus, sum(on_gpus))
        else:
            found = _C.symmetric_heap_usage(self._backend)
        if found is None:
            raise ValueError(
                "the group's backend is wrapped, which hides its usage; unset "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL"
            )
        return Usage(*found)


def _backend_of(group: Any, device: torch.device) -> Any:
    """Return the group's backend for the device; raise ValueError without symmetric memory."""
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


def symmetric_empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return an uninitialized tensor in the symmetric memory of a group.

    `size` and `dtype` are those of torch.empty. The tensor is on the CPU unless `device` is a GPU,
    and `group` defaults to the default group. The call is not collective: other ranks may allocate
    other sizes, in another order, or nothing, and no rendezvous call follows. Raises the errors of
    `SymmetricAllocator` and `SymmetricAllocator.empty`; among them are the group's PeerLost or
    Timeout on the CPU after a call has failed with it, and CollectiveError after the group has been
    destroyed.

    >>> import pycollect as pc, torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("pycollect", store=store, rank=0, world_size=1)
    >>> pc.symmetric_empty(2, 3, dtype=torch.float16).shape
    torch.Size([2, 3])
    >>> dist.destroy_process_group()
    """
    return SymmetricAllocator(group, device).empty(*size, dtype=dtype)
