"""How many threads torch computes with: a number of each Python thread.

`torch.set_num_threads` sets the number of the calling thread, and the one with which new threads
begin.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_thread_count(count: int) -> None:
    """Let the calling thread, and new ones, compute with `count` threads."""
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
