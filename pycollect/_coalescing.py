"""What torch's `_coalescing_manager` lacks: a clean-up when its body raises, and a list per thread.

torch drops what a body has asked for only where the body ends well: after an exception, every later
`all_reduce` of the group is put in the list that was left, and returns unreduced. Here the list of
a group of this backend is dropped, and ranks that wait for what was in it are told why it does not
come. torch has one list for all threads that share a group, too: a call of a thread that coalesces
nothing would return unreduced. Groups of other backends are left as they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from . import _C
from .errors import CollectiveError


def _backends(group: Any) -> list[Any]:
    devices = getattr(group, "_device_types", ())  # a rank outside of the group has none
    found = (group._get_backend(torch.device(device)) for device in devices)
    return [*{id(backend): backend for backend in found if _C.is_backend(backend)}.values()]


class _ListsOfThreads(dict[Any, list[Any]]):
    """torch's dictionary of groups and their lists, in which a group of this backend has a list for
    each thread: the methods that torch calls see the calling thread's only.
    """

    _threads = threading.local()  # an object each: the system gives a thread's number to the next

    def _key(self, group: Any) -> Any:
        if dict.__contains__(self, group):
            return group
        return group, self._threads.__dict__.setdefault("key", object())

    def __contains__(self, group: Any) -> bool:
        return bool(self) and dict.__contains__(self, self._key(group))

    def __getitem__(self, group: Any) -> list[Any]:
        return super().__getitem__(self._key(group))

    def __delitem__(self, group: Any) -> None:
        super().__delitem__(self._key(group))

    def get(self, group: Any, default: Any = None) -> Any:
        return super().get(self._key(group), default)

    def setdefault(self, group: Any, default: Any = None) -> list[Any]:
        key = self._key(group) if _backends(group) else group
        return super().setdefault(key, default)

    def pop(self, group: Any, *default: Any) -> Any:
        return super().pop(self._key(group), *default)


def _abandon(group: Any, operations: list[Any], error: BaseException) -> None:
    backends = _backends(group)
    if backends:
        c10d._world.pg_coalesce_state.pop(group, None)
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    for backend in backends:
        asked = any(group._get_backend(o.tensor.device) is backend for o in operations)
        with contextlib.suppress(CollectiveError):  # that a group has ended need not be told
            _C.abandon_coalescing(backend, why, asked)


def _name(op: Any) -> str:
    """Of a ReduceOp or one of its kinds, which torch compares in one order only."""
    kinds = ReduceOp.RedOpType.__members__.items()
    return next((name for name, kind in kinds if op == kind), str(op))


def _require_alike(operations: list[Any]) -> None:
    """Raise RuntimeError for a list that torch would run as something else than was asked for."""
    kinds = sorted({o.op.__name__ for o in operations})
    if len(kinds) > 1:  # torch finds out when the list is not known any more
        raise RuntimeError(f"coalesced calls must be alike, not {', '.join(kinds)}")
    first = operations[0].redop if operations else None
    for op in (o.redop for o in operations):  # torch takes the first one's for all
        if op is not first and not _name(first) == _name(op) != "PREMUL_SUM":
            raise RuntimeError(
                f"coalesced calls must have one op, not {_name(first)} and {_name(op)}"
                " (and PREMUL_SUM one object, for it has a factor)"
            )


def _guarded(body: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    manager = contextlib.contextmanager(body)

    def guarded(
        group: Any = None, device: torch.device | None = None, async_ops: bool = False
    ) -> Iterator[Any]:
        group = group or c10d._get_default_group()
        if not _backends(group):
            yield from body(group, device, async_ops)
            return
        lists = c10d._world.pg_coalesce_state
        operations: list[Any] = []  # that torch has put in its list
        ours = group not in lists  # else the list is another block's, which goes on
        try:
            with manager(group, device, async_ops) as works:
                ours, operations = True, lists.get(group, [])
                yield works
                _require_alike(operations)
                operations = []
        except BaseException as error:
            if ours:
                _abandon(group, operations, error)
            raise

    return guarded


def install() -> None:
    """Put both where torch looks: inside its own manager, which others have imported by name."""
    manager: Any = c10d._coalescing_manager
    (cell,) = manager.__closure__  # contextlib's, of the function that was decorated
    cell.cell_contents = _guarded(cell.cell_contents)
    c10d._world._pg_coalesce_state = _ListsOfThreads(c10d._world.pg_coalesce_state)
