"""The functions of pycollect.autograd: each checks its arguments and applies an autograd node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .. import _C
from .._in_graph import name_of
from ..collectives import Op, Order, check_order, ranks_of
from ..devices import DeviceSpec
from ..errors import shown
from .in_graph import ALL, LINEAR, operator_in_graph
from .linear import AllReduce, Broadcast, Copy, Devices, Reduce, Replicate, TreeSum
from .linear_along_dim import AllGather, AllToAll, Gather, Lengths, ReduceScatter, Scatter, even
from .node import apply
from .nonlinear import Extreme, Product


@operator_in_graph(ALL)
def all_reduce(
    tensors: Sequence[Tensor],
    op: Op = "sum",
    *,
    algorithm: str | None = None,
    order: Order = "rank",
) -> list[Tensor]:
    """Return the reduction over all ranks, one copy per rank; backward: all_reduce.

    ``max`` and ``min`` divide their gradient equally among the ranks that have this value; ``prod``
    needs one more reduction per rank in the backward pass.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> [y] = all_reduce([torch.ones(2)], "avg"); y
    tensor([1., 1.])
    """
    devices = _devices(tensors, "all_reduce")
    _check_algorithm(algorithm, "all_reduce")
    check_order(order, "all_reduce")
    name, how = _op(op, ALL, "all_reduce"), {"algorithm": algorithm, "order": order}
    if name == "prod":
        return list(cast(Any, Product).apply(how, *tensors))
    if name in ("max", "min"):
        return list(cast(Any, Extreme).apply(name, how, *tensors))
    return apply(AllReduce(devices, name == "avg", algorithm, order), tensors)


@operator_in_graph()
def reduce(
    tensors: Sequence[Tensor],
    dst: int = 0,
    op: Op = "sum",
    *,
    algorithm: str | None = None,
    order: Order = "rank",
) -> Tensor:
    """Return the sum or mean over all ranks, on rank ``dst``'s device; backward: broadcast.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> reduce([torch.ones(2), torch.ones(2)], dst=1)
    tensor([2., 2.])
    """
    devices = _devices(tensors, "reduce")
    _check_algorithm(algorithm, "reduce")
    check_order(order, "reduce")
    mean = _op(op, LINEAR, "reduce") == "avg"
    dst = _rank(dst, len(devices), "reduce", "dst")
    (result,) = apply(Reduce(devices, dst, mean, algorithm, order), tensors)
    return result


@operator_in_graph()
def tree_sum(tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of tensors of one device in tree order; backward: the gradient itself.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> parts = [torch.ones(1, requires_grad=True) for _ in range(3)]
    >>> tree_sum(parts).backward(); parts[2].grad
    tensor([1.])
    """
    _devices(tensors, "tree_sum")
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        kind = type(dtype).__name__
        raise TypeError(f"tree_sum: dtype is a {kind}; pass a torch.dtype, or None")
    own = tensors[0].dtype
    (total,) = apply(TreeSum(len(tensors), own, own if dtype is None else dtype), tensors)
    return total


@operator_in_graph()
def broadcast(
    tensors: Sequence[Tensor], src: int = 0, *, algorithm: str | None = None
) -> list[Tensor]:
    """Return a copy of ``tensors[src]`` for every rank; backward: reduce.

    Only the devices of the other tensors are used, and they get no gradient.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> broadcast([torch.zeros(2), torch.ones(2)], src=1)[0]
    tensor([1., 1.])
    """
    devices = _devices(tensors, "broadcast")
    _check_algorithm(algorithm, "broadcast")
    src = _rank(src, len(devices), "broadcast", "src")
    return apply(Broadcast(devices, src, algorithm=algorithm), [tensors[src]])


@operator_in_graph()
def all_gather(
    tensors: Sequence[Tensor], *, dim: int = 0, algorithm: str | None = None
) -> list[Tensor]:
    """Return, for every rank, the concatenation along ``dim``; backward: reduce_scatter.

    Lengths along ``dim`` may differ.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> all_gather([torch.ones(1), torch.zeros(2)])[1]
    tensor([1., 0., 0.])
    """
    devices = _devices(tensors, "all_gather")
    _check_algorithm(algorithm, "all_gather")
    at, lengths = _along(tensors, dim, "all_gather")
    return apply(AllGather(devices, at, lengths, algorithm=algorithm), tensors)


