"""The list collectives: one process holds a tensor per rank, and the list order is the rank order.

Every reduction is the left fold in rank order, ``((x0 + x1) + x2) + ...``, accumulated in fp32 for
fp32 and narrower floats, in fp64 for fp64 and natively (wrapping) for integers, and rounded once.
The result has the same bits for every size, every number of threads, and every algorithm that keeps
this contract. With ``order="tree"`` it is the balanced tree over the ranks instead, which also has
the same bits for every number of ranks that add up the same parts: see ``tree_sum``.

At the edges: "avg" multiplies the accumulated sum by 1/W; for integers, it divides the wrapped sum
by W, rounding toward zero. Integer sums and products wrap around. "min" and "max" of floats are NaN
if any rank has NaN. For bools, "sum", "max" and "bor" are the logical or, "prod", "min" and "band"
the logical and, and "bxor" the exclusive or. A result too large for its float becomes infinity; for
the float8 dtypes it becomes the value that the conversion ``Tensor.to`` of the installed torch
gives (float8_e4m3fn has no infinity: 448 or NaN, by the version of torch).

The functions share these arguments. W is the number of ranks.

* ``tensors``: a list or tuple with one tensor per rank. An array with ``__dlpack__`` (NumPy, CuPy)
  is accepted as a tensor; results are torch tensors. Tensors that are modified in place have the
  same shape, dtype and strides on all ranks, and share no memory; any strides are allowed.
* ``devices``: a device specification, see `help(pycollect.devices)`.
* dtypes: float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, int16, int32,
  int64, uint8, bool, complex64, complex128.
* ``op``: "sum" (default), "avg", "prod", "min", "max", "band", "bor", "bxor", or torch's own
  torch.distributed.ReduceOp. Floats have no band, bor and bxor, complex numbers neither these nor
  min and max, and bools no avg.
* ``dim``: the dimension (default 0) that is cut or joined; a negative one counts from the last.
* ``out``: tensors that receive the results in place of new ones (default None). Their number,
  shapes, dtype and devices are those of the results, they are contiguous or all dense in the same
  order of dimensions, and they overlap neither each other nor the inputs.
* ``algorithm``: a name from ``pycollect.algorithms(...)``; None (default) selects one that keeps
  this contract.
* ``order``: "rank" (default), or "tree": of n ranks the left operand is the result of the first
  ones, as many as the largest power of two below n, and the right one that of the others, as in
  ``((x0 + x1) + (x2 + x3)) + ((x4 + x5) + x6)``. Accumulators and rounding are the same. ValueError
  for an ``algorithm`` that adds in several steps, such as "chain".
* ``async_op=True`` (default False) returns a ``Work`` at once; its ``wait()`` returns the result of
  the call. Until then, the tensors of the call must not be written, nor its results read.
* ``streams``: a list with one torch.cuda.Stream per rank, on which its CUDA tensors are used; None,
  for the list (default) or for a rank, stands for the device's current stream, and is required for
  CPU tensors.
* ``peer_access=False`` (default True) copies data between GPUs through pinned host memory, even if
  one GPU could access another's memory.

Invalid arguments raise in the call, before data moves. TypeError: an argument or a dtype of an
unsupported type, or an ``op`` that its dtype does not have. ValueError: every other invalid
argument, such as an empty list, unequal shapes or dtypes, overlapping tensors, a rank, ``dim``,
``op`` or ``algorithm`` that does not exist, an expanded tensor that would be written, or a tensor
that requires grad in grad mode (pycollect.autograd has the functions with gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    overload,
)

import torch
from torch.compiler import is_compiling

from . import _C
from ._in_graph import in_graph, skip_compile
from .devices import DeviceSpec
from .devices import devices as resolve
from .errors import shown

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Unpack

Work: TypeAlias = _C.Work
Op: TypeAlias = "str | dist.ReduceOp | dist.ReduceOp.RedOpType"
Order: TypeAlias = Literal["rank", "tree"]


class SupportsDLPack(Protocol):
    """An array of another library that exports DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...


