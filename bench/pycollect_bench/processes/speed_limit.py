"""The limit that no candidate can exceed: the time to move the least number of bytes."""

from __future__ import annotations

import os

import torch

from .candidate import Candidate
from .cases import ProcessCase
from .spin_barrier import SpinBarrier

MEMORY, MEMCPY = "memory", "memcpy"
LIMITS = (MEMORY, MEMCPY)


def limits(case: ProcessCase, spin_barrier: SpinBarrier) -> list[Candidate]:
    """Return the limit of this case, or nothing for ranks on several GPUs."""
    if not case.on_gpus:
        return [_memory(case, spin_barrier)]
    return [_memcpy(case, spin_barrier.rank)] if case.one_memory else []


def _memory(case: ProcessCase, spin_barrier: SpinBarrier) -> Candidate:
    """Return the limit on CPUs: each rank multiplies its share in place, 8 bytes per float32."""
    flat = torch.ones(case.minimum_bytes // case.world // 8)
    # Ranks that share a core multiply one after the other, and the limit is the time of all ranks.
    crowded = case.world > len(os.sched_getaffinity(0))

    def multiply() -> None:
        flat.mul_(1.0)
        if crowded:
            spin_barrier.barrier()

    def rewrite(value: int) -> None:
        flat.fill_(1.0)

    return Candidate(MEMORY, "limit", multiply, rewrite, None, True)


def _memcpy(case: ProcessCase, rank: int) -> Candidate:
    """Return the limit on one GPU: rank 0 copies the bytes, the other ranks are idle."""
    nbytes = case.minimum_bytes // 2 if rank == 0 else 0
    source, target = (
        torch.zeros(nbytes, dtype=torch.uint8, device=case.devices[rank]) for _ in range(2)
    )

    def copy() -> None:
        target.copy_(source)

    def rewrite(value: int) -> None:
        source.fill_(value)

    return Candidate(MEMCPY, "limit", copy, rewrite, None, True)
