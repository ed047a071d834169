"""The clean-up that torch's `_coalescing_manager` lacks when its body raises.

torch drops what a body has asked for only where the body ends well: after an exception, every later
`all_reduce` of the group is put in the list that was left, and returns unreduced. Here the list of
a group of this backend is dropped, and ranks that wait for what was in it are told why it does not
come. Groups of other backends are left as they are.
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


def _abandon(group: Any, operations: list[Any], error: BaseException) -> None:
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    devices = getattr(group, "_device_types", ())  # a rank outside of the group has none
    backends = {id(b): b for b in (group._get_backend(torch.device(d)) for d in devices)}
    for backend in backends.values():
        asked = any(group._get_backend(o.tensor.device) is backend for o in operations)
        if _C.abandon_coalescing(backend, why, asked):
            c10d._world.pg_coalesce_state.pop(group, None)


def _guarded(manager: Any) -> Any:
    @functools.wraps(manager)
    @contextlib.contextmanager
    def guarded(
        group: Any = None, device: torch.device | None = None, async_ops: bool = False
    ) -> Iterator[Any]:
        group = group or c10d._get_default_group()
        operations = None  # that torch has put in its list; none: it has not begun one
        try:
            with manager(group, device, async_ops) as works:
                operations = c10d._world.pg_coalesce_state.get(group, [])
                yield works
                operations = []  # torch takes them out of it
        except BaseException as error:
            if operations is not None:
                _abandon(group, operations, error)
            raise

    return guarded


def install() -> None:
    """Put the guarded manager where torch has its own; names imported before keep torch's."""
    modules: tuple[Any, ...] = (dist, c10d)
    guarded = _guarded(c10d._coalescing_manager)
    for module in modules:
        module._coalescing_manager = guarded
