"""Baselines of the benchmark, its peers and limits: loops and library calls over the same buffers.

The peers are the choices of `--peers`. `naive` is Dive into Deep Learning's loop over the tensors;
`stack` uses torch's stack and sum; on GPUs `comm` is torch.cuda.comm, and `cupy` is CuPy on the
same memory. The limit is `memory`, which multiplies all buffers in place by a number; on a GPU it
is `memcpy`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .cases import Call, Case, Workspace

Peer = Callable[[Workspace], Call]
comm: Any = import_module("torch.cuda.comm")  # a module without type annotations


def naive_all_reduce(data: list[Tensor]) -> None:
    """Add every tensor to the first, then copy the sum to the others."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def stack_all_reduce(data: list[Tensor]) -> None:
    """Stack, sum, and copy the result to every tensor."""
    total = torch.stack([t.to(data[0].device) for t in data]).sum(0)
    for t in data:
        t.copy_(total)


def naive_reduce(data: list[Tensor]) -> None:
    """Add every tensor to the first."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)


def stack_reduce(data: list[Tensor]) -> None:
    """Stack, sum, and copy the result to the first tensor."""
    data[0].copy_(torch.stack([t.to(data[0].device) for t in data]).sum(0))


def naive_broadcast(data: list[Tensor]) -> None:
    """Copy the first tensor to the others."""
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def naive_all_gather(data: list[Tensor], out: list[Tensor]) -> None:
    """Copy every part into every output."""
    for whole in out:
        for part, tensor in zip(whole.chunk(len(data)), data, strict=True):
            part[:] = tensor.to(whole.device)


def stack_all_gather(data: list[Tensor], out: list[Tensor]) -> None:
    """Concatenate once and copy the result to every output."""
    whole = torch.cat([t.to(data[0].device) for t in data])
    for t in out:
        t.copy_(whole)


def naive_reduce_scatter(data: list[Tensor], out: list[Tensor]) -> None:
    """For every part, copy the first rank's and add the other ranks'."""
    parts = zip(*(t.chunk(len(out)) for t in data), strict=True)
    for target, (first, *others) in zip(out, parts, strict=True):
        target[:] = first.to(target.device)
        for part in others:
            target[:] += part.to(target.device)


def stack_reduce_scatter(data: list[Tensor], out: list[Tensor]) -> None:
    """Stack, sum, and copy each part of the result to its rank."""
    total = torch.stack([t.to(data[0].device) for t in data]).sum(0)
    for target, part in zip(out, total.chunk(len(out)), strict=True):
        target.copy_(part)


def comm_all_reduce(data: list[Tensor]) -> None:
    """Add with torch.cuda.comm on the first GPU, and broadcast the sum."""
    total = comm.reduce_add(data, data[0].get_device())
    comm.broadcast(total, out=data)


def comm_reduce(data: list[Tensor]) -> None:
    """Add with torch.cuda.comm on the first GPU."""
    data[0].copy_(comm.reduce_add(data, data[0].get_device()))


def comm_broadcast(data: list[Tensor]) -> None:
    """Copy the first tensor to the others with torch.cuda.comm."""
    comm.broadcast(data[0], out=data[1:])


def _comm(function: Callable[[list[Tensor]], None]) -> Peer:
    def make(workspace: Workspace) -> Call:
        if not workspace.case.on_gpus:
            raise ValueError("needs every rank on a GPU")
        return partial(_for_each, function, workspace.columns)

    return make


def _cupy_all_reduce(cupy: Any, columns: list[list[Any]]) -> None:
    """Add the arrays of all ranks with CuPy, and copy the sum to each."""
    stream = torch.cuda.current_stream()
    with cupy.cuda.ExternalStream(stream.cuda_stream):
        for arrays in columns:
            total = reduce(cupy.add, arrays)
            for array in arrays:
                array[...] = total


def _cupy(workspace: Workspace) -> Call:
    case = workspace.case
    if not (case.on_gpus and case.one_memory):
        raise ValueError("needs all ranks on one GPU")
    if case.dtype not in _CUPY_DTYPES:
        raise ValueError(f"is not measured for {case.dtype}")
    if find_spec("cupy") is None:
        raise ValueError("CuPy is not installed")
    cupy = import_module("cupy")
    columns = [[cupy.from_dlpack(t) for t in column] for column in workspace.columns]
    return partial(_cupy_all_reduce, cupy, columns)


_CUPY_DTYPES = (torch.float64, torch.float32, torch.float16, torch.int32, torch.int64, torch.int8)


def _for_each(function: Callable[[list[Tensor]], None], columns: list[list[Tensor]]) -> None:
    for data in columns:
        function(data)


def _in_place(function: Callable[[list[Tensor]], None]) -> Peer:
    return lambda w: partial(function, w.firsts)


def _coalesced(function: Callable[[list[Tensor]], None]) -> Peer:
    return lambda w: partial(_for_each, function, w.columns)


def _out_of_place(function: Callable[[list[Tensor], list[Tensor]], None]) -> Peer:
    return lambda w: partial(function, w.firsts, w.outputs)


_PEERS: dict[str, dict[str, Peer]] = {
    "all_reduce": {
        "naive": _in_place(naive_all_reduce),
        "stack": _in_place(stack_all_reduce),
        "comm": _comm(comm_all_reduce),
        "cupy": _cupy,
    },
    "all_reduce_coalesced": {
        "naive": _coalesced(naive_all_reduce),
        "stack": _coalesced(stack_all_reduce),
        "comm": _comm(comm_all_reduce),
        "cupy": _cupy,
    },
    "reduce": {
        "naive": _in_place(naive_reduce),
        "stack": _in_place(stack_reduce),
        "comm": _comm(comm_reduce),
    },
    "broadcast": {"naive": _in_place(naive_broadcast), "comm": _comm(comm_broadcast)},
    "all_gather": {
        "naive": _out_of_place(naive_all_gather),
        "stack": _out_of_place(stack_all_gather),
    },
    "reduce_scatter": {
        "naive": _out_of_place(naive_reduce_scatter),
        "stack": _out_of_place(stack_reduce_scatter),
    },
}
NAMES = ("naive", "stack", "comm", "cupy")


def usual(case: Case) -> tuple[str, ...]:
    """Return the default peers of a case; those for GPUs only if all ranks are on GPUs.

    CuPy is included if it is installed and the ranks share one GPU.
    """
    if not case.on_gpus:
        return NAMES[:2]
    with_cupy = case.one_memory and find_spec("cupy") is not None
    return NAMES if with_cupy else NAMES[:3]


def peer(name: str, case: Case, workspace: Workspace) -> Call:
    """Return the peer's call on these buffers.

    Raises:
        ValueError: if the peer has no such collective or op.
    """
    peers = _PEERS[case.collective]
    if name not in peers:
        raise ValueError(f"has no {case.collective}")
    if case.op not in ("sum", "none"):
        raise ValueError(f"is measured only for sums, not {case.op}")
    return peers[name](workspace)


def multiply_each(tensors: list[Tensor]) -> None:
    """Read and write every tensor once, in place, one torch call per tensor."""
    for t in tensors:
        t.mul_(1.0)


def limits(workspace: Workspace) -> dict[str, tuple[Call, Call]]:
    """Return the ways to measure the limit, each with its rewrite of the memory.

    Each moves the least number of bytes of the collective. On a GPU it is a copy from device to
    device. On a CPU there are two: `memory` multiplies the buffers, or a part of each, in place,
    one call per buffer; `memory_flat` multiplies one tensor of the same size in one call. The
    faster of the two, which depends on the case, is the limit.
    """
    part = workspace.case.minimum_bytes / workspace.read_write_bytes
    buffers = [t[: round(t.numel() * part)] for t in workspace.raw]
    flat = torch.cat(buffers)
    if workspace.case.on_gpus:
        return {"memcpy": (partial(torch.empty_like(flat).copy_, flat), partial(flat.fill_, 1.0))}
    return {
        "memory": (partial(multiply_each, buffers), workspace.rewrite_raw),
        "memory_flat": (partial(flat.mul_, 1.0), partial(flat.fill_, 1.0)),
    }
