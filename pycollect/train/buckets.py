"""Overlap of gradient reduction and backward pass: in buckets, the last layers first.

A hook on every parameter runs when its gradient is complete. As soon as all gradients of a bucket
are complete on all ranks, its reduction starts in the background. The bits do not depend on the
bucketing, because every sum is taken in rank order.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pycollect as pc

from .reduce import Reduction, matching_gradients, start


@dataclass
class _Bucket:
    """Parameters that are reduced together, and their gradients that are not complete yet."""

    indices: list[int]
    missing: set[tuple[int, int]] = field(default_factory=set)  # (rank, parameter index)
    launched: bool = False


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

    `parameters` are [rank][index], alike on all ranks. The hooks act only inside `during`.
    """

    def __init__(
        self, parameters: Sequence[Sequence[nn.Parameter]], reduction: Reduction, nbytes: int
    ) -> None:
        self._parameters, self._reduction = parameters, reduction
        self._buckets = [_Bucket(found) for found in bucket_indices(parameters[0], nbytes)]
        self._trained = [param.requires_grad for param in parameters[0]]
        self._ranks: frozenset[int] = frozenset()  # ranks in the current backward pass
        self._streams: dict[torch.device, Any] = {}
        self._works: list[pc.Work] = []
        self._lock = threading.Lock()  # autograd runs hooks in one thread per GPU
        self._hooks = [
            params[index].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._complete, bucket, (rank, index))
            )
            for bucket in self._buckets
            for rank, params in enumerate(parameters)
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
    def during(self, ranks: Collection[int]) -> Iterator[None]:
        """Reduce all gradients during the backward pass of these ranks and right after it.

        Every other rank has finished its backward pass. A rank that lacks a gradient which another
        rank has gets zeros.
        """
        for bucket in self._buckets:
            bucket.missing = {(rank, index) for rank in ranks for index in bucket.indices}
            bucket.launched = False
        devices = {params[0].device for params in self._parameters}
        self._streams = {d: torch.cuda.current_stream(d) for d in devices if d.type == "cuda"}
        self._ranks = frozenset(ranks)
        try:
            yield
            self._ranks = frozenset()
            for bucket in self._buckets:
                if not bucket.launched:
                    self._launch(bucket)
        finally:
            self._ranks = frozenset()
            works, self._works = self._works, []
            for work in works:
                work.wait()

    def _complete(self, bucket: _Bucket, which: tuple[int, int], param: Tensor) -> None:
        """Mark a gradient as complete; launch its bucket if it was the last one missing."""
        rank, _ = which
        if rank not in self._ranks:
            return
        mine = self._streams.get(param.device)
        if mine is not None:
            here = torch.cuda.current_stream(param.device)
            if here != mine:
                mine.wait_stream(here)
        with self._lock:
            if bucket.launched:
                raise RuntimeError(
                    "a gradient has changed after the start of its reduction, as in re-entrant "
                    "checkpoints: use use_reentrant=False, or switch the overlap off"
                )
            bucket.missing.discard(which)
            bucket.launched = not bucket.missing
            last = bucket.launched
        if last:
            self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        """Start the reduction of a bucket, ordered after its gradients."""
        with ExitStack() as stack, torch.no_grad():
            # Autograd's threads do not inherit the caller's current streams.
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            gradients = matching_gradients(
                [[params[index] for index in bucket.indices] for params in self._parameters]
            )
            work = start(self._reduction, gradients) if gradients[0] else None
        if work is not None:
            self._works.append(work)
