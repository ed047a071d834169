"""One process per rank: the torch.distributed backend "pycollect".

`import pycollect` registers it. The ranks are processes of one host or of several. Tensors are on
the CPU or, in a build with CUDA, on one or several GPUs. Another backend can be chosen for CUDA
tensors: `init_process_group("cpu:pycollect,cuda:nccl")`. `options` sets what a group may use.
"""

from __future__ import annotations

import atexit
import copy
import datetime
import functools
import multiprocessing
import os
import socket
import threading
import time
from multiprocessing import util
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Base  # `dist.Backend` is a str

from . import _C, _coalescing_patch
from ._build_check import build_info
from ._version import __version__
from .collectives import Order
from .errors import PeerLost, shown
from .plans import algorithms

__all__ = ["options"]

NAME = "pycollect"
HOSTS = ("exact", "one")  # values of the option `hosts`
ORDERS = ("rank", "tree")
# Limits of Gloo's own timeout: zero stands for none, and it must fit into a clock.
_LEAST_TIMEOUT, _MOST_TIMEOUT = datetime.timedelta(seconds=1), datetime.timedelta(days=30)
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: the way to it is the way to other networks
_JOIN_SECONDS = 1.0  # far more than a woken thread needs to raise its error and end

_MOST_BYTES = 2**46  # half of the address space of an x86-64 process


def options(
    *,
    algorithm: str | None = None,
    order: Order = "rank",
    buffer_bytes: int | None = None,
    symmetric_heap_bytes: int | None = None,
    hosts: str = "exact",
) -> Any:
    """Return the options of a group, for `pg_options=` of `init_process_group` and `new_group`.

    `algorithm` replaces the selected algorithm in all collectives that have one of this name (see
    `pycollect.algorithms`); None (default) leaves the selection to the library. Ranks on several
    hosts have one way for each collective, and refuse another.

    `order` is that of reductions: "rank" (default), the left fold in rank order, or "tree", the
    balanced tree over the ranks (`help(pycollect.collectives)`). Sparse tensors have only the
    former, and `algorithm`s that add in several steps, too.

    Sizes are ints in bytes, at most 2**46; None stands for the default. Each rank has two staging
    buffers in shared memory, through which its data moves in pieces of at most `buffer_bytes` bytes
    (default 512 KiB, at least 4096). A buffer may be larger than a piece, up to 1 MiB. Each rank
    also has a symmetric heap of `symmetric_heap_bytes` bytes of address space for CPU tensors in
    shared memory (at least 0, which means no heap). The heap's default for W ranks is the host's
    memory, rounded up to a power of two, but at most 4 TiB / W, and at most 1/8 of the limit of
    `ulimit -v`, if there is one, divided by W. File descriptors of the shared memory are sent
    through a Unix socket, so containers must share a network namespace.

    CUDA tensors go through pinned host memory, in collectives and messages alike: `wait()` blocks
    the host until the ranks have exchanged their data, then the current stream. For a process per
    GPU there is NCCL, in the same group: `init_process_group("cpu:pycollect,cuda:nccl")`.

    `hosts` says how ranks on several hosts work together. "exact" (default): they exchange data
    through a Gloo process group of torch, and reductions have the same bits as on one host. "one":
    a group over several hosts raises ValueError. Ranks are on one host if they run on the same boot
    of a machine in the same network namespace; the environment variable PYCOLLECT_HOST replaces
    this test by a name of the host. Ranks of one host must be able to share memory.

    All options must be the same on all ranks; a group has at most 64 ranks on a host. Raises
    ValueError for an unknown algorithm or other name and for a size out of range,
    and TypeError for a size that is not an int and for another option that is not a string.

    >>> options(algorithm="fused").algorithm
    'fused'
    """
    made = _new_options()
    if algorithm is not None:
        _check_algorithm(algorithm)
        made.algorithm = algorithm
    if buffer_bytes is not None:
        made.buffer_bytes = _bytes("buffer_bytes", buffer_bytes, least=4096)
    if symmetric_heap_bytes is not None:
        made.symmetric_heap_bytes = _bytes("symmetric_heap_bytes", symmetric_heap_bytes, least=0)
    _check_names(hosts, order)
    made.hosts, made.order = hosts, order
    return made


def _check_names(hosts: str, order: str) -> None:
    for name, value, names in (("hosts", hosts, HOSTS), ("order", order, ORDERS)):
        allowed = ", ".join(map(repr, names))
        if not isinstance(value, str):
            raise TypeError(f"{name} is a {type(value).__name__}; pass one of {allowed}")
        if value not in names:
            raise ValueError(f"{name} is {shown(value)}; allowed are {allowed}")


