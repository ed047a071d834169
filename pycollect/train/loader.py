"""Batches of examples, shuffled by seed and epoch alone, and prepared ahead of the training step.

Preparation is fetching (for files: decoding), pinning and the copy to the GPU. With `prefetch=n`
threads keep n batches prepared or in preparation; order and bits are the same as without.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .data import Examples, count, fetch
from .options import Options
from .random_states import mixed_seed

# Largest number of loader threads. A thread prepares whole batches; more threads than cores would
# only wait for each other.
_MOST_WORKERS = os.cpu_count() or 1


def batch_indices(options: Options, examples: int, epoch: int = 1) -> list[Tensor]:
    """Return the indices of every batch of one epoch; the last may be smaller, or is dropped.

    The indices are int64 tensors [k] of numbers from 0 to `examples` - 1; `epoch` counts from 1.
    The order depends on seed and epoch alone, so a run can be resumed anywhere. Raises ValueError
    if `drop_last` leaves none.

    >>> [len(indices) for indices in batch_indices(Options(batch_size=4).resolved(None), 11)]
    [4, 4, 3]
    """
    if options.shuffle:
        # All epochs and neighbouring seeds get different orders.
        generator = torch.Generator().manual_seed(mixed_seed(options.seed, epoch))
        order = torch.randperm(examples, generator=generator)
    else:
        order = torch.arange(examples)
    batches = list(torch.split(order, options.batch_size))
    if options.drop_last and len(batches[-1]) < options.batch_size:
        batches.pop()
    if not batches:
        raise ValueError(
            f"drop_last leaves no batch: there are {examples} examples and a batch has "
            f"{options.batch_size}; make the batch smaller"
        )
    return batches


Shards: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]  # images and labels of every rank


@dataclass(frozen=True)
class Batch:
    """A batch of a `Loader`, or this process's part of it.

    `X` has the images [k, C, H, W] and `y` the labels [k], on the CPU, with the dtypes of the data
    set. `examples` is the number of examples in the whole batch, of all processes. `shards` is
    None, or the images and the labels of every rank, (X, y), already on the ranks' devices.
    `waited` is the seconds that the training loop waited for this batch.
    """

    X: Tensor
    y: Tensor
    examples: int
    shards: Shards | None = None
    waited: float = 0.0


_Prepared: TypeAlias = tuple[Batch, Sequence[tuple[torch.device, Any]]]  # (GPU, event of its copy)


class Loader:
    """Yields the batches of an epoch, with some of them prepared ahead.

    `examples` is a pair of tensors, images [n, C, H, W] and labels [n], or a map-style data set,
    and `options` are those of a run, filled in, of which it takes batch size, seed, shuffle,
    drop_last and prefetch. `devices` are those of the ranks of this process (default: none). If
    there are GPUs among them, a batch that is prepared ahead is in pinned memory.

    If `shares` is given, a function from the number of examples of a batch to that of every rank,
    the shards of a batch that is prepared ahead are also copied to their GPUs, on side streams
    while other streams compute; measured shares are not known ahead and do not allow this. `part`
    selects a rank's part of a batch's indices if a process has one rank; the rest is never fetched.
    `part` is called in the order of the batches, in the caller's thread, with the number of steps
    before that batch's step. An exception in a worker is raised when its batch is requested. When
    the iteration ends, in any way, no thread is left.

    >>> examples = torch.arange(5.0)[:, None], torch.arange(5)
    >>> options = Options(batch_size=2, shuffle=False, prefetch=2).resolved(None)
    >>> loader = Loader(examples, options)
    >>> [batch.y.tolist() for batch in loader.epoch(1)]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        examples: Examples,
        options: Options,
        *,
        devices: Sequence[torch.device] = (),
        shares: Callable[[int], Sequence[int]] | None = None,
        part: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        self._examples, self._options = examples, options
        self._devices, self._shares = tuple(devices), shares
        self._part = part or (lambda indices, steps: indices)
        self._gpus = [d for d in dict.fromkeys(devices) if d.type == "cuda"]
        self._sides: dict[torch.device, Any] = {}

    def examples(self, number: int = 1) -> list[int]:
        """Return the sizes of the whole batches of an epoch, over all ranks."""
        return [len(indices) for indices in self._batches(number)]

    def _batches(self, number: int) -> list[Tensor]:
        return batch_indices(self._options, count(self._examples), number)

    def epoch(self, number: int = 1, start: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of epoch `number`, from 1, beginning with batch `start`, from 0.

        Raises ValueError if `drop_last` leaves no batch, or images of a batch differ in shape, and
        TypeError for images that are not tensors.
        """
        order = self._batches(number)[start:]
        prefetch = min(self._options.prefetch, len(order))
        # Examples in memory need one thread; decoding files benefits from several.
        workers = 1 if isinstance(self._examples, tuple) else min(max(1, prefetch), _MOST_WORKERS)
        if prefetch and self._shares is not None and not self._sides:
            self._sides = {gpu: torch.cuda.Stream(gpu) for gpu in self._gpus}  # type: ignore[no-untyped-call]
        pending: deque[Callable[[], _Prepared]] = deque()
        pool = ThreadPoolExecutor(workers, "pycollect-loader")  # starts no thread by itself
        begin = time.perf_counter()
        try:
            for step in range(-prefetch, len(order)):
                if 0 <= (new := step + prefetch) < len(order):
                    mine = self._part(order[new], new - max(step, 0))
                    work = partial(self._prepare, order[new], mine)
                    pending.append(pool.submit(work).result if prefetch else work)
                if step >= 0:
                    batch = self._arrived(*pending.popleft()())
                    yield replace(batch, waited=time.perf_counter() - begin)
                    begin = time.perf_counter()
        finally:
            pool.shutdown(cancel_futures=True)

    def _prepare(self, indices: Tensor, mine: Tensor) -> _Prepared:
        """Fetch a batch, in a worker thread if it is ahead, and start its copies to the GPUs."""
        if len(mine):
            X, y = fetch(self._examples, mine)
        else:  # an empty part gets its shape from the batch's first example
            X, y = (tensor[:0] for tensor in fetch(self._examples, indices[:1]))
        if not self._gpus or not self._options.prefetch:
            return Batch(X, y, len(indices)), []
        X, y = X.pin_memory(), y.pin_memory()
        if self._shares is None:
            return Batch(X, y, len(indices)), []
        shares = list(self._shares(len(X)))
        shards = self._to_devices(X, shares), self._to_devices(y, shares)
        arrivals = [(gpu, side.record_event()) for gpu, side in self._sides.items()]
        return Batch(X, y, len(indices), shards), arrivals

    def _to_devices(self, whole: Tensor, shares: list[int]) -> list[Tensor]:
        """Start the copies of a pinned batch to the GPUs; shards of CPU ranks are not copied."""
        copies = []
        for device, shard in zip(self._devices, torch.split(whole, shares), strict=True):
            with torch.cuda.stream(self._sides.get(device)):  # None for a CPU: changes nothing
                copies.append(shard.to(device, non_blocking=True))
        return copies

    def _arrived(self, batch: Batch, arrivals: Sequence[tuple[torch.device, Any]]) -> Batch:
        """Let the current streams wait for the copies to the GPUs, and return the batch."""
        for device, arrived in arrivals:
            torch.cuda.current_stream(device).wait_event(arrived)
        for shard in (shard for part in batch.shards or () for shard in part):
            if shard.device.type == "cuda":  # keeps the allocator from reusing the memory early
                shard.record_stream(torch.cuda.current_stream(shard.device))
        return batch
