"""A view of `os.environ` for each rank: what a rank sets, only that rank sees.

Code in C, and programs that a rank starts, see the environment of the process. What a rank sets is
there, too, except for torchrun's variables, while ranks run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

_View = dict[str, "str | None"]  # None: the rank has deleted the variable


def torchrun_variables(rank: int, world: int) -> dict[str, str]:
    """Return the variables that torchrun sets for the rank of a job on one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "ROLE_WORLD_SIZE": str(world),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }


_OF_TORCHRUN = frozenset(torchrun_variables(0, 1))


class RankEnviron(type(os.environ)):  # type: ignore[misc]
    """`os.environ` with the calling rank's view over it, while the class attributes are set."""

    rank_of_thread: ClassVar[Callable[[], int]]
    views: ClassVar[list[_View]]

    def _view(self) -> _View | None:
        rank = RankEnviron.rank_of_thread()
        return None if rank < 0 else self.views[rank]

    def __getitem__(self, key: str) -> Any:
        mine = self._view()
        if mine is None or key not in mine:
            return super().__getitem__(key)
        found = mine[key]
        if found is None:
            raise KeyError(key)
        return found

    def __setitem__(self, key: str, value: str) -> None:
        mine = self._view()
        if mine is None:
            super().__setitem__(key, value)
            return
        self.encodekey(key), self.encodevalue(value)  # raise for another type
        mine[key] = value
        if key not in _OF_TORCHRUN:
            os.putenv(key, value)

    def __delitem__(self, key: str) -> None:
        mine = self._view()
        if mine is None:
            super().__delitem__(key)
            return
        self[key]
        mine[key] = None
        if key not in _OF_TORCHRUN:
            os.unsetenv(key)

    def __iter__(self) -> Iterator[str]:
        mine = self._view()
        if mine is None:
            yield from super().__iter__()
            return
        yield from (k for k in super().__iter__() if k not in mine)
        yield from (k for k, value in list(mine.items()) if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@contextmanager
def environ_of_ranks(rank_of_thread: Callable[[], int], world: int) -> Iterator[None]:
    """Give every rank a view of `os.environ`, with torchrun's variables."""
    RankEnviron.rank_of_thread = staticmethod(rank_of_thread)
    RankEnviron.views = [{**torchrun_variables(rank, world)} for rank in range(world)]
    environ: Any = os.environ
    plain = type(environ)
    environ.__class__ = RankEnviron
    try:
        yield
    finally:
        environ.__class__ = plain
        for key in {key for view in RankEnviron.views for key in view} - _OF_TORCHRUN:
            if key in environ:
                os.putenv(key, environ[key])
            else:
                os.unsetenv(key)
