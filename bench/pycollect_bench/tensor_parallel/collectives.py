"""The collectives of a divided model in one group, and the times at which they begin and end.

The clock is CLOCK_MONOTONIC, which all processes of a host share. So the time in a collective is
divided at the moment when the last rank has called it: before it a rank waits for another one's
computing, after it data move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import monotonic_ns
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from ..processes.cases import all_gather

# Begin and end of each stay of a rank in one collective, in nanoseconds: of the call, and of the
# wait for its result if it is asynchronous.
Stays = list[int]
# DTensor's collectives, as far as torch has them: they start a call, whose result is awaited later.
_STARTS = ("all_reduce", "all_gather_single", "all_gather_tensor")


class Stamps:
    """The stays of this rank in collectives, in the order of the calls."""

    def __init__(self) -> None:
        self._calls: list[Stays] = []
        self._under_way = 0  # DTensor's calls whose result has not been awaited

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes the same call, and records its begin and its end."""

        def run(*args: Any, **kwargs: Any) -> Any:
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

    def _checked(self, call: Callable[..., Any], backend: str) -> Callable[..., Any]:
        """Return the timed call, which refuses the groups of other backends.

        Torch's functions have the group, or mesh and dimension, as their third parameter.
        """
        timed = self.timed(call)

        def run(*args: Any, **kwargs: Any) -> Any:
            group: Any = kwargs["group"] if "group" in kwargs else args[2]
            if isinstance(group, tuple):
                mesh, dim = group
                group = mesh.get_group(dim)
            if dist.get_backend(group) != backend:
                raise RuntimeError(f"a collective of {backend} is one of {dist.get_backend(group)}")
            return timed(*args, **kwargs)

        return run

    def _started(self, start: Callable[..., Any], backend: str) -> Callable[..., Any]:
        checked = self._checked(start, backend)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._under_way += 1
            return checked(*args, **kwargs)

        return run

    @contextmanager
    def of_libraries(self, backend: str) -> Iterator[None]:
        """Record the collectives that DTensor and transformers call in this context as well.

        Raises:
            RuntimeError: if they use another backend, or if this torch awaits them in another way,
                so that times are missing.
        """
        self._under_way = 0
        with ExitStack() as patches:
            checked = self._checked(dist.all_reduce, backend)
            patches.enter_context(mock.patch.object(dist, "all_reduce", checked))
            for name in filter(partial(hasattr, funcol), _STARTS):
                start = self._started(getattr(funcol, name), backend)
                patches.enter_context(mock.patch.object(funcol, name, start))
            wait = self._awaited(funcol.wait_tensor)
            patches.enter_context(mock.patch.object(funcol, "wait_tensor", wait))
            yield
        if self._under_way:
            raise RuntimeError(
                f"{self._under_way} results of DTensor's collectives were not awaited"
            )

    def taken(self) -> list[Stays]:
        """Return the calls since the last use."""
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


class Collectives:
    """The calls of an undivided model, or of one whose layers make them themselves: none."""

    rank, world = 0, 1

    def summed(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Return `linear(x)`, summed over the ranks."""
        result: Tensor = linear(x)
        return result

    def gathered(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors, concatenated along the last dimension."""
        return x

    def concatenated(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors, concatenated along the first dimension."""
        return x

    def exchange(
        self,
        output: Tensor,
        given: Tensor,
        receives: list[int] | None = None,
        sends: list[int] | None = None,
    ) -> None:
        """Send parts of `given` to the ranks, and receive `output` from them."""
        output.copy_(given)


class OfExperts(Collectives):
    """The calls of experts alone; the other layers make theirs themselves."""

    def __init__(self, group: Any, stamps: Stamps) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._gather = stamps.timed(partial(all_gather, group=group))
        self._exchange = stamps.timed(partial(dist.all_to_all_single, group=group))

    def concatenated(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.world * x.shape[0], *x.shape[1:])
        self._gather(found, x)
        return found

    def exchange(
        self,
        output: Tensor,
        given: Tensor,
        receives: list[int] | None = None,
        sends: list[int] | None = None,
    ) -> None:
        self._exchange(output, given, receives, sends)


class Plain(OfExperts):
    """All calls of a model without DTensor: `all_reduce` sums a tensor in place."""

    def __init__(self, group: Any, stamps: Stamps, all_reduce: Callable[[Tensor], object]) -> None:
        super().__init__(group, stamps)
        self.all_reduce = stamps.timed(all_reduce)

    def summed(self, linear: nn.Linear, x: Tensor) -> Tensor:
        result: Tensor = linear(x)
        self.all_reduce(result)
        return result

    def gathered(self, x: Tensor) -> Tensor:
        parts = self.concatenated(x.unsqueeze(0))
        return torch.cat(tuple(parts), -1)


class ZeroCopy(Plain):
    """The same with sums in symmetric memory, of which each shape has one tensor."""

    def __init__(
        self,
        group: Any,
        stamps: Stamps,
        all_reduce: Callable[[Tensor], object],
        empty: Callable[..., Tensor],
    ) -> None:
        super().__init__(group, stamps, all_reduce)
        self._empty = empty
        self._sums: dict[torch.Size, Tensor] = {}

    def summed(self, linear: nn.Linear, x: Tensor) -> Tensor:
        shape = torch.Size((*x.shape[:-1], linear.out_features))
        if shape not in self._sums:
            self._sums[shape] = self._empty(shape, dtype=x.dtype)
        found = self._sums[shape]
        torch.mm(x.flatten(0, -2), linear.weight.t(), out=found.view(-1, shape[-1]))
        self.all_reduce(found)
        return found
