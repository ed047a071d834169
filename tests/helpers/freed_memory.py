"""Notices writes into memory that its owner has freed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

BLOCK = 70_000  # bytes: the profiler of torch frees its events in blocks of 77,840
BLOCKS = 300


@contextlib.contextmanager
def changes_of_freed_memory() -> Iterator[Callable[[], int]]:
    """Allocates what has been freed; yields a function that counts the blocks that changed since.

    A write may miss the blocks, so callers repeat what they test.
    """
    blocks = [bytes(BLOCK) for _ in range(BLOCKS)]
    yield lambda: sum(block.count(0) != BLOCK for block in blocks)
