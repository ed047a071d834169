"""The functions of pycollect.autograd in a graph of torch.compile, and the operators' gradients.

In a graph, each function is the operator of its name in torch.ops.pycollect. Where autograd records
an operator, it does so as the function outside of a graph, so there is one definition of gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .._in_graph import cuts, flat, joins, name_of, names_of, reduces, splits
from .._skip_compile import skip_compile
from ..collectives import Op, ranks_of
from ..devices import DeviceSpec

P = ParamSpec("P")
R = TypeVar("R")
Tensors = Sequence[Tensor]
Recorded = Callable[..., Any]

_operators = torch.ops.pycollect
LINEAR = ("sum", "avg")
ALL = (*LINEAR, "max", "min", "prod")
_unpack: Any = forward_ad.unpack_dual
_LIBRARY: Any = torch.library.Library("pycollect", "IMPL")  # type: ignore[no-untyped-call]


def operator_in_graph(
    call: Callable[P, Any], adapted: Callable[[Recorded], Recorded] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function of pycollect.autograd, which `call` replaces in graphs.

    `call` returns NotImplemented for invalid arguments, of which the function raises the error.
    Autograd records calls of the operator with the function's name as it records the function.
    `adapted` is given if their arguments or results differ: it returns a function with those of the
    operator.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        _record(function.__name__, adapted(function) if adapted else function)

        @functools.wraps(function)
        def either(*args: P.args, **kwargs: P.kwargs) -> R:
            if not is_compiling():
                return function(*args, **kwargs)
            result: R = call(*args, **kwargs)
            return _refused(function, args, kwargs) if result is NotImplemented else result

        return either

    return decorate


@skip_compile("the arguments of this call of pycollect.autograd are invalid")
def _refused(function: Callable[..., R], args: Any, kwargs: Any) -> R:
    """Call a function outside of a graph, where it raises its error."""
    return function(*args, **kwargs)


def _record(name: str, function: Recorded) -> None:
    operator = getattr(_operators, name).default
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(keys: Any, *args: Any, **options: Any) -> Any:
        if _is_recorded(args[0]):
            named = dict(zip(names[1:], args[1:], strict=False))  # without those with defaults
            return function(args[0], **named, **options)
        with torch._C._AutoDispatchBelowAutograd():
            below = keys & torch._C._after_autograd_keyset
            return operator.redispatch(below, *args, **options)

    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def _is_recorded(first: Any) -> bool:
    """Return whether a tensor requires grad, or has a tangent of forward-mode differentiation.

    `first` is the first argument of an operator, which has all its tensors.
    """
    tensors = [first] if isinstance(first, Tensor) else first
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return forward_ad._current_level >= 0 and any(_unpack(t).tangent is not None for t in tensors)


def _are_tensors(tensors: Any) -> bool:
    if not isinstance(tensors, (list, tuple)) or not tensors:
        return False
    return all(isinstance(t, Tensor) for t in tensors)


def _has_rank(tensors: Tensors, rank: Any) -> bool:
    return isinstance(rank, int) and 0 <= rank < len(tensors)


def all_reduce(tensors: Tensors, op: Op = "sum", *, algorithm: str | None = None) -> Any:
    """Call the operator all_reduce."""
    name = name_of(op, "all_reduce")
    if not (_are_tensors(tensors) and name in ALL):
        return NotImplemented
    return _operators.all_reduce(tensors, name, algorithm=algorithm)


def reduce(tensors: Tensors, dst: int = 0, op: Op = "sum", *, algorithm: str | None = None) -> Any:
    """Call the operator reduce."""
    name = name_of(op, "reduce")
    if not (_are_tensors(tensors) and _has_rank(tensors, dst) and name in LINEAR):
        return NotImplemented
    return _operators.reduce(tensors, dst, name, algorithm=algorithm)


def broadcast(tensors: Tensors, src: int = 0, *, algorithm: str | None = None) -> Any:
    """Call the operator broadcast."""
    if not (_are_tensors(tensors) and _has_rank(tensors, src)):
        return NotImplemented
    return _operators.broadcast(tensors, src, algorithm=algorithm)


def all_gather(tensors: Tensors, *, dim: int = 0, algorithm: str | None = None) -> Any:
    """Call the operator all_gather."""
    if not (_are_tensors(tensors) and joins(tensors, dim)):
        return NotImplemented
    return _operators.all_gather(tensors, dim, algorithm=algorithm)


def reduce_scatter(
    tensors: Tensors, op: Op = "sum", *, dim: int = 0, algorithm: str | None = None
) -> Any:
    """Call the operator reduce_scatter."""
    name = name_of(op, "reduce_scatter")
    valid = _are_tensors(tensors) and reduces(tensors, name, dim) and name in LINEAR
    if not valid:
        return NotImplemented
    return _operators.reduce_scatter(tensors, name, dim, algorithm=algorithm)


def all_to_all(
    tensors: Tensors,
    *,
    dim: int = 0,
    split_sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Any:
    """Call the operator all_to_all."""
    if not (_are_tensors(tensors) and splits(tensors, dim, split_sizes)):
        return NotImplemented
    return _operators.all_to_all(tensors, dim, flat(split_sizes))


def with_rows(function: Recorded) -> Recorded:
    """Return all_to_all with the operator's split sizes, which have no inner lists."""

    def all_to_all(tensors: Tensors, dim: int = 0, split_sizes: Any = None) -> Any:
        rows = split_sizes
        if rows is not None and len(rows) > len(tensors):
            rows = [rows[at : at + len(tensors)] for at in range(0, len(rows), len(tensors))]
        return function(tensors, dim=dim, split_sizes=rows)

    return all_to_all


def scatter(
    tensor: Tensor, devices: DeviceSpec, *, chunk_sizes: Sequence[int] | None = None, dim: int = 0
) -> Any:
    """Call the operator scatter."""
    ranks = ranks_of(devices, "scatter")
    if not (_are_tensors([tensor]) and cuts(tensor, ranks, chunk_sizes, dim)):
        return NotImplemented
    return _operators.scatter(tensor, names_of(ranks), chunk_sizes, dim)


def gather(tensors: Tensors, device: torch.device | str | None = None, *, dim: int = 0) -> Any:
    """Call the operator gather."""
    targets = [None] if device is None else ranks_of(device, "gather")
    valid = _are_tensors(tensors) and joins(tensors, dim) and len(targets) == 1
    if not valid:
        return NotImplemented
    return _operators.gather(tensors, targets[0], dim)


def copy(tensor: Tensor, device: torch.device | str) -> Any:
    """Call the operator copy."""
    targets = ranks_of(device, "copy")
    if not (_are_tensors([tensor]) and len(targets) == 1):
        return NotImplemented
    return _operators.copy(tensor, targets[0])


def replicate(tensors: Tensors, devices: DeviceSpec) -> Any:
    """Call the operator replicate."""
    ranks = ranks_of(devices, "replicate")
    if isinstance(tensors, (list, tuple)) and not tensors:
        return [[] for _ in ranks]
    if not _are_tensors(tensors):
        return NotImplemented
    copies = _operators.replicate(tensors, names_of(ranks))
    return [copies[rank :: len(ranks)] for rank in range(len(ranks))]


def by_tensor(function: Recorded) -> Recorded:
    """Return replicate with the result of the operator, all copies of one tensor after another."""

    def replicate(tensors: Tensors, devices: DeviceSpec) -> list[Tensor]:
        return [copy for copies in zip(*function(tensors, devices), strict=True) for copy in copies]

    return replicate
