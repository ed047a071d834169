"""The process groups of the candidates, each over all ranks.

The group of a peer that may hang is made only in the processes that measure it (isolated.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import pycollect
from pycollect import _C

from ..cases import Call
from .cases import Buffers, ProcessCase

OURS, ZERO_COPY = "pycollect", "zero-copy"
GLOO, MPI, NCCL, SYMM_MEM = "gloo", "mpi", "nccl", "symm_mem"
# Prefix of the candidates that force a CUDA transport, for example transport=host_staging.
TRANSPORT = "transport="
# Largest size in bytes for torch's one-shot kernel, which is faster for small sizes than the
# two-shot kernel. vLLM uses the same limit for eight ranks.
_ONE_SHOT = 256 << 10


def transports() -> tuple[str, ...]:
    """Return a candidate name for each CUDA transport of this build, except automatic choice."""
    return tuple(f"{TRANSPORT}{transport}" for transport in _C.cuda_transports()[1:])


def make_groups(
    backend: str, names: tuple[str, ...], timeout: timedelta
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the groups of these candidates, and why other groups are missing.

    The default group belongs to gloo, and has its own timeout.
    """
    makers: dict[str, Callable[[], Any]] = {
        OURS: partial(_ours, backend, timeout),
        NCCL: partial(_nccl, timeout),
        SYMM_MEM: _symm_mem,
        **{
            transport: partial(_with_transport, transport.removeprefix(TRANSPORT), timeout)
            for transport in transports()
        },
    }
    groups: dict[str, Any] = {GLOO: dist.group.WORLD}
    refusals: dict[str, str] = {}
    for name in filter(makers.__contains__, names):
        try:
            groups[name] = makers[name]()
        except (NotImplementedError, ValueError) as error:
            refusals[name] = str(error)
    return groups, refusals


def _ours(backend: str, timeout: timedelta) -> Any:
    if not dist.is_backend_available(backend):
        raise NotImplementedError(f"torch.distributed has no backend {backend!r}")
    return dist.new_group(backend=backend, timeout=timeout)


def _with_transport(transport: str, timeout: timedelta) -> Any:
    options = pycollect.distributed.options(cuda_transport=transport)
    return dist.new_group(backend=OURS, timeout=timeout, pg_options=options)


def _nccl(timeout: timedelta) -> Any:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise NotImplementedError("needs GPUs and a torch with NCCL")
    return dist.new_group(backend=NCCL, timeout=timeout)


def _symm_mem() -> Any:
    if not torch.cuda.is_available():
        raise NotImplementedError("needs GPUs")
    try:
        import_module("torch.distributed._symmetric_memory")
    except ImportError:
        raise NotImplementedError("this torch has no symmetric memory") from None
    return dist.group.WORLD


def symm_mem_call(case: ProcessCase, rank: int) -> tuple[Buffers, Call]:
    """Return torch's own all-reduce on symmetric memory, with tensors allocated there.

    Raises:
        ValueError: for an unsupported collective, op or dtype.
        RuntimeError: if the devices cannot share memory.
    """
    if (case.collective, case.op) != ("all_reduce", "sum") or case.dtype.itemsize > 4:
        raise ValueError("is measured only for all_reduce sums of types up to 4 bytes")
    symm: Any = import_module("torch.distributed._symmetric_memory")
    ops: Any = torch.ops.symm_mem
    device, world = case.devices[rank], dist.group.WORLD
    group = world.group_name  # type: ignore[union-attr]

    def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = symm.empty(count, dtype=dtype, device=device)
        # Older versions of torch need this call, newer ones warn about it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            symm.enable_symm_mem_for_group(group)
        symm.rendezvous(tensor, group)
        return tensor

    buffers = Buffers(case, rank, empty)
    source = buffers.input
    if case.nbytes > _ONE_SHOT:
        return buffers, lambda: ops.two_shot_all_reduce_(source, "sum", group)
    output = buffers.output = torch.empty(case.count, dtype=case.dtype, device=device)
    return buffers, lambda: ops.one_shot_all_reduce_out(source, "sum", group, output)


def shared_empty(group: Any, device: torch.device) -> Callable[[int, torch.dtype], torch.Tensor]:
    """Return a function that allocates tensors on the device in memory shared by the group.

    Raises:
        NotImplementedError: if the group cannot share memory of the device.
    """
    if device.type != "cpu" and not group._get_backend(device).supports_tensor_alloc(device):
        raise NotImplementedError(f"the ranks cannot share tensors on {device}")
    return lambda count, dtype: pycollect.symmetric_empty(
        count, dtype=dtype, device=device, group=group
    )
