"""The same collectives bound to a list of devices, for many calls on the same ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from . import _C, collectives, exchange
from ._eager import eager
from .collectives import ranks_of
from .devices import DeviceSpec
from .devices import devices as resolve

if TYPE_CHECKING:
    from .tuning import Tuning

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _bound(
    function: Callable[Concatenate[T, P], R],
) -> Callable[Concatenate[Communicator, T, P], R]:
    """Make a method of a module function whose first argument is a list with an item per rank."""

    name = function.__name__
    tunable = "algorithm" in inspect.signature(function).parameters

    @functools.wraps(function)
    def method(self: Communicator, ranks: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check(ranks, name)
        if tunable and self.tuning is not None and kwargs.get("algorithm") is None:
            kwargs["algorithm"] = self.tuning.choice(name, cast(Any, ranks))
        return function(ranks, *args, **self._routed(kwargs))

    return eager(method)


def _placed(
    function: Callable[Concatenate[T, DeviceSpec, P], R],
) -> Callable[Concatenate[Communicator, T, P], R]:
    """Make a method of a module function whose second argument is the devices."""

    @functools.wraps(function)
    def method(self: Communicator, what: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(what, self.devices, *args, **self._routed(kwargs))

    return eager(method)


def _staged(function: Callable[P, R]) -> Callable[Concatenate[Communicator, P], R]:
    """Make a method of a module function that knows the ranks by its tensors alone."""

    @functools.wraps(function)
    def method(self: Communicator, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **self._routed(kwargs))

    return eager(method)


class Communicator:
    """All collectives over a fixed list of devices, one per rank.

    ``devices`` is what ``pycollect.devices`` takes. GPUs that reach each other's memory, which is
    tried once for every pair, read and write it; others, and all with ``peer_access=False``, go
    through pinned host memory. ``peer_access=True`` insists: ValueError names the first pair that
    does not reach each other. Ranks on the CPU share one memory and have no use for it. Methods
    take what the module functions take, but for the devices.

    >>> two = Communicator("cpu*2")
    >>> two.all_gather([torch.ones(1), torch.zeros(1)])[0]
    tensor([1., 0.])
    """

    def __init__(self, devices: DeviceSpec, *, peer_access: bool | None = None) -> None:
        if peer_access is not None and not isinstance(peer_access, bool):
            kind = type(peer_access).__name__
            raise TypeError(f"Communicator: peer_access is a {kind}; pass True, False or None")
        self.devices = ranks_of(resolve(devices), "Communicator")
        self.peer_access = peer_access
        self.tuning: Tuning | None = None
        if peer_access:
            _insist(self.devices)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    all_reduce = _bound(collectives.all_reduce)
    all_reduce_coalesced = _bound(collectives.all_reduce_coalesced)
    reduce = _bound(collectives.reduce)
    broadcast = _bound(collectives.broadcast)
    broadcast_coalesced = _bound(collectives.broadcast_coalesced)
    all_gather = _bound(exchange.all_gather)
    reduce_scatter = _bound(exchange.reduce_scatter)
    all_to_all = _bound(exchange.all_to_all)
    gather = _bound(exchange.gather)

    scatter = _placed(exchange.scatter)
    replicate = _placed(collectives.replicate)
    copy_ = _staged(collectives.copy_)

    def barrier(self) -> None:
        """As ``pycollect.barrier``, over this communicator's devices."""
        collectives.barrier(self.devices)

    def tune(
        self,
        collectives: Sequence[str] | None = None,
        *,
        sizes: Sequence[int] | None = None,
        seconds: float = 0.1,
    ) -> Tuning:
        """Measure the algorithms on these devices, and take the fastest from now on.

        For each of ``collectives`` (default: all with a choice: all_reduce, reduce, broadcast,
        all_gather) and each of ``sizes`` in bytes of a rank (default: 4 KiB to 16 MiB), all
        algorithms take turns for about ``seconds``. Methods of this communicator that are not told
        an ``algorithm`` then take the fastest of those that keep the numerical contract for their
        dtype, so the bits do not change. What was measured is returned and kept in ``tuning``,
        which may be given to another communicator, or set to None. Not during a capture of a CUDA
        graph. Raises ValueError for a collective without a choice.

        >>> two = Communicator("cpu*2")
        >>> list(two.tune(["broadcast"], sizes=[4096], seconds=0.01).spans)
        ['broadcast']
        """
        from . import tuning  # which loads the benchmark

        found = tuning.measure(
            self.devices, collectives, sizes, seconds, peer_access=self.peer_access is not False
        )
        self.tuning = found.merged(self.tuning)
        return self.tuning

    def __repr__(self) -> str:
        names = ", ".join(map(str, self.devices))
        return f"Communicator([{names}], peer_access={self.peer_access})"

    def _routed(self, kwargs: Any) -> Any:
        """Return a call's keywords with the communicator's ``peer_access``, if it has none."""
        return {"peer_access": self.peer_access is not False, **kwargs}

    def _check(self, ranks: Any, call: str) -> None:
        """Refuse a list that does not fit; what is no list at all is refused further down."""
        if not isinstance(ranks, (list, tuple)):
            return
        if len(ranks) != self.world:
            raise ValueError(f"{call}: {len(ranks)} tensors for the {self.world} ranks of {self!r}")
        for rank, (item, device) in enumerate(zip(ranks, self.devices, strict=True)):
            for t in item if isinstance(item, (list, tuple)) else (item,):
                if isinstance(t, torch.Tensor) and t.device != device:
                    raise ValueError(
                        f"{call}: rank {rank} is {device} and its tensor on {t.device}"
                    )


def _insist(devices: list[torch.device]) -> None:
    """Refuse GPUs of which one does not reach another's memory."""
    gpus = sorted({d.index for d in devices if d.type == "cuda"})
    for one, other in permutations(gpus, 2):
        asked, defect, _ = _C.peer_access(one, other)
        if not asked:
            defect = "the driver reports no peer access"
        if defect:
            raise ValueError(
                f"Communicator: peer_access=True, but cuda:{one} does not reach the memory of "
                f"cuda:{other}: {defect}; leave peer_access out to go through the host there"
            )
