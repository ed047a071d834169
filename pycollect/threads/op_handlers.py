"""Gives each rank its own table of DTensor's operators that have a handler in Python.

`loss_parallel` puts handlers there when it is entered, and removes them when it is left. The table
of the process is for threads of no rank, and for modules, which all ranks share: what a module adds
while it is imported, all ranks have.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from .torch_internals import is_importing, lacks

_MODULE = "torch.distributed.tensor._api"  # it makes the dispatcher
_NAME = "_custom_op_handlers"


class _Handlers(dict[Any, Any]):
    """The handlers of a rank. torch reads them in C++, which needs a dictionary."""

    copied = 0  # so many of the process's are among them


def _table_of_ranks(find_rank: Callable[[], int], world: int) -> property:
    of_ranks = [_Handlers() for _ in range(world)]

    def get(dispatcher: Any) -> Any:
        of_process = vars(dispatcher)[_NAME]
        rank = find_rank()
        if rank < 0 or is_importing(sys._getframe(1)):
            return of_process
        mine = of_ranks[rank]
        if mine.copied != len(of_process):
            mine.copied = len(of_process)
            mine.update({**of_process, **mine})
        return mine

    def assign(dispatcher: Any, value: dict[Any, Any]) -> None:
        rank = find_rank()
        if rank < 0 or is_importing(sys._getframe(1)):
            vars(dispatcher)[_NAME] = value
            return
        # A copy, because `context_parallel` assigns the process's table.
        of_ranks[rank] = mine = _Handlers(value)
        mine.copied = len(vars(dispatcher)[_NAME])

    return property(get, assign)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when that has been imported."""

    def __init__(self, module: str, then: Callable[[Any], None]) -> None:
        self._module = module
        self._then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        loader: Any = spec.loader

        def execute(module: Any) -> None:
            del loader.exec_module
            loader.exec_module(module)
            self._then(module)

        loader.exec_module = execute
        return spec


@contextmanager
def op_handlers_of_ranks(find_rank: Callable[[], int], world: int) -> Iterator[None]:
    """Give every rank a table of handlers, if DTensor is imported, or when a rank imports it.

    `find_rank()` returns the calling thread's rank or -1. Raises RuntimeError if torch has no such
    table.
    """
    with ExitStack() as stack:

        def replace(module: Any) -> None:
            dispatcher = module.DTensor._op_dispatcher
            if _NAME not in vars(dispatcher):
                raise RuntimeError(lacks(f"{_MODULE}.DTensor._op_dispatcher.{_NAME}"))
            # The attribute of the object, which has the process's table, comes after a property.
            setattr(type(dispatcher), _NAME, _table_of_ranks(find_rank, world))
            stack.callback(delattr, type(dispatcher), _NAME)

        if _MODULE in sys.modules:
            replace(sys.modules[_MODULE])
        else:
            finder = _AfterImport(_MODULE, replace)
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        yield
