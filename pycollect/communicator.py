"""Communicator: the list collectives bound to a list of devices, for many calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import permutations
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from . import _C, collectives, collectives_along_dim
from .collectives import ranks_of
from .devices import DeviceSpec
from .devices import devices as resolve

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _OwnPeerAccess:
    """The default of ``peer_access`` in the signatures of a communicator's methods."""

    def __repr__(self) -> str:
        return "<the communicator's>"


def _describe(method: Any, function: Callable[..., Any], by_position: int) -> None:
    """Give a method the signature of its calls, and the text of its function without the example.

    The first `by_position` arguments after self are taken only by position.
    """
    signature = inspect.signature(function)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for parameter in signature.parameters.values():
        if parameter.name == "peer_access":
            parameters.append(parameter.replace(default=_OwnPeerAccess()))
        elif parameter.name != "devices":
            only = len(parameters) <= by_position
            kind = inspect.Parameter.POSITIONAL_ONLY if only else parameter.kind
            parameters.append(parameter.replace(kind=kind))
    method.__signature__ = signature.replace(parameters=parameters)
    method.__doc__ = (function.__doc__ or "").partition(">>>")[0].rstrip()
    method.__module__, method.__qualname__ = __name__, f"Communicator.{function.__name__}"


def _bound(
    function: Callable[Concatenate[T, P], R],
) -> Callable[Concatenate[Communicator, T, P], R]:
    """Return a method for a module function whose first argument has one item per rank."""

    @functools.wraps(function)
    def method(self: Communicator, ranks: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check(ranks, function.__name__)
        return function(ranks, *args, **self._with_peer_access(kwargs))

    _describe(method, function, by_position=1)
    return method


def _bound_with_devices(
    function: Callable[Concatenate[T, DeviceSpec, P], R],
) -> Callable[Concatenate[Communicator, T, P], R]:
    """Return a method for a module function whose second argument is `devices`."""

    @functools.wraps(function)
    def method(self: Communicator, data: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(data, self.devices, *args, **self._with_peer_access(kwargs))

    _describe(method, function, by_position=1)
    return method


def _bound_with_peer_access(function: Callable[P, R]) -> Callable[Concatenate[Communicator, P], R]:
    """Return a method for a module function without an argument per rank or `devices`."""

    @functools.wraps(function)
    def method(self: Communicator, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **self._with_peer_access(kwargs))

    _describe(method, function, by_position=0)
    return method


class Communicator:
    """Run collectives on a fixed list of devices, one per rank.

    ``devices`` takes the same values as in ``pycollect.devices``. GPUs with working peer access,
    which is tested once for every pair, read and write each other's memory; data between other
    GPUs, or between all GPUs with ``peer_access=False``, goes through pinned host memory. With
    ``peer_access=True``, ValueError names the first pair without peer access. CPU ranks share their
    memory, so ``peer_access`` does not affect them. Methods take the arguments of the module
    functions, without ``devices`` and with the first one by position, except in ``copy_``;
    ``peer_access`` defaults to the communicator's.

    Attributes: ``devices``, a list with the torch.device of each rank; ``world``, its length;
    ``peer_access``, True, False or None (default: where it works).

    Raises ValueError for a device that does not exist or that this build does not support, and
    TypeError for a ``peer_access`` that is neither a bool nor None. Methods raise ValueError for a
    list with other than one item per rank, and for a tensor that is not on its rank's device.

    Shared arguments and errors: `help(pycollect.collectives)`.

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
        if peer_access:
            _require_peer_access(self.devices)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    all_reduce = _bound(collectives.all_reduce)
    all_reduce_coalesced = _bound(collectives.all_reduce_coalesced)
    reduce = _bound(collectives.reduce)
    broadcast = _bound(collectives.broadcast)
    broadcast_coalesced = _bound(collectives.broadcast_coalesced)
    all_gather = _bound(collectives_along_dim.all_gather)
    reduce_scatter = _bound(collectives_along_dim.reduce_scatter)
    all_to_all = _bound(collectives_along_dim.all_to_all)
    gather = _bound(collectives_along_dim.gather)

    scatter = _bound_with_devices(collectives_along_dim.scatter)
    replicate = _bound_with_devices(collectives.replicate)
    copy_ = _bound_with_peer_access(collectives.copy_)

    def barrier(self) -> None:
        """Wait until all earlier collectives have finished, as ``pycollect.barrier`` does.

        Waits for all queued asynchronous collectives of the process that have no CUDA tensors, not
        only this communicator's, and for all work of this communicator's GPUs.

        Shared arguments and errors: `help(pycollect.collectives)`.
        """
        collectives.barrier(self.devices)

    def __repr__(self) -> str:
        names = ", ".join(map(str, self.devices))
        return f"Communicator([{names}], peer_access={self.peer_access})"

    def _with_peer_access(self, kwargs: Any) -> Any:
        """Return a call's keywords, with the communicator's ``peer_access`` as the default."""
        return {"peer_access": self.peer_access is not False, **kwargs}

    def _check(self, ranks: Any, call: str) -> None:
        """Raise ValueError if a list does not fit the devices; the call rejects other types."""
        if not isinstance(ranks, (list, tuple)):
            return
        if len(ranks) != self.world:
            raise ValueError(f"{call}: {len(ranks)} items for the {self.world} ranks of {self!r}")
        for rank, (item, device) in enumerate(zip(ranks, self.devices, strict=True)):
            for t in item if isinstance(item, (list, tuple)) else (item,):
                if isinstance(t, torch.Tensor) and t.device != device:
                    raise ValueError(
                        f"{call}: rank {rank} is on {device}, but its tensor is on {t.device}; "
                        f"move it with .to({str(device)!r})"
                    )


def _require_peer_access(devices: list[torch.device]) -> None:
    """Raise ValueError for the first pair of GPUs without working peer access."""
    gpus = sorted({d.index for d in devices if d.type == "cuda"})
    for one, other in permutations(gpus, 2):
        reported, defect, _ = _C.peer_access(one, other)
        if not reported:
            defect = "the driver reports no peer access"
        if defect:
            raise ValueError(
                f"Communicator: peer_access=True, but cuda:{one} does not reach the memory of "
                f"cuda:{other}: {defect}; omit peer_access to copy through the host there"
            )