def _new_options() -> Any:
    made = _C.Options()
    made._gloo = _gloo
    commit = build_info().get("commit") or ""
    made._version = f"{__version__} {commit}".strip().removesuffix("-dirty")
    return made


def _check_algorithm(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"algorithm is a {type(name).__name__}; pass a name out of pycollect.algorithms(), or "
            "None"
        )
    known = sorted({a for collective in _C.COLLECTIVES for a in algorithms(collective)})
    if name not in known:
        raise ValueError(f"algorithm is {shown(name)}; allowed are {', '.join(known)}")


def _bytes(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a number of bytes")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    if value > _MOST_BYTES:
        raise ValueError(f"{name} is {value}; it must be at most {_MOST_BYTES}")
    return value


def _device(gloo: Any) -> Any:
    """Return Gloo's device: the first interface that GLOO_SOCKET_IFNAME names, or the one through
    which this host reaches MASTER_ADDR: Gloo's default may be an address of this host only."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return gloo.create_device(interface=names[0], lazy_init=True)
    address = _address_towards(os.environ.get("MASTER_ADDR", ""))
    if address and address.startswith("127.") and "PYCOLLECT_HOST" not in os.environ:
        address = _address_towards(_ELSEWHERE) or address  # the name of this host, in /etc/hosts
    if address:
        return gloo.create_device(hostname=address, lazy_init=True)
    return gloo.create_default_device(lazy_init=True)


def _address_towards(host: str) -> str | None:
    """Return this host's address on the way to another; None if there is no way. Sends nothing."""
    if not host:
        return None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _gloo(store: Any, rank: int, world: int, timeout: datetime.timedelta) -> Any:
    """Return the process group for what goes between hosts. It connects two ranks when both begin
    to exchange data: ranks of one host never do."""
    if not dist.is_gloo_available():
        raise RuntimeError("a group over several hosts needs Gloo, which this torch does not have")
    from torch._C import _distributed_c10d

    gloo: Any = _distributed_c10d.ProcessGroupGloo
    made = gloo._Options()
    made._timeout = min(max(timeout, _LEAST_TIMEOUT), _MOST_TIMEOUT)
    made._devices = [_device(gloo)]
    made._threads = 2  # as torch does; used by Gloo's collectives only
    return gloo(store, rank, world, made)


def _create(request: Any, given: Any) -> Any:
    """Create the backend of a group; torch.distributed calls it (`extended_api`)."""
    if request.timeout < datetime.timedelta(0):
        raise ValueError(
            f"the timeout is {request.timeout}; it must not be negative (torch makes a timeout of "
            "more than 292,000 years negative)"
        )
    if not (given is None or isinstance(given, _Base.Options)):
        kind = type(given).__name__
        raise TypeError(f"pg_options is a {kind}; pass pycollect.distributed.options(...)")
    # Options of another backend are replaced by the default ones.
    made: Any = copy.copy(given) if isinstance(given, _C.Options) else _new_options()
    _check_names(made.hosts, made.order)  # the attributes can be set
    made._is_default = not dist.is_initialized()
    made._timeout = request.timeout
    made.group_name = request.group_id
    made.global_ranks_in_group = request.global_ranks_in_group
    _end_groups_of_child(os.getpid())
    try:
        return _C.make_backend(request.store, request.group_rank, request.group_size, made)
    except dist.DistError as error:
        why = str(error).partition("\n")[0]
        cause = f"the store failed, which may be in the process of rank 0: {why}"
        raise PeerLost(f"group '{request.group_id}': {cause}") from error


def _end_groups() -> None:
    """Close all groups at exit: waiting threads raise, and no thread outlives the interpreter."""
    if not _C.close_groups():
        return
    until = time.monotonic() + _JOIN_SECONDS
    for thread in threading.enumerate():  # only daemon threads are left
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


@functools.cache  # once per process
def _end_groups_of_child(_pid: int) -> None:
    """Close all groups when a child of multiprocessing ends, if it is one: forked children of
    older Pythons skip the handlers of atexit."""
    if multiprocessing.parent_process() is not None:
        util.Finalize(None, _end_groups, exitpriority=0)


def register() -> None:
    """Register the backend with torch.distributed, for CPU and CUDA tensors."""
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    _coalescing_patch.install()
    atexit.register(_end_groups)