@operator_in_graph()
def reduce_scatter(
    tensors: Sequence[Tensor],
    op: Op = "sum",
    *,
    dim: int = 0,
    algorithm: str | None = None,
    order: Order = "rank",
) -> list[Tensor]:
    """Return chunk r along ``dim`` of the sum or mean for rank r; backward: all_gather.

    Chunks are cut as by torch.tensor_split.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> reduce_scatter([torch.ones(3), torch.ones(3)])
    [tensor([2., 2.]), tensor([2.])]
    """
    devices = _devices(tensors, "reduce_scatter")
    _check_algorithm(algorithm, "reduce_scatter")
    check_order(order, "reduce_scatter")
    mean = _op(op, LINEAR, "reduce_scatter") == "avg"
    at, lengths = _along(tensors, dim, "reduce_scatter")
    chunks = even(lengths[0], len(devices))
    return apply(ReduceScatter(devices, at, chunks, mean, algorithm, order), tensors)


def _with_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return all_to_all with the operator's split sizes, which have no inner lists."""

    def all_to_all(
        tensors: Sequence[Tensor], dim: int = 0, split_sizes: Any = None
    ) -> list[Tensor]:
        rows, world = split_sizes, len(tensors)
        if rows is not None and len(rows) > world:
            rows = [rows[at : at + world] for at in range(0, len(rows), world)]
        result: list[Tensor] = function(tensors, dim=dim, split_sizes=rows)
        return result

    return all_to_all


