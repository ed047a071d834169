"""A batch of `dist.all_reduce` calls, as every rank runs it, on threads and in processes.

The calls of a batch follow one another on zeros, which no sum changes. The time of a batch is from
the begin of the first rank to the end of the last one, because ranks that take turns do not begin
together. All processes of a host read the same clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..gpu import synchronizer

Interval = tuple[float, float]  # begin and end in seconds of the host's clock
# Runs this number of batches of this number of calls; returns the seconds of each batch.
RunBatches = Callable[[int, int], list[float]]

# Least seconds of a batch: some time slices of each rank if there are more ranks than cores.
_BATCH_SECONDS = 20e-3
# Largest number of calls in a batch.
_MOST_CALLS = 4096


def timed_batches(
    elements: int,
    device: torch.device,
    batches: int,
    calls: int,
    group: Any = None,
    reduces: bool = True,
) -> list[Interval]:
    """Run the batches on this rank, after an untimed call whose result is checked.

    With `reduces=False` the backend does nothing, and nothing is checked.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    tensor = torch.full((elements,), 1.0 + rank, device=device)
    dist.all_reduce(tensor, group=group)
    if reduces and not bool((tensor == world * (world + 1) / 2).all()):
        raise AssertionError(f"all_reduce of {elements} elements is wrong on rank {rank}")
    tensor.zero_()
    synchronize = synchronizer([device])
    intervals = []
    for _ in range(batches):
        synchronize()
        dist.barrier(group)
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor, group=group)
        synchronize()
        intervals.append((begin, time.perf_counter()))
    return intervals


def seconds_of(of_ranks: Sequence[Sequence[Interval]]) -> list[float]:
    """Return the seconds of each batch on all ranks.

    >>> seconds_of([[(1.0, 4.0)], [(2.0, 6.0)]])
    [5.0]
    """
    return [
        max(end for _, end in batch) - min(begin for begin, _ in batch)
        for batch in zip(*of_ranks, strict=True)
    ]


class BatchSampler:
    """Samples the seconds of a call, as the mean over a batch; the first use sizes the batch."""

    def __init__(self, run: RunBatches) -> None:
        self._run = run
        self._calls = 0

    def __call__(self, batches: int) -> list[float]:
        if not self._calls:
            self._size()
        return [seconds / self._calls for seconds in self._run(batches, self._calls)]

    def _size(self) -> None:
        calls = 1
        while (took := self._run(1, calls)[0]) < _BATCH_SECONDS and calls < _MOST_CALLS:
            wanted = int(1.2 * calls * _BATCH_SECONDS / took)
            calls = min(_MOST_CALLS, max(2 * calls, min(wanted, 16 * calls)))
        self._calls = calls