TensorLike: TypeAlias = torch.Tensor | SupportsDLPack
TensorList: TypeAlias = Sequence[TensorLike]
Streams: TypeAlias = "Sequence[torch.cuda.Stream | None] | None"

# A call with `async_op` has three overloads: a result for False, a Work for True, and either of
# them for a bool known only at run time. These are the keywords of the overloads.
if TYPE_CHECKING:
    Now: TypeAlias = Literal[False]
    Later: TypeAlias = Literal[True]
    A = TypeVar("A", Now, Later, bool)

    class OnStreams(TypedDict, Generic[A], total=False):
        """Keywords of all collectives."""

        async_op: A
        streams: Streams
        peer_access: bool

    class Tunable(OnStreams[A], total=False):
        """Keywords of collectives with an argument `algorithm`."""

        algorithm: str | None

    class Reducing(Tunable[A], total=False):
        """Keywords of reductions."""

        order: Order


@overload
def all_reduce(tensors: TensorList, op: Op = ..., **options: Unpack[Reducing[Now]]) -> None: ...
@overload
def all_reduce(tensors: TensorList, op: Op = ..., **options: Unpack[Reducing[Later]]) -> Work: ...
@overload
def all_reduce(
    tensors: TensorList, op: Op = ..., **options: Unpack[Reducing[bool]]
) -> Work | None: ...
def all_reduce(
    tensors: TensorList,
    op: Op = "sum",
    *,
    algorithm: str | None = None,
    order: Order = "rank",
    async_op: bool = False,
    streams: Streams = None,
    peer_access: bool = True,
) -> Work | None:
    """Reduce over all ranks, in place: every tensor becomes the result.

    Returns None, or a ``Work`` with ``async_op=True``.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> x = [torch.ones(2), torch.full((2,), 2.0)]
    >>> all_reduce(x); x
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    call = in_graph("all_reduce") if is_compiling() else _C.all_reduce
    return call(tensors, op, algorithm, order, async_op, streams, peer_access)


@overload
def all_reduce_coalesced(
    tensor_lists: Sequence[TensorList], op: Op = ..., **options: Unpack[Reducing[Now]]
) -> None: ...
@overload
def all_reduce_coalesced(
    tensor_lists: Sequence[TensorList], op: Op = ..., **options: Unpack[Reducing[Later]]
) -> Work: ...
@overload
def all_reduce_coalesced(
    tensor_lists: Sequence[TensorList], op: Op = ..., **options: Unpack[Reducing[bool]]
) -> Work | None: ...
def all_reduce_coalesced(
    tensor_lists: Sequence[TensorList],
    op: Op = "sum",
    *,
    algorithm: str | None = None,
    order: Order = "rank",
    async_op: bool = False,
    streams: Streams = None,
    peer_access: bool = True,
) -> Work | None:
    """All-reduce many tensors of every rank in one pass, in place.

    In ``tensor_lists[rank][i]``, shapes and dtypes may differ between i, but not between ranks.
    Raises ValueError if the lists of two ranks differ in length. All tensors of a rank are on one
    device.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> x = [[torch.ones(1), torch.ones(2)], [torch.ones(1), torch.ones(2)]]
    >>> all_reduce_coalesced(x); x[0]
    [tensor([2.]), tensor([2., 2.])]
    """
    call = in_graph("all_reduce_coalesced") if is_compiling() else _C.all_reduce_coalesced
    return call(tensor_lists, op, algorithm, order, async_op, streams, peer_access)


@overload
def reduce(
    tensors: TensorList, dst: int = ..., op: Op = ..., **options: Unpack[Reducing[Now]]
) -> None: ...
@overload
def reduce(
    tensors: TensorList, dst: int = ..., op: Op = ..., **options: Unpack[Reducing[Later]]
) -> Work: ...
@overload
def reduce(
    tensors: TensorList, dst: int = ..., op: Op = ..., **options: Unpack[Reducing[bool]]
) -> Work | None: ...
def reduce(
    tensors: TensorList,
    dst: int = 0,
    op: Op = "sum",
    *,
    algorithm: str | None = None,
    order: Order = "rank",
    async_op: bool = False,
    streams: Streams = None,
    peer_access: bool = True,
) -> Work | None:
    """Reduce into ``tensors[dst]``, in place; the other tensors keep their values.

    ``dst`` is a rank, 0 (default) to len(tensors) - 1; another number raises ValueError.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> x = [torch.ones(2), torch.ones(2)]
    >>> reduce(x, dst=1); x
    [tensor([1., 1.]), tensor([2., 2.])]
    """
    call = in_graph("reduce") if is_compiling() else _C.reduce
    return call(tensors, dst, op, algorithm, order, async_op, streams, peer_access)


@overload
def broadcast(tensors: TensorList, src: int = ..., **options: Unpack[Tunable[Now]]) -> None: ...
@overload
def broadcast(tensors: TensorList, src: int = ..., **options: Unpack[Tunable[Later]]) -> Work: ...
@overload
def broadcast(
    tensors: TensorList, src: int = ..., **options: Unpack[Tunable[bool]]
) -> Work | None: ...
def broadcast(
    tensors: TensorList,
    src: int = 0,
    *,
    algorithm: str | None = None,
    async_op: bool = False,
    streams: Streams = None,
    peer_access: bool = True,
) -> Work | None:
    """Copy ``tensors[src]`` into all other tensors, in place.

    ``src`` is a rank, 0 (default) to len(tensors) - 1; another number raises ValueError.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> x = [torch.zeros(2), torch.ones(2)]
    >>> broadcast(x, src=1); x[0]
    tensor([1., 1.])
    """
    call = in_graph("broadcast") if is_compiling() else _C.broadcast
    return call(tensors, src, algorithm, async_op, streams, peer_access)


@overload
def broadcast_coalesced(
    tensor_lists: Sequence[TensorList], src: int = ..., **options: Unpack[OnStreams[Now]]
) -> None: ...
@overload
def broadcast_coalesced(
    tensor_lists: Sequence[TensorList], src: int = ..., **options: Unpack[OnStreams[Later]]
) -> Work: ...
@overload
def broadcast_coalesced(
    tensor_lists: Sequence[TensorList], src: int = ..., **options: Unpack[OnStreams[bool]]
) -> Work | None: ...
def broadcast_coalesced(
    tensor_lists: Sequence[TensorList],
    src: int = 0,
    *,
    async_op: bool = False,
    streams: Streams = None,
    peer_access: bool = True,
) -> Work | None:
    """Copy ``tensor_lists[src][i]`` into ``tensor_lists[rank][i]`` of all ranks, in one pass.

    Shapes and dtypes may differ between i, but not between ranks. All tensors of a rank are on one
    device. ``src`` is a rank, 0 (default) to len(tensor_lists) - 1. Raises ValueError for another
    ``src``, and if the lists of two ranks differ in length.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> x = [[torch.zeros(1), torch.zeros(2)], [torch.ones(1), torch.ones(2)]]
    >>> broadcast_coalesced(x, src=1); x[0]
    [tensor([1.]), tensor([1., 1.])]
    """
    call = in_graph("broadcast_coalesced") if is_compiling() else _C.broadcast_coalesced
    return call(tensor_lists, src, async_op, streams, peer_access)


def replicate(
    tensors: TensorList, devices: DeviceSpec, *, peer_access: bool = True
) -> list[list[torch.Tensor]]:
    """Return a copy of every tensor for each rank: ``result[rank][i]``.

    A device that is listed twice gets two copies. Copies are dense, keep the order of dimensions in
    memory and do not require grad. Shapes and dtypes of ``tensors`` may differ; tensors on several
    devices raise ValueError. An empty list has empty lists as its result.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> replicate([torch.ones(1), torch.zeros(2)], "cpu*2")[1]
    [tensor([1.]), tensor([0., 0.])]
    """
    ranks = ranks_of(devices, "replicate")
    call = in_graph("replicate") if is_compiling() else _C.replicate
    flat = call(tensors, ranks, False, None, peer_access) or []
    return [flat[rank :: len(ranks)] for rank in range(len(ranks))]


def tree_sum(tensors: TensorList, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the sum of tensors of one device, added as by ``order="tree"``.

    The tensors have the same shape and dtype; their strides may differ. ``dtype`` is that of the
    result: the tensors' (default), or torch.float32 for floats narrower than that, whose sum is
    then not rounded. So sums of sums have the bits of one sum: if each rank adds up equally many
    parts, a power of two, and all_reduce adds these sums with ``order="tree"``, the result is that
    of one rank with all parts, in rank order. Of narrow floats the sums must be float32, and the
    result is rounded after the all_reduce.

    Raises ValueError for an empty list, different shapes, dtypes or devices, and another ``dtype``.
    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> parts = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 1.0)]
    >>> tree_sum(parts), tree_sum([tree_sum(parts[:2]), tree_sum(parts[2:])])
    (tensor([0.]), tensor([0.]))
    """
    call = in_graph("tree_sum") if is_compiling() else _C.tree_sum
    result: torch.Tensor = call(tensors, dtype, False, None, True)
    return result


