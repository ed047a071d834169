"""The list collectives along a dimension; `help(pycollect.collectives)` has their shared arguments.

Results are new tensors with the inputs' order of dimensions in memory (channels_last stays
channels_last), or the tensors in ``out``. Inputs that are not dense, or not all in one order, are
first copied. A tensor without dimensions, and a ``dim`` out of range, raise ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import torch
from torch.compiler import is_compiling

from . import _C
from ._in_graph import in_graph
from .collectives import Op, Order, Streams, TensorLike, TensorList, Work, ranks_of
from .devices import DeviceSpec
from .errors import shown

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .collectives import A, Later, Now, OnStreams, Tunable

    class AlongDim(Tunable[A], total=False):
        """Keywords of all_gather and reduce_scatter."""

        dim: int
        out: Sequence[TensorLike] | None

    class ReducingAlongDim(AlongDim[A], total=False):
        """Keywords of reduce_scatter."""

        order: Order

    class Splits(OnStreams[A], total=False):
        """Keywords of all_to_all."""

        dim: int
        split_sizes: Sequence[int] | Sequence[Sequence[int]] | None
        out: Sequence[TensorLike] | None

    class Chunks(OnStreams[A], total=False):
        """Keywords of scatter."""

        dim: int
        chunk_sizes: Sequence[int] | None
        out: Sequence[TensorLike] | None


@overload
def all_gather(tensors: TensorList, **options: Unpack[AlongDim[Now]]) -> list[torch.Tensor]: ...
@overload
def all_gather(tensors: TensorList, **options: Unpack[AlongDim[Later]]) -> Work: ...
@overload
def all_gather(
    tensors: TensorList, **options: Unpack[AlongDim[bool]]
) -> list[torch.Tensor] | Work: ...
def all_gather(
    tensors: TensorList,
    *,
    dim: int = 0,
    algorithm: str | None = None,
    out: Sequence[TensorLike] | None = None,
    async_op: bool = False,
    streams: Streams = None,
    peer_access: bool = True,
) -> list[torch.Tensor] | Work:
    """Return, for every rank, the concatenation of all tensors along ``dim``.

    Lengths along ``dim`` may differ; all other sizes and the dtype are the same on every rank. Each
    of the W results has the sum of the lengths along ``dim``, and lies on its rank's device.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> all_gather([torch.tensor([1]), torch.tensor([2, 3])])
    [tensor([1, 2, 3]), tensor([1, 2, 3])]
    """
    call = in_graph("all_gather") if is_compiling() else _C.all_gather
    return call(tensors, dim, algorithm, out, async_op, streams, peer_access)


@overload
def reduce_scatter(
    tensors: TensorList, op: Op = ..., **options: Unpack[ReducingAlongDim[Now]]
) -> list[torch.Tensor]: ...
@overload
def reduce_scatter(
    tensors: TensorList, op: Op = ..., **options: Unpack[ReducingAlongDim[Later]]
) -> Work: ...
@overload
def reduce_scatter(
    tensors: TensorList, op: Op = ..., **options: Unpack[ReducingAlongDim[bool]]
) -> list[torch.Tensor] | Work: ...
def reduce_scatter(
    tensors: TensorList,
    op: Op = "sum",
    *,
    dim: int = 0,
    algorithm: str | None = None,
    order: Order = "rank",
    out: Sequence[TensorLike] | None = None,
    async_op: bool = False,
    streams: Streams = None,
    peer_access: bool = True,
) -> list[torch.Tensor] | Work:
    """Reduce over all ranks, and return chunk r of the result along ``dim`` for rank r.

    All tensors have the same shape. Chunks are cut as by torch.tensor_split: if W does not divide
    the length, the first chunks are longer by one. Chunk r lies on rank r's device.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> reduce_scatter([torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])])
    [tensor([5, 7]), tensor([9])]
    """
    call = in_graph("reduce_scatter") if is_compiling() else _C.reduce_scatter
    return call(tensors, op, dim, algorithm, order, out, async_op, streams, peer_access)


@overload
def all_to_all(tensors: TensorList, **options: Unpack[Splits[Now]]) -> list[torch.Tensor]: ...
@overload
def all_to_all(tensors: TensorList, **options: Unpack[Splits[Later]]) -> Work: ...
@overload
def all_to_all(
    tensors: TensorList, **options: Unpack[Splits[bool]]
) -> list[torch.Tensor] | Work: ...
def all_to_all(
    tensors: TensorList,
    *,
    dim: int = 0,
    split_sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    out: Sequence[TensorLike] | None = None,
    async_op: bool = False,
    streams: Streams = None,
    peer_access: bool = True,
) -> list[torch.Tensor] | Work:
    """Send chunk j of every tensor to rank j; return each rank's chunks, joined in rank order.

    ``split_sizes`` are the lengths along ``dim`` of the W chunks: one list for all ranks, or one
    list per rank. By default each tensor is cut as by torch.tensor_split. Lengths along ``dim`` may
    differ between ranks; all other sizes and the dtype are the same. Result j has the sum of the
    lengths of all chunks j along ``dim``. Raises ValueError unless every list has W sizes that are
    not negative and sum to the tensor's length, and for other than 1 or W lists.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> all_to_all([torch.tensor([1, 2]), torch.tensor([3, 4])])
    [tensor([1, 3]), tensor([2, 4])]
    """
    call = in_graph("all_to_all") if is_compiling() else _C.all_to_all
    return call(tensors, dim, split_sizes, out, async_op, streams, peer_access)


@overload
def scatter(
    tensor: TensorLike, devices: DeviceSpec, **options: Unpack[Chunks[Now]]
) -> list[torch.Tensor]: ...
@overload
def scatter(tensor: TensorLike, devices: DeviceSpec, **options: Unpack[Chunks[Later]]) -> Work: ...
@overload
def scatter(
    tensor: TensorLike, devices: DeviceSpec, **options: Unpack[Chunks[bool]]
) -> list[torch.Tensor] | Work: ...
def scatter(
    tensor: TensorLike,
    devices: DeviceSpec,
    *,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    out: Sequence[TensorLike] | None = None,
    async_op: bool = False,
    streams: Streams = None,
    peer_access: bool = True,
) -> list[torch.Tensor] | Work:
    """Cut one tensor along ``dim`` and return a copy of a chunk for each device.

    ``chunk_sizes`` are the lengths along ``dim``, one per device; by default the tensor is cut as
    by torch.tensor_split. Result r has the tensor's shape, except for the length of chunk r along
    ``dim``, and lies on device r. Raises ValueError unless ``chunk_sizes`` has one size per device,
    none is negative, and they sum to the tensor's length. ``streams`` has one item per device.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> scatter(torch.arange(3), "cpu*2")
    [tensor([0, 1]), tensor([2])]
    """
    ranks = ranks_of(devices, "scatter")
    call = in_graph("scatter") if is_compiling() else _C.scatter
    return call(tensor, ranks, chunk_sizes, dim, out, async_op, streams, peer_access)


def gather(
    tensors: TensorList,
    device: torch.device | str | None = None,
    *,
    dim: int = 0,
    out: TensorLike | None = None,
    streams: Streams = None,
    peer_access: bool = True,
) -> torch.Tensor:
    """Return the concatenation along ``dim`` on ``device`` (default: the first tensor's device).

    Lengths along ``dim`` may differ, and the result has their sum; all other sizes and the dtype
    are the same. ``out`` is one tensor. Raises ValueError for other sizes or dtypes, for an ``out``
    of another shape, dtype or device, and if ``device`` names several devices.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> gather([torch.tensor([1]), torch.tensor([2, 3])])
    tensor([1, 2, 3])
    """
    target = [] if device is None else ranks_of(device, "gather")
    if len(target) > 1:
        raise ValueError(f"gather: device {shown(device)} names {len(target)} devices; pass one")
    call = in_graph("gather") if is_compiling() else _C.gather
    return call(tensors, target, dim, out, False, streams, peer_access)
