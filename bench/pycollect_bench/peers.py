"""The peers of lists, which `--peers` selects, and their limits: loops and library calls.

`naive` is Dive into Deep Learning's loop over the tensors; `stack` uses torch's stack and sum; on
GPUs `comm` is torch.cuda.comm, and `cupy` is CuPy on the same memory. The limit is `memory`, which
multiplies all buffers in place by a number; on a GPU it is `memcpy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .cases import Buffers, Call, Case

NAIVE = "naive"
NAMES = (NAIVE, "stack", "comm", "cupy")
Peer = Callable[..., object]  # of the tensors of all ranks and, not in place, their outputs
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
    _copied([_total(data)] * len(data), data)


def _total(data: list[Tensor]) -> Tensor:
    return torch.stack([t.to(data[0].device) for t in data]).sum(0)


def _copied(sources: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    for source, target in zip(sources, out, strict=True):
        target.copy_(source)


def _comm_all_reduce(data: list[Tensor]) -> None:
    """Add with torch.cuda.comm on the first GPU, and broadcast the sum."""
    comm.broadcast(comm.reduce_add(data, data[0].get_device()), out=data)


def _cupy_all_reduce(cupy: Any, arrays: list[Any]) -> None:
    """Add the arrays of all ranks with CuPy, and copy the sum to each."""
    total = reduce(cupy.add, arrays)
    for array in arrays:
        array[...] = total


# The loop of Dive into Deep Learning, torch's stack, sum and cat, and torch.cuda.comm.
_PEERS: dict[str, dict[str, Peer]] = {
    "all_reduce": {NAIVE: naive_all_reduce, "stack": stack_all_reduce, "comm": _comm_all_reduce},
    "reduce": {
        NAIVE: naive_reduce,
        "stack": lambda data: _copied([_total(data)], data[:1]),
        "comm": lambda data: data[0].copy_(comm.reduce_add(data, data[0].get_device())),
    },
    "broadcast": {
        NAIVE: naive_broadcast,
        "comm": lambda data: comm.broadcast(data[0], out=data[1:]),
    },
    "all_gather": {
        NAIVE: naive_all_gather,
        "stack": lambda data, out: _copied(
            [torch.cat([t.to(data[0].device) for t in data])] * len(out), out
        ),
    },
    "reduce_scatter": {
        NAIVE: naive_reduce_scatter,
        "stack": lambda data, out: _copied(_total(data).chunk(len(out)), out),
    },
}
_CUPY_DTYPES = (torch.float64, torch.float32, torch.float16, torch.int32, torch.int64, torch.int8)


def usual(case: Case) -> tuple[str, ...]:
    """Return the default peers of a case; those for GPUs only if all ranks are on GPUs.

    CuPy is included if it is installed and the ranks share one GPU.
    """
    if not case.on_gpus:
        return NAMES[:2]
    with_cupy = case.one_memory and find_spec("cupy") is not None
    return NAMES if with_cupy else NAMES[:3]


def peer(name: str, case: Case, ranks: Sequence[Buffers]) -> Call:
    """Return the peer's call on these buffers, one after the other for several tensors of a rank.

    Raises:
        ValueError: if the peer has no such collective, op, dtype or device.
    """
    collective = case.collective.removesuffix("_coalesced")
    columns = [list(tensors) for tensors in zip(*(one.inputs for one in ranks), strict=True)]
    if case.op not in ("sum", "none"):
        raise ValueError(f"is measured only for sums, not {case.op}")
    if name == "cupy" and collective == "all_reduce":
        return _cupy(case, columns)
    if name not in _PEERS[collective]:
        raise ValueError(f"has no {case.collective}")
    if name == "comm" and not case.on_gpus:
        raise ValueError("needs every rank on a GPU")
    function = _PEERS[collective][name]
    if not case.spec.in_place:
        return partial(function, columns[0], [one.output for one in ranks])
    if len(columns) == 1:
        return partial(function, columns[0])
    return partial(_for_each, function, columns)


def _for_each(function: Callable[[list[Any]], object], columns: list[list[Any]]) -> None:
    for data in columns:
        function(data)


def _cupy(case: Case, columns: list[list[Tensor]]) -> Call:
    if not (case.on_gpus and case.one_memory):
        raise ValueError("needs all ranks on one GPU")
    if case.dtype not in _CUPY_DTYPES:
        raise ValueError(f"is not measured for {case.dtype}")
    if find_spec("cupy") is None:
        raise ValueError("CuPy is not installed")
    cupy = import_module("cupy")
    arrays = [[cupy.from_dlpack(t) for t in column] for column in columns]

    def call() -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            _for_each(partial(_cupy_all_reduce, cupy), arrays)

    return call


def limits(case: Case, memory: Sequence[Tensor]) -> dict[str, tuple[Call, Call]]:
    """Return the ways to measure the limit, each with its rewrite; `memory` is float32.

    There are none for ranks on several memories.

    Each moves the least number of bytes of the collective. On a GPU it is a copy from device to
    device. On a CPU there are two: `memory` multiplies the buffers, or a part of each, in place,
    one call per buffer; `memory_flat` multiplies one tensor of the same size in one call. The
    faster of the two, which depends on the case, is the limit.
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

    return {
        "memory": (multiply, rewrite),
        "memory_flat": (partial(flat.mul_, 1.0), refill),
    }
