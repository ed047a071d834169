"""One process per rank: the torch.distributed backend "pycollect".

`import pycollect` registers it. Ranks are processes of one host, on one GPU or several or none:
tensors are on the CPU or, in a build with CUDA, on GPUs. Those can be left to another backend, too:
`init_process_group("cpu:pycollect,cuda:nccl")`.
"""

from __future__ import annotations

import atexit
import copy
import datetime
import os
import threading
import time
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Base  # `dist.Backend` is a name of one

from . import _C, _coalescing
from .plans import algorithms

NAME = "pycollect"
_WAKING = 1.0  # seconds: much more than it takes a thread to raise an error and end

# Environment variables that decide where the options of a group leave it to "auto".
_SETTINGS = {
    "cuda_transport": ("PYCOLLECT_CUDA_TRANSPORT", tuple(_C.cuda_transports()[1:])),
}
_MOST_BYTES = 2**46  # more than any address space has


def options(
    *,
    algorithm: str | None = None,
    buffer_bytes: int | None = None,
    symmetric_heap_bytes: int | None = None,
    cuda_buffer_bytes: int | None = None,
    cuda_transport: str = "auto",
) -> Any:
    """Return options of a group, for `pg_options=` of torch's functions that make one.

    `algorithm` is run by every collective that has one of this name, instead of the one that would
    be chosen (see `pycollect.algorithms`). Each rank has two staging buffers of `buffer_bytes`
    bytes in shared memory, through which its data goes piece by piece, and a symmetric heap of
    `symmetric_heap_bytes` bytes of address space for tensors that live in shared memory. The shared
    memory is passed on a Unix socket, so ranks in containers need one network namespace.

    `cuda_transport` is how CUDA tensors reach other processes. "cuda_ipc": through a staging buffer
    of `cuda_buffer_bytes` bytes of GPU memory for each rank, which all processes map and where
    streams wait for each other. "host_staging": through pinned host memory. "auto" tests at the
    group's first such call whether the former works on all ranks, and falls back to the latter;
    PYCOLLECT_CUDA_TRANSPORT may name one, too. One that is named and does not work is an error. A
    group that is made with a `device_id` tests at once, and the first calls of several groups may
    then come in any order.

    Messages between two ranks go through pinned memory, in fragments where they are larger than
    1 MiB. Their `wait()` blocks the host until they have left it, or arrived.

    If all CUDA tensors of a collective lie in symmetric memory (`pycollect.empty(...,
    device="cuda")`), peers read and write them in place, without staging.

    All options must be the same on all ranks.

    >>> options(algorithm="fused").algorithm
    'fused'
    """
    made = _C.Options()
    if algorithm is not None:
        _check_algorithm(algorithm)
        made.algorithm = algorithm
    if buffer_bytes is not None:
        made.buffer_bytes = _bytes("buffer_bytes", buffer_bytes, least=4096)
    if symmetric_heap_bytes is not None:
        made.symmetric_heap_bytes = _bytes("symmetric_heap_bytes", symmetric_heap_bytes, least=0)
    if cuda_buffer_bytes is not None:
        made.cuda_buffer_bytes = _bytes("cuda_buffer_bytes", cuda_buffer_bytes, least=16384)
    made.cuda_transport = cuda_transport
    return made


def _check_algorithm(name: str) -> None:
    known = sorted({a for collective in _C.COLLECTIVES for a in algorithms(collective)})
    if name not in known:
        raise ValueError(f"algorithm is {name!r}; allowed are {', '.join(known)}")


def _bytes(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a number of bytes")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    if value > _MOST_BYTES:
        raise ValueError(f"{name} is {value}; it must be at most {_MOST_BYTES}")
    return value


def _read_environment(made: Any) -> None:
    for name, (variable, allowed) in _SETTINGS.items():
        wanted = os.environ.get(variable, "").strip().lower()
        if wanted and wanted not in allowed:
            raise ValueError(f"{variable} is {wanted!r}; allowed are {', '.join(allowed)}")
        if wanted and getattr(made, name) == "auto":
            setattr(made, name, wanted)


def _own(given: Any) -> Any:
    """Return options that nobody else changes; those of another backend are not meant for us."""
    if isinstance(given, _C.Options):
        return copy.copy(given)
    if given is None or isinstance(given, _Base.Options):
        return _C.Options()
    raise TypeError(
        f"pg_options is a {type(given).__name__}; pass pycollect.distributed.options(...)"
    )


def _create(asked: Any, given: Any) -> Any:
    """Make one group's backend, as torch.distributed asks plugins to."""
    if asked.timeout < datetime.timedelta(0):
        raise ValueError(
            f"the timeout is {asked.timeout}; it must not be negative, which is what torch makes of"
            " one of more than 292,000 years"
        )
    made = _own(given)
    _read_environment(made)
    made._timeout = asked.timeout
    made.group_name = asked.group_id
    made.global_ranks_in_group = asked.global_ranks_in_group
    return _C.make_backend(asked.store, asked.group_rank, asked.group_size, made)


def _end_groups() -> None:
    """Let no thread of a group outlive the interpreter, and those that wait in one raise."""
    if not _C.close_groups():
        return
    until = time.monotonic() + _WAKING
    for thread in threading.enumerate():  # those that are left are daemons
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


def register() -> None:
    """Make the backend known to torch.distributed, for CPU tensors and those on GPUs."""
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    _coalescing.install()
    atexit.register(_end_groups)
