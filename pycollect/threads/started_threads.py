"""Threads that a rank starts belong to the rank: they have its process groups and environment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _C
from .._thread_count import set_thread_count


def _with_turn(scheduler: _C.RankScheduler, wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return `wait`, after which a rank that has lost its turn in it waits for the next one."""

    def wait_of_rank(*args: Any, **options: Any) -> Any:
        try:
            return wait(*args, **options)
        finally:
            scheduler.regain_turn()

    return wait_of_rank


@contextmanager
def threads_of_ranks(scheduler: _C.RankScheduler) -> Iterator[None]:
    """Hand the rank on to every `threading.Thread` that it starts.

    A rank that waits for a thread, or in Python's conditions, events and queues, continues when it
    has a turn.
    """
    start = threading.Thread.start

    def start_of_rank(self: threading.Thread) -> None:
        rank = scheduler.rank_of_thread()
        if rank < 0 or self.ident is not None:  # a second start raises
            return start(self)
        run, thread_count = self.run, torch.get_num_threads()
        helper = scheduler.add_helper(rank)  # it counts before its thread runs

        def run_of_rank() -> None:
            scheduler.become(helper)
            try:
                set_thread_count(thread_count)
                with torch.autograd.set_multithreading_enabled(False):
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

    replaced: list[tuple[Any, str, Any]] = [
        (threading.Thread, "start", start_of_rank),
        (threading.Thread, "join", _with_turn(scheduler, threading.Thread.join)),
        (threading.Condition, "wait", _with_turn(scheduler, threading.Condition.wait)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
