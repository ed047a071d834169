"""Patches torch's `_coalescing_manager`: clean-up when its body raises, and one list per thread.

torch removes the list of coalesced operations only when the body succeeds: after an exception every
later `all_reduce` of the group is appended to the old list and returns unreduced. For groups of
this backend, the patch drops that list and sends the error to ranks that wait for its operations.
torch also has one list for all threads that share a group: a call from a thread that coalesces
nothing would return unreduced. Groups of other backends are unchanged.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from . import _C
from .errors import CollectiveError


def _backends(group: Any) -> list[Any]:
    devices = getattr(group, "_device_types", ())  # absent on a rank outside of the group
    found = (group._get_backend(torch.device(device)) for device in devices)
    return [*{id(backend): backend for backend in found if _C.is_backend(backend)}.values()]


class _Mine(threading.local):
    """The calling thread's lists for groups of this backend, freed when the thread ends."""

    def __init__(self) -> None:
        self.lists: dict[Any, list[Any]] = {}


class _Lists(dict[Any, list[Any]]):
    """Replaces torch's dictionary from group to list, which torch reads before every `all_reduce`.

    As fast as the original while no block of this backend is active.
    """

    def __init__(self, found: dict[Any, list[Any]]) -> None:
        super().__init__(found)
        self.mine = _Mine()
        self._lock = threading.Lock()
        self._blocks = 0

    @contextlib.contextmanager
    def per_thread(self, group: Any) -> Iterator[Callable[[], bool]]:
        """Give the calling thread a list of its own for the group, while its block is active.

        Yields a function that returns whether it is called from the same thread.
        """
        mine = self.mine.lists
        begun = group not in mine
        mine.setdefault(group, [])
        self._count(1)
        try:
            yield lambda: self.mine.lists is mine
        finally:
            self._count(-1)
            if begun:
                mine.pop(group, None)

    def _count(self, more: int) -> None:
        with self._lock:
            self._blocks += more
            self.__class__ = _ListsOfThreads if self._blocks else _Lists


class _ListsOfThreads(_Lists):
    """`_Lists` while blocks of this backend are active; overrides the methods that torch calls."""

    def __contains__(self, group: Any) -> bool:
        return group in self.mine.lists or super().__contains__(group)

    def __getitem__(self, group: Any) -> list[Any]:
        found = self.mine.lists.get(group)
        return super().__getitem__(group) if found is None else found

    def __delitem__(self, group: Any) -> None:
        self.pop(group)

    def setdefault(self, group: Any, default: Any = None) -> list[Any]:
        mine = self.mine.lists
        return mine[group] if group in mine else super().setdefault(group, default)

    def pop(self, group: Any, *default: Any) -> Any:
        mine = self.mine.lists
        return mine.pop(group) if group in mine else super().pop(group, *default)

    def clear(self) -> None:
        self.mine.lists.clear()
        super().clear()


def _abandon(group: Any, operations: list[Any], error: BaseException) -> None:
    c10d._world.pg_coalesce_state.pop(group, None)
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    for backend in _backends(group):
        unlisted = any(group._get_backend(o.tensor.device) is backend for o in operations)
        with contextlib.suppress(CollectiveError):  # the group has ended: no rank waits
            _C.abandon_coalescing(backend, why, unlisted)


def _name(op: Any) -> str:
    """Return the name of a ReduceOp or of one of its kinds; torch supports only `op == kind`."""
    kinds = ReduceOp.RedOpType.__members__.items()
    return next((name for name, kind in kinds if op == kind), str(op))


def _require_one_op(operations: list[Any]) -> None:
    """Raise RuntimeError for a list that torch would run with the wrong operation."""
    for other in operations:
        first = operations[0]
        if other.op is not first.op:  # torch itself detects this only after dropping the list
            kinds = f"{first.op.__name__} and {other.op.__name__}"
            raise RuntimeError(f"coalesced calls must be alike, not {kinds}")
        if other.redop is first.redop:
            continue
        ops = _name(first.redop), _name(other.redop)
        if ops[0] != ops[1] or ops[0] == "PREMUL_SUM":  # torch uses the first call's op for all
            raise RuntimeError(
                f"coalesced calls must have one op, not {ops[0]} and {ops[1]}"
                " (and PREMUL_SUM one object, for it has a factor)"
            )


def _guarded(body: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    manager = contextlib.contextmanager(body)

    def guarded(
        group: Any = None, device: torch.device | None = None, async_ops: bool = False
    ) -> Iterator[Any]:
        group = group or c10d._get_default_group()
        if not _backends(group):  # another backend: its lists are shared by all threads
            yield from body(group, device, async_ops)
            return
        lists: Any = c10d._world.pg_coalesce_state
        begun = group not in lists  # False: the list belongs to an outer block, which continues
        # In torch's multi-threaded world for tests every thread has a dictionary of its own.
        own = lists.per_thread(group) if isinstance(lists, _Lists) else nullcontext(lambda: True)
        operations: list[Any] = []  # those that torch has put in the list
        with own as is_here:
            try:
                with manager(group, device, async_ops) as works:
                    begun, operations = True, lists[group]
                    yield works
                    if not is_here():
                        raise RuntimeError("coalesced calls must end in the thread that began them")
                    _require_one_op(operations)
                    operations = []
            except BaseException as error:
                if is_here() and begun:
                    _abandon(group, operations, error)
                elif begun and (operations or device):
                    group.abort()  # only the thread that began the block can drop its list
                raise

    return guarded


def lists_of_threads() -> dict[Any, list[Any]]:
    """Return a dictionary in place of torch's, for another world of `torch.distributed`."""
    return _Lists({})


def install() -> None:
    """Install both patches inside torch's manager, which other modules have imported by name."""
    manager: Any = c10d._coalescing_manager
    (cell,) = manager.__closure__  # contextlib's cell with the decorated generator function
    assert inspect.isgeneratorfunction(cell.cell_contents)
    cell.cell_contents = _guarded(cell.cell_contents)
    c10d._world._pg_coalesce_state = _Lists(c10d._world.pg_coalesce_state)
