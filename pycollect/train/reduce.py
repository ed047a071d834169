"""Reductions: functions that sum the gradients of all ranks.

A reduction takes `gradients[rank][parameter]` and leaves the sum over the ranks in every rank, in
place. Both reductions of this module add in rank order. They give the same bits for float32 and
float64; of float16 and bfloat16 the naive one rounds every partial sum, the other only the result.

`ListSum` and `GroupSum` start the sum of a bucket of parameters: over replicas of one process by a
reduction, or over processes with a replica each by torch.distributed. `Buckets` start it during the
backward pass, the last layers first. A hook on every parameter runs when its gradient is complete.
As soon as all gradients of a bucket are complete on all ranks of this process, and those of the
buckets before it, its reduction starts in the background; so all processes start them in the same
order. The bits do not depend on the bucketing, because every sum is taken in rank order.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pycollect as pc

Gradients: TypeAlias = Sequence[Sequence[Tensor]]
Reduction: TypeAlias = Callable[[Gradients], None]
SPARSE = "a gradient is sparse: make the layer with sparse=False"


def naive_all_reduce(data: Sequence[Tensor]) -> None:
    """Sum one tensor per rank in place, by the loop `allreduce` of Dive into Deep Learning.

    `data[rank]` have one shape and dtype; they may be on different devices. The loop adds the other
    tensors to the first in rank order, and copies the sum to all. Every addition rounds to the
    dtype, and every copy between devices is a call of `.to()`. Raises torch's RuntimeError for
    shapes that differ.

    >>> data = [torch.ones(2), 2 * torch.ones(2)]; naive_all_reduce(data)
    >>> data
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    for i in range(1, len(data)):
        data[0][...] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][...] = data[0].to(data[i].device)


def reduce_gradients_naive(gradients: Gradients) -> None:
    """Sum `gradients[rank][i]` over the ranks in place, one parameter after the other.

    The sum of each parameter is that of `naive_all_reduce`, with its shapes, dtypes and errors.
    Raises ValueError if the ranks have different numbers of gradients. It is
    `GRADIENT_REDUCTIONS["naive"]`, the baseline of `compare_reductions`.

    >>> g = [[torch.ones(2)], [torch.ones(2)]]; reduce_gradients_naive(g)
    >>> g[1]
    [tensor([2., 2.])]
    """
    for parameter in zip(*gradients, strict=True):
        naive_all_reduce(parameter)


def reduce_gradients_coalesced(gradients: Gradients) -> None:
    """Sum `gradients[rank][i]` over the ranks in place, all in one collective.

    The collective is `pycollect.all_reduce_coalesced`: it adds in rank order, in float32 or wider,
    and rounds once. Shapes and dtypes may differ between i, but not between ranks. Raises
    ValueError for no rank, for ranks that differ in number, shape or dtype, for sparse tensors, for
    tensors that require grad outside of `torch.no_grad()`, and for tensors that share memory. It is
    `GRADIENT_REDUCTIONS["pycollect"]`, the default.

    >>> g = [[torch.ones(2)], [torch.ones(2)]]; reduce_gradients_coalesced(g)
    >>> g[1]
    [tensor([2., 2.])]
    """
    pc.all_reduce_coalesced(gradients)


