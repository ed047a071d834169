"""The list collectives in a graph of torch.compile or torch.export: each is one operator.

The functions take the arguments of those of `_C`, which the public functions call otherwise. A call
that a graph cannot have runs outside of it, or raises its error there, after a break of the graph:
one that returns a Work, names streams or has peer_access=False, and one with arguments other than
tensors that autograd does not record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _C
from ._skip_compile import skip_compile
from .interop import op_name

_operators = torch.ops.pycollect
Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
Tensors = Sequence[Tensor]
Algorithm = str | None


@skip_compile(
    "async_op=True, streams, peer_access=False, tensors that require grad, arguments that are not "
    "tensors, and invalid arguments break the graph: pycollect has no operator for them"
)
def _outside(function: Function, arguments: tuple[Any, ...]) -> Any:
    """Call a function of `_C` outside of a graph."""
    if is_compiling():
        raise RuntimeError(
            f"{function.__name__}: an exported program has no async_op=True, streams or "
            "peer_access=False, and only tensors that do not require grad"
        )
    return function(*arguments)


def _are_plain(value: Any) -> bool:
    """Return whether a value is a tensor that autograd does not record, or a list of such."""
    if isinstance(value, Tensor):
        return not (value.requires_grad and torch.is_grad_enabled())
    if not isinstance(value, (list, tuple)) or len(value) == 0:
        return False
    return all(_are_plain(item) for item in value)


def _in_graph(
    function: F, fits: Function = lambda *_: True, **eager_only: Any
) -> Callable[[Function], F]:
    """Return a decorator: the call of an operator in a graph, of the function of `_C` elsewhere.

    `eager_only` are the last parameters of the function, which the decorated function lacks, with
    the values that they have in a graph. A parameter `out` comes before them. `fits` tells of the
    other arguments whether the operator has a result for them, whose shape tracers want to know.
    """
    values = tuple(eager_only.values())

    def decorate(operator: Function) -> F:
        has_out = "out" in signature(operator).parameters

        def call(*arguments: Any) -> Any:
            mine, rest = arguments[: -len(values)], arguments[-len(values) :]
            out = mine[-1] if has_out else None
            plain = rest == values and _are_plain(mine[0]) and (out is None or _are_plain(out))
            return operator(*mine) if plain and fits(*mine) else _outside(function, arguments)

        return cast(F, call)

    return decorate


def name_of(op: Any, call: str) -> str:
    """Return the name of an op, which is a name or one of torch.distributed."""
    return op if isinstance(op, str) else op_name(op, call)


def names_of(devices: Sequence[torch.device]) -> list[str]:
    """Return the names of devices: an operator takes names, because programs are saved with them.

    >>> names_of([torch.device("cpu"), torch.device("cuda", 1)])
    ['cpu', 'cuda:1']
    """
    return [str(device) for device in devices]


def flat(lists: Any) -> Any:
    """Return the items of all inner lists in one list; anything else is returned itself."""
    if isinstance(lists, (list, tuple)) and len(lists) > 0 and isinstance(lists[0], (list, tuple)):
        return [item for one in lists for item in one]
    return lists


def _is_grid(lists: Sequence[Any], *_: Any) -> bool:
    """Return whether all items are lists of the same length."""
    rows = [row for row in lists if isinstance(row, (list, tuple))]
    return len(rows) == len(lists) and all(len(row) == len(rows[0]) for row in rows)


def joins(tensors: Tensors, dim: Any, *_: Any) -> bool:
    """Return whether the tensors can be joined along `dim`."""
    first = tensors[0]
    if not isinstance(dim, int) or not -first.dim() <= dim < first.dim():
        return False
    if any(t.dim() != first.dim() or t.dtype != first.dtype for t in tensors):
        return False
    others = [d for d in range(first.dim()) if d != dim % first.dim()]
    return all(t.shape[d] == first.shape[d] for t in tensors for d in others)


def reduces(tensors: Tensors, _op: Any, dim: Any, *_: Any) -> bool:
    return joins(tensors, dim) and all(t.shape == tensors[0].shape for t in tensors)


def splits(tensors: Tensors, dim: Any, sizes: Any, *_: Any) -> bool:
    if not joins(tensors, dim):
        return False
    if sizes is None:
        return True
    rows = sizes if flat(sizes) is not sizes else [sizes] * len(tensors)
    return len(rows) == len(tensors) and all(
        _adds_up(row, t.shape[dim], len(tensors)) for row, t in zip(rows, tensors, strict=True)
    )


def cuts(tensor: Tensor, devices: list[torch.device], sizes: Any, dim: Any, *_: Any) -> bool:
    return joins([tensor], dim) and (
        sizes is None or _adds_up(sizes, tensor.shape[dim], len(devices))
    )


def _adds_up(sizes: Any, length: int, count: int) -> bool:
    if not isinstance(sizes, (list, tuple)) or len(sizes) != count:
        return False
    return (
        all(isinstance(s, (int, torch.SymInt)) and s >= 0 for s in sizes) and sum(sizes) == length
    )


def _new_or_out(operator: Any, out: Any, *arguments: Any, **options: Any) -> Any:
    """Return the operator's new results, or `out` with the results."""
    if out is None:
        return operator.default(*arguments, **options)
    operator.out(*arguments, **options, out=out)
    return out if isinstance(out, Tensor) else list(out)


