"""What torch has once in a process: one for each thread, or an error for a second rank."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch._library.custom_ops
import torch.autograd.profiler
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from .. import _C
from .torch_internals import attributes_replaced


class _Owners:
    """The ranks that use or define something; -1 stands for a thread of no rank."""

    def __init__(self, find_rank: Callable[[], int]) -> None:
        self._find_rank = find_rank
        self._lock = threading.Lock()
        self._ranks: dict[str, int] = {}

    def add(self, what: str, advice: str) -> None:
        rank = self._find_rank()
        with self._lock:
            owner = self._ranks.setdefault(what, rank)
        if owner != rank:
            raise RuntimeError(
                f"{_name(rank)} cannot have {what}, which {_name(owner)} has: torch has one for "
                f"all threads; {advice}"
            )

    def remove(self, what: str) -> None:
        with self._lock:
            self._ranks.pop(what, None)


def _name(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "another thread"


_PROFILER = "the profiler"
_IN_ONE = "profile in one rank, or around the launch"


def _beginning(owners: _Owners, begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def begin_of_rank(*args: Any, **options: Any) -> Any:
        owners.add(_PROFILER, _IN_ONE)
        return begin(*args, **options)

    return begin_of_rank


def _ending(owners: _Owners, end: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(end)
    def end_of_rank(*args: Any, **options: Any) -> Any:
        try:
            return end(*args, **options)
        finally:
            owners.remove(_PROFILER)

    return end_of_rank


def _defining(owners: _Owners, define: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(define)
    def define_of_rank(namespace: str, name: str) -> Any:
        owners.add(
            f"the operator {namespace}::{name}",
            "define it in a module that the ranks import, not in their script or function",
        )
        return define(namespace, name)

    return define_of_rank


class _ActiveModule(threading.local):
    """The DDP module whose forward this thread runs. torch has one for all threads, and ranks that
    end in another order leave it set, so that later compiled code is divided by its buckets."""

    module: Any = None

    def replace_inside(self, _: Any) -> Any:
        @contextmanager
        @_disable_dynamo(recursive=False)  # as torch's, which this replaces
        def inside(ddp: DistributedDataParallel) -> Iterator[None]:
            outer, self.module = self.module, ddp
            try:
                yield
            finally:
                self.module = outer

        return inside

    def replace_get(self, _: Any) -> Any:
        return staticmethod(lambda: self.module)


@contextmanager
def second_uses_refused(find_rank: Callable[[], int]) -> Iterator[None]:
    """Raise RuntimeError where a rank uses the profiler, or defines an operator, as others do.

    Otherwise the process would crash. The active module of DDP is each thread's own, and the device
    guard of fake tensors, which torch keeps in the rank that first needs it, outlives the ranks.
    `find_rank()` returns the calling thread's rank or -1.
    """
    active = _ActiveModule()
    owners = _Owners(find_rank)
    profiler: Any = torch.autograd.profiler
    if profiler._is_profiler_enabled:
        owners.add(_PROFILER, _IN_ONE)  # the caller's
    begin, end, define = (partial(f, owners) for f in (_beginning, _ending, _defining))
    with attributes_replaced(
        [
            (profiler, "_prepare_profiler", begin),
            (profiler, "_enable_profiler", begin),
            (profiler, "_disable_profiler", end),
            (torch._library.custom_ops, "get_library_allowing_overwrite", define),
            (torch._C, "_ensureCUDADeviceGuardSet", lambda _: _C.set_fake_cuda_guard),
            (DistributedDataParallel, "_inside_ddp_forward", active.replace_inside),
            (DistributedDataParallel, "_get_active_ddp_module", active.replace_get),
        ]
    ):
        yield
