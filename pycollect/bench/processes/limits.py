"""What no contestant can be faster than: as many bytes as must move, moved by nothing but that."""

from __future__ import annotations

import os

import torch

from .cases import ProcessCase
from .contestant import Contestant
from .meeting import Meeting

MEMORY, MEMCPY = "memory", "memcpy"
LIMITS = (MEMORY, MEMCPY)


def limits(case: ProcessCase, meeting: Meeting) -> list[Contestant]:
    """Return the limit of this case, if one is known: none is between several GPUs."""
    if not case.on_gpus:
        return [_memory(case, meeting)]
    return [_memcpy(case, meeting.rank)] if case.one_memory else []


def _memory(case: ProcessCase, meeting: Meeting) -> Contestant:
    """In place it reads and writes every byte: half as many elements as bytes must move."""
    flat = torch.ones(case.minimum_bytes // case.world // 8)
    # Ranks that share a core multiply one after the other, and it has taken as long as all of them.
    crowded = case.world > len(os.sched_getaffinity(0))

    def multiply() -> None:
        flat.mul_(1.0)
        if crowded:
            meeting.barrier()

    def rewrite(value: int) -> None:
        flat.fill_(1.0)

    return Contestant(MEMORY, "limit", multiply, rewrite, None, True)


def _memcpy(case: ProcessCase, rank: int) -> Contestant:
    """Rank 0 copies, on the GPU that all share, while the others leave it alone."""
    nbytes = case.minimum_bytes // 2 if rank == 0 else 0
    source, target = (
        torch.zeros(nbytes, dtype=torch.uint8, device=case.devices[rank]) for _ in range(2)
    )

    def copy() -> None:
        target.copy_(source)

    def rewrite(value: int) -> None:
        source.fill_(value)

    return Contestant(MEMCPY, "limit", copy, rewrite, None, True)
