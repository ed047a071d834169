"""The times at which a rank's collectives begin and end.

The clock is CLOCK_MONOTONIC, which all processes of a host share. So the time in a collective is
divided at the moment when the last rank has called it: before it a rank waits for another one's
computing, after it data move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from time import monotonic_ns
from typing import Any

# Without their types, because their functions are replaced.
dist: Any = import_module("torch.distributed")
funcol: Any = import_module("torch.distributed._functional_collectives")

# Begin and end of each stay of a rank in one collective, in nanoseconds: of the call, and of the
# wait for its result if it is asynchronous.
Stays = list[int]
# Of two names of a gather, the newer one: if torch has it, its older name warns at every call.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
# DTensor's collectives, as far as torch has them: they start a call, whose result is awaited later.
_STARTS = ("all_reduce", "all_gather_single", "all_gather_tensor")


class Stamps:
    """The stays of this rank in torch's collectives from now on, whoever calls them, in order."""

    def __init__(self) -> None:
        self.start("")
        for name in ("all_reduce", "all_to_all_single", GATHER):
            setattr(dist, name, self.timed(getattr(dist, name)))
        for name in filter(partial(hasattr, funcol), _STARTS):
            setattr(funcol, name, self.timed(getattr(funcol, name), awaited=1))
        funcol.wait_tensor = self._awaited(funcol.wait_tensor)

    def start(self, backend: str) -> None:
        """Forget all calls; refuse from now on those of other backends, unless it is empty."""
        self._backend = backend
        self._calls: list[Stays] = []
        self._under_way = 0  # DTensor's calls whose result has not been awaited

    def timed(self, call: Callable[..., Any], awaited: int = 0) -> Callable[..., Any]:
        """Return a function that makes the same call, and records its begin and its end.

        The group, or mesh and dimension, is the call's third argument, or has its name.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            group: Any = kwargs.get("group", args[2] if len(args) > 2 else None)
            if isinstance(group, tuple):
                mesh, dim = group
                group = mesh.get_group(dim)
            if self._backend and (found := dist.get_backend(group)) != self._backend:
                raise RuntimeError(f"a collective of {self._backend} is one of {found}")
            self._under_way += awaited
            stays = [monotonic_ns()]
            self._calls.append(stays)
            result = call(*args, **kwargs)
            stays.append(monotonic_ns())
            return result

        return run

    def _awaited(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits likewise, and adds this stay to the last call.

        A call that waits itself, as a gather along the last dimension, has this time already.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            begin, stays = monotonic_ns(), self._calls[-1]
            result = wait(*args, **kwargs)
            if len(stays) % 2 == 0:
                stays += [begin, monotonic_ns()]
            self._under_way -= 1
            return result

        return run

    def taken(self) -> list[Stays]:
        """Return the calls since the last use.

        Raises:
            RuntimeError: if this torch awaits them in another way, so that times are missing.
        """
        if self._under_way:
            raise RuntimeError(f"{self._under_way} of DTensor's collectives were not awaited")
        calls, self._calls = self._calls, []
        return calls


def divided(of_ranks: Sequence[Sequence[Stays]]) -> tuple[float, float]:
    """Return the seconds of waiting and of moving in the same calls, in the mean of all ranks.

    >>> divided([[[0, 4_000, 9_000, 10_000]], [[3_000, 6_000, 8_000, 10_000]]])
    (1.5e-06, 3.5e-06)
    """
    waiting = moving = 0
    for call in zip(*of_ranks, strict=True):
        complete = max(stays[0] for stays in call)
        for stays in call:
            for begin, end in zip(stays[::2], stays[1::2], strict=True):
                waiting += max(0, min(end, complete) - begin)
                moving += max(0, end - max(begin, complete))
    return waiting / len(of_ranks) / 1e9, moving / len(of_ranks) / 1e9
