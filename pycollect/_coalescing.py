"""The clean-up that torch's `_coalescing_manager` lacks when its body raises.

torch drops what a body has asked for only where the body ends well: after an exception, every later
`all_reduce` of the group is put in the list that was left, and returns unreduced. Here the list of
a group of this backend is dropped, and ranks that wait for what was in it are told why it does not
come. Groups of other backends are left as they are; and so is that torch has one list for all
threads that share a group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import _C
from .errors import CollectiveError


def _backends(group: Any) -> list[Any]:
    devices = getattr(group, "_device_types", ())  # a rank outside of the group has none
    found = (group._get_backend(torch.device(device)) for device in devices)
    return [*{id(backend): backend for backend in found if _C.is_backend(backend)}.values()]


def _abandon(group: Any, operations: list[Any], error: BaseException) -> None:
    backends = _backends(group)
    if backends:
        c10d._world.pg_coalesce_state.pop(group, None)
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    for backend in backends:
        asked = any(group._get_backend(o.tensor.device) is backend for o in operations)
        with contextlib.suppress(CollectiveError):  # that a group has ended need not be told
            _C.abandon_coalescing(backend, why, asked)


def _guarded(manager: Any) -> Any:
    @functools.wraps(manager)
    @contextlib.contextmanager
    def guarded(
        group: Any = None, device: torch.device | None = None, async_ops: bool = False
    ) -> Iterator[Any]:
        group = group or c10d._get_default_group()
        lists = c10d._world.pg_coalesce_state
        operations: list[Any] = []  # that torch has put in its list
        ours = group not in lists  # else the list is another block's, which goes on
        try:
            with manager(group, device, async_ops) as works:
                ours, operations = True, lists.get(group, [])
                yield works
                kinds = sorted({o.op.__name__ for o in operations})
                if len(kinds) > 1:  # torch finds out when the list is not known any more
                    raise RuntimeError(f"coalesced calls must be alike, not {', '.join(kinds)}")
                operations = []
        except BaseException as error:
            if ours:
                _abandon(group, operations, error)
            raise

    return guarded


def install() -> None:
    """Put the guarded manager where torch has its own; names imported before keep torch's."""
    modules: tuple[Any, ...] = (dist, c10d)
    guarded = _guarded(c10d._coalescing_manager)
    for module in modules:
        module._coalescing_manager = guarded
