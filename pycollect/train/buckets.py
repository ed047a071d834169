"""Overlap of gradient reduction and backward pass: in buckets, the last layers first.

A hook on every parameter runs when its gradient is complete. As soon as all gradients of a bucket
are complete on all ranks of this process, and those of the buckets before it, its reduction starts
in the background; so all processes start them in the same order. The bits do not depend on the
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

from .reduce import BucketSum, Pending


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
