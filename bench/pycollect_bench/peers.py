"""The peers of lists, which `--peers` selects, and their limits: loops and library calls.

`naive` is Dive into Deep Learning's loop over the tensors. All_reduce has more peers: `stack` uses
torch's stack and sum; on GPUs `comm` is torch.cuda.comm, and `cupy` is CuPy on the same memory. The
limit is `memory`, which multiplies all buffers in place by a number; on a GPU it is `memcpy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .cases import Buffers, Call, Case

NAIVE = "naive"
NAMES = (NAIVE, "stack", "comm", "cupy")
comm: Any = import_module("torch.cuda.comm")  # a module without type annotations


def naive_reduce(data: list[Tensor]) -> None:
    """Add every tensor to the first."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)


def naive_broadcast(data: list[Tensor]) -> None:
    """Copy the first tensor to the others."""
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def naive_all_reduce(data: list[Tensor]) -> None:
    """Add every tensor to the first, then copy the sum to the others."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def naive_all_gather(data: list[Tensor], out: list[Tensor]) -> None:
    """Copy every part into every output."""
    for whole in out:
        for part, tensor in zip(whole.chunk(len(data)), data, strict=True):
            part[:] = tensor.to(whole.device)


def naive_reduce_scatter(data: list[Tensor], out: list[Tensor]) -> None:
    """For every part, copy the first rank's and add the other ranks'."""
    parts = zip(*(t.chunk(len(out)) for t in data), strict=True)
    for target, (first, *others) in zip(out, parts, strict=True):
        target[:] = first.to(target.device)
        for part in others:
            target[:] += part.to(target.device)


def stack_all_reduce(data: list[Tensor]) -> None:
    """Stack, sum, and copy the result to every tensor."""
    total = torch.stack([t.to(data[0].device) for t in data]).sum(0)
    for target in data:
        target.copy_(total)


def _comm_all_reduce(data: list[Tensor]) -> None:
    """Add with torch.cuda.comm on the first GPU, and broadcast the sum."""
    comm.broadcast(comm.reduce_add(data, data[0].get_device()), out=data)


# Of the tensors of all ranks and, not in place, their outputs.
_LOOPS: dict[str, Callable[..., None]] = {
    "all_reduce": naive_all_reduce,
    "reduce": naive_reduce,
    "broadcast": naive_broadcast,
    "all_gather": naive_all_gather,
    "reduce_scatter": naive_reduce_scatter,
}


def peer(name: str, case: Case, ranks: Sequence[Buffers]) -> Call:
    """Return the peer's call on these buffers, one after the other for several tensors of a rank.

    Raises:
        ImportError: if its library is not installed.
        ValueError: if the peer has no such collective, op or device.
    """
    collective = case.collective.removesuffix("_coalesced")
    columns = [list(tensors) for tensors in zip(*(one.inputs for one in ranks), strict=True)]
    if case.op not in ("sum", "none"):
        raise ValueError(f"is measured only for sums, not {case.op}")
    if name != NAIVE and collective != "all_reduce":
        raise ValueError(f"is measured only for all_reduce, not {collective}")
    if name == "cupy":
        return _cupy(case, columns)
    if name == "comm" and not case.on_gpus:
        raise ValueError("needs every rank on a GPU")
    others = {"stack": stack_all_reduce, "comm": _comm_all_reduce}
    function: Callable[..., None] = _LOOPS[collective] if name == NAIVE else others[name]
    if not case.spec.in_place:
        return partial(function, columns[0], [one.output for one in ranks])
    if len(columns) == 1:
        return partial(function, columns[0])
    return partial(_for_each, function, columns)


def _for_each(function: Callable[[list[Tensor]], object], columns: list[list[Tensor]]) -> None:
    for data in columns:
        function(data)


def _cupy(case: Case, columns: list[list[Tensor]]) -> Call:
    """Return the call that adds the arrays of all ranks with CuPy, and copies the sum to each."""
    if not (case.on_gpus and case.one_memory):
        raise ValueError("needs all ranks on one GPU")
    cupy = import_module("cupy")
    arrays = [[cupy.from_dlpack(t) for t in column] for column in columns]

    def call() -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            for of_ranks in arrays:
                total = reduce(cupy.add, of_ranks)
                for array in of_ranks:
                    array[...] = total

    return call


def limits(case: Case, memory: Sequence[Tensor]) -> dict[str, tuple[Call, Call]]:
    """Return the ways to measure the limit, each with its rewrite; `memory` is float32.

    There are none for ranks on several memories. Each moves the least number of bytes of the
    collective. On a GPU it is a copy from device to device. On a CPU there are two: `memory`
    multiplies the buffers, or a part of each, in place, one call per buffer; `memory_flat`
    multiplies one tensor of the same size in one call. The faster one is the limit.
    """
    if not case.one_memory:
        return {}
    part = case.minimum_bytes / (2 * sum(t.nbytes for t in memory))
    buffers = [t[: round(t.numel() * part)] for t in memory]
    flat = torch.cat(buffers)
    refill = partial(flat.fill_, 1.0)
    if case.on_gpus:
        return {"memcpy": (partial(torch.empty_like(flat).copy_, flat), refill)}

    def multiply() -> None:
        for tensor in buffers:
            tensor.mul_(1.0)

    def rewrite() -> None:  # ones as float32, so that the limit multiplies no denormal numbers
        for tensor in memory:
            tensor.fill_(1.0)

    return {"memory": (multiply, rewrite), "memory_flat": (partial(flat.mul_, 1.0), refill)}
