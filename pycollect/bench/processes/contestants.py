"""Who takes part between processes: torch.distributed over two backends, and MPI's own calls.

All are called on the same tensors, but for `zero-copy`, whose tensors lie in the group's shared
memory. The limit is `memory`: every rank multiplies its share of the bytes in place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import pycollect

from ..cases import Call
from .cases import COLLECTIVES, Buffers, ProcessCase
from .meeting import Meeting

OURS, ZERO_COPY, GLOO, MPI, MEMORY = "pycollect", "zero-copy", "gloo", "mpi", "memory"
PEERS = (GLOO, MPI)
# Below it a call through Python and a meeting cost as much as the bytes: no limit is known.
LEAST_FOR_LIMIT = 256 << 10
_MPI_TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}
# How late one rank comes to a barrier that is checked.
_LATE = 0.01


@dataclass
class Ranks:
    """What one rank's process has: the others, by each of the ways to reach them.

    `refusals` says of a way that is not there why.
    """

    meeting: Meeting
    groups: dict[str, Any] = field(default_factory=dict)
    mpi: Any = None
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contestant:
    """`checked` returns the number of this rank's wrong elements after one call."""

    name: str
    kind: str
    call: Call
    rewrite: Callable[[int], None]
    checked: Callable[[], int] | None
    always_rewritten: bool = False


class Entry:
    """The contestants of one case on this rank, and why the others cannot run."""

    def __init__(self, case: ProcessCase, ranks: Ranks, peers: tuple[str, ...]) -> None:
        self.case, self.ranks = case, ranks
        self.found: list[Contestant] = []
        self.not_run: dict[str, str] = {}
        self._plain = Buffers(case, ranks.meeting.rank, _torch_empty)
        for name, kind, make in self._candidates():
            if name in (OURS, ZERO_COPY) or name in peers:
                self._try(name, kind, make)
        if case.nbytes >= LEAST_FOR_LIMIT:
            self.found.append(_memory(case, ranks.meeting))

    def _candidates(self) -> Iterator[tuple[str, str, Callable[[], tuple[Buffers, Call]]]]:
        yield OURS, "pycollect", partial(self._through_torch, OURS)
        if self.case.count:
            yield ZERO_COPY, "pycollect", self._zero_copy
        yield GLOO, "peer", partial(self._through_torch, GLOO)
        yield MPI, "peer", self._through_mpi

    def _group(self, name: str) -> Any:
        if name not in self.ranks.groups:
            raise ValueError(self.ranks.refusals[name])
        return self.ranks.groups[name]

    def _through_torch(self, name: str) -> tuple[Buffers, Call]:
        group = self._group(name)
        return self._plain, COLLECTIVES[self.case.collective].call(self._plain, group)

    def _zero_copy(self) -> tuple[Buffers, Call]:
        group = self._group(OURS)
        buffers = Buffers(self.case, self.ranks.meeting.rank, shared_empty(group))
        return buffers, COLLECTIVES[self.case.collective].call(buffers, group)

    def _through_mpi(self) -> tuple[Buffers, Call]:
        case, mpi = self.case, self.ranks.mpi
        if mpi is None:
            raise ValueError(self.ranks.refusals[MPI])
        if case.dtype not in _MPI_TYPES or case.op not in ("sum", "none"):
            raise ValueError(f"is asked for sums of C's types only, not {case.op} of {case.dtype}")
        of = getattr(mpi, _MPI_TYPES[case.dtype])
        return self._plain, COLLECTIVES[case.collective].mpi(self._plain, mpi, of)

    def _try(self, name: str, kind: str, make: Callable[[], tuple[Buffers, Call]]) -> None:
        """Add it unless it refuses the case on some rank, as all do alike."""
        refusal = ""
        try:
            buffers, call = make()
            call()
        except pycollect.CollectiveError:
            raise
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            refusal = str(error).strip().split("\n")[0] or type(error).__name__
        refused = self.ranks.meeting.gather(float(bool(refusal)))
        if any(refused):
            self.not_run[name] = refusal or f"rank {refused.index(1.0)} refused"
            return
        check = partial(buffers.wrong, call)
        if self.case.collective == "barrier":
            check = partial(_early, call, self.ranks.meeting)
        self.found.append(Contestant(name, kind, call, buffers.rewrite, check, name == ZERO_COPY))


def _torch_empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype)


def shared_empty(group: Any) -> Callable[[int, torch.dtype], torch.Tensor]:
    """Return what allocates a tensor in the group's shared memory.

    Raises:
        NotImplementedError: if this build has no such tensors.
    """
    empty = getattr(pycollect, "empty", None)
    if empty is None:
        raise NotImplementedError("this build has no tensors in shared memory")

    def allocate(count: int, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = empty(count, dtype=dtype, group=group)
        return tensor

    return allocate


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


def _early(call: Call, meeting: Meeting) -> int:
    """The number of ranks that had not come to the barrier when this one left it."""
    meeting.gather(0.0)
    if meeting.rank == meeting.world - 1:
        time.sleep(_LATE)
    meeting.post(1.0)
    call()
    early = sum(number != 1.0 for number in meeting.posted())
    meeting.barrier()  # before anybody posts the next number
    return early


def make_groups(backend: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the two groups of all ranks, and why one of them is missing.

    The default group is gloo's already.
    """
    groups: dict[str, Any] = {GLOO: dist.group.WORLD}
    refusals: dict[str, str] = {}
    if dist.is_backend_available(backend):
        groups[OURS] = dist.new_group(backend=backend)
    else:
        refusals[OURS] = f"torch.distributed knows no backend {backend!r}"
    return groups, refusals