@overload
def copy_(
    dst: TensorLike, src: TensorLike, *, async_op: Literal[False] = ..., peer_access: bool = ...
) -> None: ...
@overload
def copy_(
    dst: TensorLike, src: TensorLike, *, async_op: Literal[True], peer_access: bool = ...
) -> Work: ...
@overload
def copy_(
    dst: TensorLike, src: TensorLike, *, async_op: bool, peer_access: bool = ...
) -> Work | None: ...
def copy_(
    dst: TensorLike, src: TensorLike, *, async_op: bool = False, peer_access: bool = True
) -> Work | None:
    """Copy ``src`` into ``dst``, between any two devices.

    Both have the same shape and dtype; their strides may differ. Raises ValueError for different
    shapes (nothing is broadcast) or dtypes, for a ``dst`` that is expanded or read-only, and if the
    address ranges of ``dst`` and ``src`` overlap; TypeError for an unsupported dtype or type.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> x = torch.zeros(2)
    >>> copy_(x, torch.ones(2)); x
    tensor([1., 1.])
    """
    call = in_graph("copy_") if is_compiling() else _C.copy_
    return call(dst, src, async_op, None, peer_access)


@skip_compile("pycollect.barrier waits for calls outside of graphs")
def barrier(devices: DeviceSpec) -> None:
    """Wait until all earlier collectives, including asynchronous ones, have finished.

    Whatever ``devices`` is, waits for all queued asynchronous collectives of the process that have
    no CUDA tensors. Also waits for all work of the GPUs in ``devices``, as torch.cuda.synchronize
    does. With a GPU, raises ValueError during the capture of a CUDA graph, because the host cannot
    wait for captured work.

    Shared arguments and errors: `help(pycollect.collectives)`.

    >>> barrier("cpu*2")
    """
    gpus = {d for d in ranks_of(devices, "barrier") if d.type == "cuda"}
    if gpus and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "barrier: the host cannot wait during the capture of a CUDA graph; call it before or "
            "after the capture"
        )
    _C.drain()
    for gpu in gpus:
        torch.cuda.synchronize(gpu)


def check_order(order: Any, call: str) -> None:
    """Raise an error unless `order` is the name of an order."""
    if not isinstance(order, str):
        raise TypeError(f"{call}: order is a {type(order).__name__}; pass 'rank' or 'tree'")
    if order not in ("rank", "tree"):
        raise ValueError(f"{call}: order is {shown(order)}; allowed are rank, tree")


def ranks_of(devices: DeviceSpec, call: str) -> list[torch.device]:
    """Return the devices of all ranks; raise ValueError if this build does not support one."""
    ranks = resolve(devices)
    other = next((str(d) for d in ranks if d.type != "cpu"), None)
    if other is not None and not _C.has_cuda():
        raise ValueError(
            f"{call}: devices contains {other}, which this build does not support; use 'cpu'"
        )
    return ranks
