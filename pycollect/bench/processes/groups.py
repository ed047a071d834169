"""The ways in which ranks reach each other, one group of all ranks for each.

Those of a peer that may hang are made only in processes that measure it (isolated.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
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
# What a rung of CUDA's ladder is called, such as sync=host.
RUNG = "sync="
# Up to here one kernel that reads everything is faster than two that share the work; vLLM draws the
# line at as many bytes for eight ranks.
_ONE_SHOT = 256 << 10


def rungs() -> tuple[str, ...]:
    """Return the contestants that this build's rungs are, but for the choice among them."""
    return tuple(f"{RUNG}{rung}" for rung in _C.cuda_rungs()[1:])


def make_groups(backend: str, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the groups that these contestants need, and why one is missing.

    The default group is gloo's.
    """
    makers: dict[str, Callable[[], Any]] = {
        OURS: partial(_ours, backend),
        NCCL: _nccl,
        SYMM_MEM: _symm_mem,
        **{rung: partial(_of_rung, rung.removeprefix(RUNG)) for rung in rungs()},
    }
    groups: dict[str, Any] = {GLOO: dist.group.WORLD}
    refusals: dict[str, str] = {}
    for name in filter(makers.__contains__, names):
        try:
            groups[name] = makers[name]()
        except (NotImplementedError, ValueError) as error:
            refusals[name] = str(error)
    return groups, refusals


def _ours(backend: str) -> Any:
    if not dist.is_backend_available(backend):
        raise NotImplementedError(f"torch.distributed knows no backend {backend!r}")
    return dist.new_group(backend=backend)


def _of_rung(rung: str) -> Any:
    return dist.new_group(backend=OURS, pg_options=pycollect.distributed.options(cuda_sync=rung))


def _nccl() -> Any:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise NotImplementedError("needs a torch with NCCL, and GPUs")
    return dist.new_group(backend=NCCL)


def _symm_mem() -> Any:
    if not torch.cuda.is_available():
        raise NotImplementedError("needs GPUs")
    try:
        import_module("torch.distributed._symmetric_memory")
    except ImportError:
        raise NotImplementedError("this torch has no symmetric memory") from None
    return dist.group.WORLD


def symm_mem_call(case: ProcessCase, rank: int) -> tuple[Buffers, Call]:
    """Return torch's own all-reduce on its symmetric memory, which has its tensors.

    Raises:
        ValueError: for what it does not do.
        RuntimeError: where the devices cannot share memory.
    """
    if (case.collective, case.op) != ("all_reduce", "sum") or case.dtype.itemsize > 4:
        raise ValueError("is asked for sums of float32 and bfloat16 over all ranks only")
    symm: Any = import_module("torch.distributed._symmetric_memory")
    ops: Any = torch.ops.symm_mem
    device, world = case.devices[rank], dist.group.WORLD
    group = world.group_name  # type: ignore[union-attr]

    def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = symm.empty(count, dtype=dtype, device=device)
        with warnings.catch_warnings():  # needed by older torch, obsolete in newer
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
    """Return what allocates a tensor on the device in memory that the group's ranks reach.

    Raises:
        NotImplementedError: if they reach no such memory there.
    """
    if device.type != "cpu" and not group._get_backend(device).supports_tensor_alloc(device):
        raise NotImplementedError(f"the ranks reach no tensors of each other's on {device}")
    return lambda count, dtype: pycollect.empty(count, dtype=dtype, device=device, group=group)
