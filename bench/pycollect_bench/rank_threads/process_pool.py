"""Processes that are started once and run batches of calls on request, idle between their turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from pycollect._timing import no_garbage_collection

from .spawned import started
from .timed_calls import Interval, seconds_of, timed_batches

GLOO, OURS = "gloo", "pycollect"
# Timeout in seconds for an answer; the first one includes the start of the processes.
_ANSWER_SECONDS = 180.0
# Timeout of one of pycollect's calls, without the start.
_CALL_LIMIT = timedelta(seconds=30)


@dataclass(frozen=True)
class BatchRequest:
    """Batches of calls with one backend."""

    backend: str
    elements: int
    batches: int
    calls: int


Pipe = Connection  # carries requests to a rank, and its answers back


def _serve(pipes: Sequence[Pipe[Any, Any]], rank: int, world: int, device: torch.device) -> None:
    """Answer requests until None arrives: each with intervals, or with the text of an error."""
    pipe = pipes[rank]
    ours = dist.new_group(backend=OURS, timeout=_CALL_LIMIT)
    groups: Mapping[str, Any] = MappingProxyType({GLOO: None, OURS: ours})
    while request := pipe.recv():
        try:
            asked = (request.elements, device, request.batches, request.calls)
            with no_garbage_collection():  # as in the process of the other ways
                intervals = timed_batches(*asked, groups[request.backend])
            pipe.send(intervals)
        except Exception as error:
            pipe.send(f"rank {rank}: {type(error).__name__}: {error}")
            raise


class ProcessPool:
    """The connections to the processes."""

    def __init__(self, pipes: Sequence[Pipe[Any, Any]], sentinels: Sequence[int]) -> None:
        self._pipes, self._sentinels = pipes, sentinels

    def run(self, backend: str, elements: int, batches: int, calls: int) -> list[float]:
        """Return the seconds of each batch on all ranks.

        Raises:
            RuntimeError: if a rank fails, ends, or does not answer in time.
        """
        try:
            for pipe in self._pipes:
                pipe.send(BatchRequest(backend, elements, batches, calls))
        except BrokenPipeError:
            raise RuntimeError("a rank has ended") from None
        return seconds_of([self._answer(pipe) for pipe in self._pipes])

    def _answer(self, pipe: Pipe[Any, Any]) -> list[Interval]:
        ready = wait([pipe, *self._sentinels], _ANSWER_SECONDS)
        if pipe not in ready:
            raise RuntimeError("a rank ended" if ready else "a rank did not answer")
        answer = pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        intervals: list[Interval] = answer
        return intervals

    def end(self) -> None:
        """Ask the processes to end, those that still run."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)


@contextmanager
def started_pool(world: int, device: torch.device) -> Iterator[ProcessPool]:
    """Start the processes, which have a group of gloo and one of pycollect; end them afterwards."""
    context = torch.multiprocessing.get_context("spawn")
    both_ends = [context.Pipe() for _ in range(world)]
    ours, theirs = ([ends[i] for ends in both_ends] for i in (0, 1))
    with started(partial(_serve, theirs), world, GLOO, device) as processes:
        for pipe in theirs:
            pipe.close()
        pool = ProcessPool(ours, processes.sentinels)
        yield pool
        pool.end()