def matching_gradients(parameters: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return the gradients of `parameters[rank][i]`, zeros where only other ranks have one.

    Parameters without a gradient on any rank are left out. Raises ValueError for sparse gradients.

    >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> a.sum().backward(); matching_gradients([[a], [b]])
    [[tensor([1., 1.])], [tensor([0., 0.])]]
    """
    gradients: list[list[Tensor]] = [[] for _ in parameters]
    for same in zip(*parameters, strict=True):
        if all(param.grad is None for param in same):
            continue
        for mine, param in zip(gradients, same, strict=True):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            if param.grad.layout != torch.strided:
                raise ValueError(SPARSE)
            mine.append(param.grad)
    return gradients


@dataclass(frozen=True)
class ListSum:
    """Sums the gradients of some parameters over ranks that are all replicas of this process.

    >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> a.sum().backward(); ListSum(reduce_gradients_coalesced).start([[a], [b]]).wait(); b.grad
    tensor([1., 1.])
    """

    reduction: Reduction

    def start(
        self, parameters: Sequence[Sequence[Tensor]], *, async_op: bool = True
    ) -> pc.Work | None:
        """Start the sum for `parameters[replica][i]`, the replicas being those of this process.

        The result has a method `wait`, after which the gradients hold the sum (for GPUs, for the
        current streams); it is None if the sum has already finished, as it may without `async_op`.
        A gradient that only other ranks have counts as zeros; what no rank has stays None. Raises
        ValueError for sparse gradients.
        """
        gradients = matching_gradients(parameters)
        if not gradients[0]:
            return None
        if async_op and self.reduction is reduce_gradients_coalesced:
            return pc.all_reduce_coalesced(gradients, async_op=True)
        self.reduction(gradients)
        return None


@dataclass(frozen=True)
class GroupSum:
    """As `ListSum`, over ranks that are processes, or threads, of a torch.distributed group.

    Each process calls it with the same parameters in the same order. The gradients of one dtype are
    one message, which begins with the number of ranks that have each of them.
    """

    group: dist.ProcessGroup

    def start(
        self, parameters: Sequence[Sequence[Tensor]], *, async_op: bool = True
    ) -> "_Messages":
        """Start an all-reduce for every dtype; see `ListSum`."""
        (mine,) = parameters
        trained = [param for param in mine if param.requires_grad]
        messages = []
        for dtype in dict.fromkeys(param.dtype for param in trained):
            params = [param for param in trained if param.dtype == dtype]
            if any(p.grad is not None and p.grad.layout != torch.strided for p in params):
                raise ValueError(SPARSE)
            known = params[0].new_tensor([float(p.grad is not None) for p in params])
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            whole = torch.cat([known, *(part.flatten() for part in parts)])
            work = dist.all_reduce(whole, group=self.group, async_op=async_op)
            messages.append((params, whole, work))
        return _Messages(messages)


@dataclass(frozen=True)
class _Messages:
    """Gradients on their way: parameters, their message, and its work unless it has arrived."""

    messages: Sequence[tuple[Sequence[Tensor], Tensor, Any]]

    def wait(self) -> None:
        for params, whole, work in self.messages:
            if work is not None:
                work.wait()
            known, *parts = torch.split(whole, [len(params), *(p.numel() for p in params)])
            for i, (param, part) in enumerate(zip(params, parts, strict=True)):
                # Where this rank lacks a gradient, on a GPU it waits to see whether another has it.
                if param.grad is None and known[i] == 0:
                    continue
                param.grad = part.view_as(param)
                if not param.is_contiguous():  # optimizers rely on equal strides
                    param.grad = torch.empty_like(param).copy_(param.grad)


BucketSum: TypeAlias = ListSum | GroupSum
Pending: TypeAlias = pc.Work | _Messages


# --- overlap with the backward pass ---------------------------------------------------------------


@dataclass
class _Bucket:
    """Parameters that are reduced together, and their gradients that are not complete yet."""

    indices: list[int]
    missing: set[tuple[int, int]] = field(default_factory=set)  # (replica, parameter index)


def bucket_indices(params: Sequence[Tensor], nbytes: int) -> list[list[int]]:
    """Put the parameters that require grad into buckets of about `nbytes`, the last first.

    >>> bucket_indices([nn.Parameter(torch.zeros(2)) for _ in range(3)], 16)
    [[2, 1], [0]]
    """
    buckets: list[list[int]] = []
    room = 0
    for index in reversed(range(len(params))):
        if not params[index].requires_grad:
            continue
        if room <= 0:
            buckets.append([])
            room = nbytes
        buckets[-1].append(index)
        room -= params[index].nbytes
    return buckets


class Buckets:
    """Starts the gradient reductions of a training step as early as possible.

    `parameters` are [replica][index], alike on all replicas. The hooks act only inside `during`.
    """

    def __init__(
        self, parameters: Sequence[Sequence[nn.Parameter]], bucket_sum: BucketSum, nbytes: int
    ) -> None:
        self._parameters, self._sum = parameters, bucket_sum
        self._buckets = [_Bucket(found) for found in bucket_indices(parameters[0], nbytes)]
        self._trained = [param.requires_grad for param in parameters[0]]
        self._running: frozenset[int] = frozenset()  # replicas in the current backward pass
        self._launched = 0  # buckets whose reductions have started
        self._streams: dict[torch.device, Any] = {}
        self._pending: list[Pending] = []
        self._lock = threading.Lock()  # autograd runs hooks in one thread per GPU
        self._hooks = [
            params[index].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._complete, number, (replica, index))
            )
            for number, bucket in enumerate(self._buckets)
            for replica, params in enumerate(parameters)
            for index in bucket.indices
        ]

    @property
    def stale(self) -> bool:
        """Whether any requires_grad flag has changed since the hooks were registered."""
        return self._trained != [param.requires_grad for param in self._parameters[0]]

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def during(self, replicas: Collection[int]) -> Iterator[None]:
        """Start all reductions during the backward pass of these replicas and right after it.

        Every other replica has finished its backward pass. `wait` waits for the reductions; after
        an error there is nothing to wait for.
        """
        for bucket in self._buckets:
            bucket.missing = {(replica, index) for replica in replicas for index in bucket.indices}
        self._launched = 0
        devices = {params[0].device for params in self._parameters}
        self._streams = {d: torch.cuda.current_stream(d) for d in devices if d.type == "cuda"}
        self._running = frozenset(replicas)
        try:
            yield
            self._running = frozenset()
            for bucket in self._buckets:
                bucket.missing.clear()
            self._launch()
        except BaseException:
            # Of processes, another one may never start its part: the group ends such reductions.
            self._pending = [own for own in self._pending if isinstance(own, pc.Work)]
            self.wait()
            raise
        finally:
            self._running = frozenset()

    def wait(self) -> None:
        """Wait until the gradients of all started reductions are the sums over all ranks."""
        pending, self._pending = self._pending, []
        for reduction in pending:
            reduction.wait()

    def _complete(self, number: int, which: tuple[int, int], param: Tensor) -> None:
        """Mark a gradient as complete; start the reductions for which it was the last one."""
        replica, _ = which
        if replica not in self._running:
            return
        mine = self._streams.get(param.device)
        if mine is not None:
            here = torch.cuda.current_stream(param.device)
            if here != mine:
                mine.wait_stream(here)
        with self._lock:
            if number < self._launched:
                raise RuntimeError(
                    "a gradient has changed after the start of its reduction, as in re-entrant "
                    "checkpoints: use use_reentrant=False, or switch the overlap off"
                )
            self._buckets[number].missing.discard(which)
            self._launch()

    def _launch(self) -> None:
        """Start the reductions of the next buckets that are complete, after their gradients."""
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            bucket = self._buckets[self._launched]
            self._launched += 1
            with ExitStack() as stack, torch.no_grad():
                # Autograd's threads do not inherit the caller's current streams.
                for stream in self._streams.values():
                    stack.enter_context(torch.cuda.stream(stream))
                reduction = self._sum.start(
                    [[params[index] for index in bucket.indices] for params in self._parameters]
                )
            if reduction is not None:
                self._pending.append(reduction)


# --- what ranks of a group tell each other --------------------------------------------------------


@torch.no_grad()
def send_from_rank_0(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Set tensors to those of rank 0 of a group; ValueError for a sparse one."""
    for name, tensor in named:
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} is sparse, and no group of processes sends it: make it dense")
        whole = tensor.contiguous()
        dist.broadcast(whole, group=group, group_src=0)
        if whole is not tensor:
            tensor.copy_(whole)


def gathered(of_ranks: list[Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks in their order, from those of this process's ranks."""
    if group is None:
        return of_ranks
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, of_ranks, group=group)
    return [value for of_process in found for value in of_process]


GRADIENT_REDUCTIONS: Mapping[str, Reduction] = MappingProxyType(
    {"pycollect": reduce_gradients_coalesced, "naive": reduce_gradients_naive}
)
"""The reductions by the name that `train(reduce=...)` takes.

The mapping is read-only. Each is a function of `gradients[rank][parameter]`, which sums over the
ranks in place.
"""