_HERE: dict[str, Any] = {"streams": None, "peer_access": True}
_ANY: dict[str, Any] = {"async_op": False, **_HERE}


@_in_graph(_C.all_reduce, **_ANY)
def all_reduce(tensors: Tensors, op: Any, algorithm: Algorithm) -> None:
    _operators.all_reduce_(tensors, name_of(op, "all_reduce"), algorithm=algorithm)


@_in_graph(_C.all_reduce_coalesced, _is_grid, **_ANY)
def all_reduce_coalesced(lists: Sequence[Tensors], op: Any, algorithm: Algorithm) -> None:
    name = name_of(op, "all_reduce_coalesced")
    _operators.all_reduce_coalesced_(flat(lists), len(lists), name, algorithm=algorithm)


@_in_graph(_C.reduce, **_ANY)
def reduce(tensors: Tensors, dst: int, op: Any, algorithm: Algorithm) -> None:
    _operators.reduce_(tensors, dst, name_of(op, "reduce"), algorithm=algorithm)


@_in_graph(_C.broadcast, **_ANY)
def broadcast(tensors: Tensors, src: int, algorithm: Algorithm) -> None:
    _operators.broadcast_(tensors, src, algorithm=algorithm)


@_in_graph(_C.broadcast_coalesced, _is_grid, **_ANY)
def broadcast_coalesced(lists: Sequence[Tensors], src: int) -> None:
    _operators.broadcast_coalesced_(flat(lists), len(lists), src)


@_in_graph(_C.replicate, peer_access=True)
def replicate(tensors: Tensors, devices: list[torch.device]) -> list[Tensor]:
    return list(_operators.replicate(tensors, names_of(devices)))


@_in_graph(_C.copy_, lambda _dst, src: _are_plain(src), async_op=False, peer_access=True)
def copy_(dst: Tensor, src: Tensor) -> None:
    _operators.copy_(dst, src)


@_in_graph(_C.all_gather, joins, **_ANY)
def all_gather(tensors: Tensors, dim: int, algorithm: Algorithm, out: Any) -> Any:
    return _new_or_out(_operators.all_gather, out, tensors, dim, algorithm=algorithm)


@_in_graph(_C.reduce_scatter, reduces, **_ANY)
def reduce_scatter(tensors: Tensors, op: Any, dim: int, algorithm: Algorithm, out: Any) -> Any:
    name = name_of(op, "reduce_scatter")
    return _new_or_out(_operators.reduce_scatter, out, tensors, name, dim, algorithm=algorithm)


@_in_graph(_C.all_to_all, splits, **_ANY)
def all_to_all(tensors: Tensors, dim: int, split_sizes: Any, out: Any) -> Any:
    return _new_or_out(_operators.all_to_all, out, tensors, dim, flat(split_sizes))


@_in_graph(_C.scatter, cuts, **_ANY)
def scatter(
    tensor: Tensor, devices: list[torch.device], chunk_sizes: Any, dim: int, out: Any
) -> Any:
    return _new_or_out(_operators.scatter, out, tensor, names_of(devices), chunk_sizes, dim)


@_in_graph(_C.gather, lambda tensors, _device, dim, _out: joins(tensors, dim), **_HERE)
def gather(tensors: Tensors, device: list[torch.device], dim: int, out: Any) -> Any:
    return _new_or_out(_operators.gather, out, tensors, device[0] if device else None, dim)
