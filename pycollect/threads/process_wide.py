"""Refuses what a second rank would break, because torch has it once in a process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch._library.custom_ops
import torch.autograd.profiler


class _Owners:
    """The ranks that use or define something."""

    def __init__(self, find_rank: Callable[[], int]) -> None:
        self._find_rank = find_rank
        self._lock = threading.Lock()
        self._ranks: dict[str, int] = {}

    def add(self, what: str, advice: str) -> None:
        rank = self._find_rank()
        if rank < 0:
            return
        with self._lock:
            owner = self._ranks.setdefault(what, rank)
        if owner != rank:
            raise RuntimeError(
                f"rank {rank} cannot have {what}, which rank {owner} has: torch has one for all "
                f"threads; {advice}"
            )

    def remove(self, what: str) -> None:
        with self._lock:
            self._ranks.pop(what, None)


_PROFILER = "the profiler"


def _beginning(owners: _Owners, begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def begin_of_rank(*args: Any, **options: Any) -> Any:
        owners.add(_PROFILER, "profile in one rank")
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


@contextmanager
def second_uses_refused(find_rank: Callable[[], int]) -> Iterator[None]:
    """Raise RuntimeError where a rank uses the profiler, or defines an operator, as another does.

    Otherwise the process would crash. `find_rank()` returns the calling thread's rank or -1.
    """
    owners = _Owners(find_rank)
    profiler: Any = torch.autograd.profiler
    operators: Any = torch._library.custom_ops
    replaced: list[tuple[Any, str, Callable[[_Owners, Callable[..., Any]], Callable[..., Any]]]] = [
        (profiler, "_prepare_profiler", _beginning),
        (profiler, "_enable_profiler", _beginning),
        (profiler, "_disable_profiler", _ending),
        (operators, "get_library_allowing_overwrite", _defining),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, replace in replaced:
        setattr(owner, name, replace(owners, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
