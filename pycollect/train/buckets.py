"""Reduce gradients while the backward pass still makes others: in buckets, the last layers first.

A hook on every parameter tells when its gradient is complete. As soon as all of a bucket are, on
all ranks, its reduction is started beside what follows. The bits are the same however gradients are
bucketed, because every sum is taken in rank order.
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
    """Some parameters, and on which ranks their gradients are still to come."""

    indices: list[int]
    missing: set[tuple[int, int]] = field(default_factory=set)  # ranks and indices
    launched: bool = False


def bucket_indices(params: Sequence[Tensor], nbytes: int) -> list[list[int]]:
    """Put those parameters that are trained into buckets of about so many bytes, the last first.

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
    """Starts the reductions of one step's gradients as early as they can be.

    `parameters` are [rank][index], alike on all ranks. The hooks do nothing but within `during`.
    """

    def __init__(
        self, parameters: Sequence[Sequence[nn.Parameter]], reduction: Reduction, nbytes: int
    ) -> None:
        self._parameters, self._reduction = parameters, reduction
        self._buckets = [_Bucket(found) for found in bucket_indices(parameters[0], nbytes)]
        self._trained = [param.requires_grad for param in parameters[0]]
        self._ranks: frozenset[int] = frozenset()  # whose hooks count
        self._streams: dict[torch.device, Any] = {}
        self._works: list[pc.Work] = []
        self._lock = threading.Lock()  # each GPU has a thread of its own for the backward pass
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
        """Whether parameters have been frozen or thawed since the hooks were made."""
        return self._trained != [param.requires_grad for param in self._parameters[0]]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def during(self, ranks: Collection[int]) -> Iterator[None]:
        """Reduce all gradients, beside a backward pass of these ranks and right after it.

        The other ranks have done theirs. A rank without a gradient that others have gets zeros.
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
        """Note a gradient, and start its bucket if it is the last one missing."""
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
                    "a gradient was added to after its reduction had begun, as re-entrant "
                    "checkpoints do: use use_reentrant=False, or switch the overlap off"
                )
            bucket.missing.discard(which)
            bucket.launched = not bucket.missing
            last = bucket.launched
        if last:
            self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        """Start the reduction of a bucket, ordered after its gradients."""
        with ExitStack() as stack, torch.no_grad():
            # The threads of the backward pass do not know the caller's streams.
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            gradients = matching_gradients(
                [[params[index] for index in bucket.indices] for params in self._parameters]
            )
            work = start(self._reduction, gradients) if gradients[0] else None
        if work is not None:
            self._works.append(work)