@operator_in_graph(adapted=_with_rows)
def all_to_all(
    tensors: Sequence[Tensor],
    *,
    dim: int = 0,
    split_sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> list[Tensor]:
    """Send chunk j of every tensor to rank j; return each rank's chunks; backward: all_to_all.

    ``split_sizes`` are the lengths along ``dim`` of the W chunks: one list for all ranks, or one
    list per rank. By default each tensor is cut as by torch.tensor_split.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> all_to_all([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    [tensor([1., 3.]), tensor([2., 4.])]
    """
    devices = _devices(tensors, "all_to_all")
    at, lengths = _along(tensors, dim, "all_to_all")
    splits = _splits(split_sizes, lengths)
    return apply(AllToAll(devices, at, splits), tensors)


@operator_in_graph()
def scatter(
    tensor: Tensor,
    devices: DeviceSpec,
    *,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
) -> list[Tensor]:
    """Cut one tensor along ``dim`` and return a chunk for each device; backward: gather.

    ``chunk_sizes`` are the lengths along ``dim``, one per device; by default the tensor is cut as
    by torch.tensor_split.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> scatter(torch.ones(3), "cpu*2")
    [tensor([1., 1.]), tensor([1.])]
    """
    ranks = tuple(ranks_of(devices, "scatter"))
    (origin,) = _devices([tensor], "scatter")
    at, (length,) = _along([tensor], dim, "scatter")
    chunks = (
        even(length, len(ranks))
        if chunk_sizes is None
        else _lengths(chunk_sizes, "scatter", "chunk_sizes")
    )
    return apply(Scatter(ranks, at, origin, chunks), [tensor])


@operator_in_graph()
def gather(
    tensors: Sequence[Tensor], device: torch.device | str | None = None, *, dim: int = 0
) -> Tensor:
    """Return the concatenation along ``dim`` on ``device``; backward: scatter.

    The default of ``device`` is the first tensor's device.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> gather([torch.ones(1), torch.zeros(2)])
    tensor([1., 0., 0.])
    """
    devices = _devices(tensors, "gather")
    at, lengths = _along(tensors, dim, "gather")
    target = devices[0] if device is None else _single(device, "gather")
    (result,) = apply(Gather(devices, at, target, lengths), tensors)
    return result


@operator_in_graph()
def copy(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy on ``device``, in new memory even on the same device; backward: copy.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> copy(torch.ones(2), "cpu")
    tensor([1., 1.])
    """
    (origin,) = _devices([tensor], "copy")
    (result,) = apply(Copy(origin, _single(device, "copy")), [tensor])
    return result


def replicate(tensors: Sequence[Tensor], devices: DeviceSpec) -> list[list[Tensor]]:
    """Return a copy of every tensor for each rank, ``result[rank][i]``; backward: reduce of each.

    The call is one node for all tensors, which may differ in shape, dtype and device. The gradient
    is the sum over the ranks in rank order; a tensor of which no copy is used gets none.

    Shared arguments and errors: `help(pycollect.autograd)`.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> [[a], [b]] = replicate([weight], "cpu*2")
    >>> (a + 2 * b).sum().backward(); weight.grad
    tensor([3., 3.])
    """
    ranks = ranks_of(devices, "replicate")
    if isinstance(tensors, (list, tuple)) and not tensors:
        return [[] for _ in ranks]
    copies = _replicate(tensors, ranks)
    return [copies[rank :: len(ranks)] for rank in range(len(ranks))]


def _with_ranks(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    return lambda tensors, devices: function(tensors, ranks_of(devices, "replicate"))


@operator_in_graph(adapted=_with_ranks)
def _replicate(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the result of the operator: all copies of one tensor after another."""
    return apply(Replicate(tuple(devices), _devices(tensors, "replicate")), tensors)


def _devices(tensors: Sequence[Tensor], call: str) -> Devices:
    """Return the devices of the tensors; raise an error unless they are a list of tensors."""
    if not isinstance(tensors, (list, tuple)):
        kind = type(tensors).__name__
        raise TypeError(f"{call}: tensors is a {kind}; pass a list with one torch.Tensor per rank")
    if not tensors:
        raise ValueError(f"{call}: the list of tensors is empty; pass one torch.Tensor per rank")
    for rank, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise TypeError(f"{call}: tensors[{rank}] is a {kind}; pass a torch.Tensor")
    return tuple(t.device for t in tensors)


def _check_algorithm(algorithm: Any, call: str) -> None:
    """Raise an error unless `algorithm` is a name or None; the operator refuses unknown names."""
    hint = "a name out of pycollect.algorithms(), or None"
    if algorithm is not None and not isinstance(algorithm, str):
        raise TypeError(f"{call}: algorithm is a {type(algorithm).__name__}; pass {hint}")
    if algorithm == "" or not (algorithm or "").isascii():
        raise ValueError(f"{call}: algorithm is {shown(algorithm)}; pass {hint}")


def _single(device: torch.device | str, call: str) -> torch.device:
    ranks = ranks_of(device, call)
    if len(ranks) != 1:
        raise ValueError(f"{call}: device {shown(device)} names {len(ranks)} devices; pass one")
    return ranks[0]


def _op(op: Op, allowed: tuple[str, ...], call: str) -> str:
    """Return the name of an op; raise ValueError unless it is one of `allowed`."""
    name = name_of(op, call)
    if name not in allowed:
        hint = f"; only all_reduce has {name!r}" if name in ALL else ""
        raise ValueError(
            f"{call}: op {shown(op)} has no gradient here; allowed are {', '.join(allowed)}{hint}"
        )
    return name


def _rank(rank: int, world: int, call: str, argument: str) -> int:
    rank = _C.int_from(rank, call, argument)
    if not 0 <= rank < world:
        raise ValueError(f"{call}: {argument} is {rank}; {world} ranks allow 0 to {world - 1}")
    return rank


def _along(tensors: Sequence[Tensor], dim: int, call: str) -> tuple[int, Lengths]:
    """Return the dimension counted from the front, and every rank's length along it."""
    dim = _C.int_from(dim, call, "dim")
    dims = tensors[0].dim()
    for rank, tensor in enumerate(tensors):
        if tensor.dim() != dims:
            raise ValueError(
                f"{call}: tensors[{rank}] has shape {list(tensor.shape)} and tensors[0] has "
                f"{list(tensors[0].shape)}; all ranks need the same number of dimensions"
            )
    if not dims:
        raise ValueError(f"{call}: a tensor has no dimensions to cut or join; pass .reshape(1)")
    if not -dims <= dim < dims:
        raise ValueError(
            f"{call}: dim is {dim}; shape {list(tensors[0].shape)} allows {-dims} to {dims - 1}"
        )
    at = dim % dims
    return at, tuple(t.shape[at] for t in tensors)


def _splits(
    sizes: Sequence[int] | Sequence[Sequence[int]] | None, lengths: Lengths
) -> tuple[Lengths, ...]:
    """Return the lengths of all chunks, [from][to]; the collective checks them later."""
    world = len(lengths)
    if sizes is None:
        return tuple(even(length, world) for length in lengths)
    nested = isinstance(sizes, (list, tuple)) and sizes and isinstance(sizes[0], (list, tuple))
    rows: Sequence[Any] = sizes if nested else [sizes] * world
    return tuple(_lengths(row, "all_to_all", "split_sizes") for row in rows)


def _lengths(sizes: Any, call: str, argument: str) -> Lengths:
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise TypeError(f"{call}: {argument} is a {type(sizes).__name__}; pass a list of ints")
    return tuple(_length(size, call, argument) for size in sizes)


def _length(size: Any, call: str, argument: str) -> Any:
    """Return the size as an int; a symbolic one of a tracer remains symbolic."""
    return size if isinstance(size, torch.SymInt) else _C.int_from(size, call, argument)
