"""Threads that a rank starts belong to the rank: they have its process groups and environment."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .. import _C
from . import torch_internals
from .torch_internals import attributes_replaced

# Modules whose threads do nothing for the rank that happens to start them: as threads of the rank,
# they would hide deadlocks, because they do not wait for other threads.
_OF_THE_PROCESS = ("tqdm._monitor",)


def set_thread_count(count: int) -> None:
    """Let the calling thread, and new ones, compute with `count` threads of torch.

    It is a number of each Python thread; new threads begin with the number that was set last.
    """
    if torch.get_num_threads() != count:  # the first call in a process would start threads
        torch.set_num_threads(count)


@contextmanager
def new_threads_restored() -> Iterator[None]:
    """Afterwards let new threads compute with as many threads as the calling thread does now."""
    count = torch.get_num_threads()
    try:
        yield
    finally:
        new = threading.Thread(target=set_thread_count, args=(count,))
        new.start()
        new.join()


def _rank_finder(scheduler: _C.RankScheduler) -> Callable[[], int]:
    """Return a function that returns the calling thread's rank; -1: none, or a forked process.

    A forked process has no ranks, and its scheduler may be locked for ever.
    """
    process = os.getpid()
    return lambda: scheduler.rank_of_thread() if os.getpid() == process else -1


def _with_turn(
    scheduler: _C.RankScheduler, find_rank: Callable[[], int], wait: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `wait`, after which a rank that has lost its turn in it waits for the next one."""

    def wait_of_rank(*args: Any, **options: Any) -> Any:
        try:
            return wait(*args, **options)
        finally:
            if find_rank() >= 0:
                scheduler.regain_turn()

    return wait_of_rank


def _handing_on(
    scheduler: _C.RankScheduler,
    find_rank: Callable[[], int],
    start: Callable[[threading.Thread], None],
) -> Callable[[threading.Thread], None]:
    """Return `start`, a `Thread.start`, that hands the rank on to the thread."""

    def start_of_rank(self: threading.Thread) -> None:
        rank = find_rank()
        # A second start raises.
        if rank < 0 or self.ident is not None or type(self).__module__ in _OF_THE_PROCESS:
            return start(self)
        run, thread_count = self.run, torch.get_num_threads()
        helper = scheduler.add_helper(rank)  # it counts before its thread runs

        def run_of_rank() -> None:
            scheduler.become(helper)
            try:
                set_thread_count(thread_count)
                with (
                    torch.autograd.set_multithreading_enabled(False),
                    torch_internals.named_groups(),
                ):
                    run()
            finally:
                scheduler.leave_helper()

        self.run = run_of_rank  # type: ignore[method-assign]
        try:
            start(self)
        except RuntimeError as error:
            if type(error) is RuntimeError and self.ident is None:  # there can be no more threads
                scheduler.remove_helper(helper)
            raise

    return start_of_rank


@contextmanager
def threads_of_ranks(scheduler: _C.RankScheduler) -> Iterator[None]:
    """Hand the rank on to every `threading.Thread` that it starts.

    A rank that waits for a thread or a future of torch, or in Python's conditions, events and
    queues, continues when it has a turn.
    """
    find_rank = _rank_finder(scheduler)
    hand_on = partial(_handing_on, scheduler, find_rank)
    with_turn = partial(_with_turn, scheduler, find_rank)
    with attributes_replaced(
        [
            (threading.Thread, "start", hand_on),
            (threading.Thread, "join", with_turn),
            (threading.Condition, "wait", with_turn),
            (torch._C.Future, "wait", with_turn),
        ]
    ):
        yield
