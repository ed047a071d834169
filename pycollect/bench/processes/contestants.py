"""Who takes part between processes: torch.distributed over several backends, and MPI's own calls.

All are called on the same tensors, but for `zero-copy`, whose tensors lie in the group's shared
memory, and `symm_mem`. The limit is `memory`: every rank multiplies its share of the bytes in
place; of ranks on one GPU `memcpy`: rank 0 copies as many bytes on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import pycollect

from ..cases import Call
from .cases import COLLECTIVES, Buffers, ProcessCase
from .contestant import Contestant
from .groups import (
    GLOO,
    MPI,
    NCCL,
    OURS,
    RUNG,
    SYMM_MEM,
    ZERO_COPY,
    shared_empty,
    symm_mem_call,
)
from .limits import limits
from .meeting import Meeting
from .place import Place

PEERS = (GLOO, MPI)
DEVICE_PEERS = (GLOO, NCCL, SYMM_MEM)
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
_Make = Callable[[], tuple[Buffers, Call]]
# How late one rank comes to a barrier that is checked.
_LATE = 0.01


@dataclass
class Ranks:
    """What one rank's process has: the others, by each of the ways to reach them.

    `refusals` says of a way that is not there why. `apart`: both clocks are wanted.
    """

    meeting: Meeting
    groups: dict[str, Any] = field(default_factory=dict)
    mpi: Any = None
    refusals: dict[str, str] = field(default_factory=dict)
    apart: bool = False


class Entry:
    """The contestants of one case on this rank, and why the others cannot run."""

    def __init__(self, case: ProcessCase, ranks: Ranks, names: tuple[str, ...]) -> None:
        self.case, self.ranks = case, ranks
        self.found: list[Contestant] = []
        self.not_run: dict[str, str] = {}
        self._device = case.devices[ranks.meeting.rank]
        self._plain = Buffers(case, ranks.meeting.rank, self._empty)
        ways = {
            ZERO_COPY: self._zero_copy,
            MPI: self._through_mpi,
            SYMM_MEM: self._through_symm_mem,
        }
        for name in names:
            if name != ZERO_COPY or case.count:
                self._try(name, ways.get(name, partial(self._through_torch, name)))
        if case.nbytes >= LEAST_FOR_LIMIT:
            self.found += limits(case, ranks.meeting)

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)

    def _group(self, name: str) -> Any:
        if name not in self.ranks.groups:
            raise ValueError(self.ranks.refusals[name])
        return self.ranks.groups[name]

    def _through_torch(self, name: str) -> tuple[Buffers, Call]:
        group = self._group(name)
        return self._plain, COLLECTIVES[self.case.collective].call(self._plain, group)

    def _zero_copy(self) -> tuple[Buffers, Call]:
        group = self._group(OURS)
        empty = shared_empty(group, self._device)
        buffers = Buffers(self.case, self.ranks.meeting.rank, empty)
        return buffers, COLLECTIVES[self.case.collective].call(buffers, group)

    def _through_mpi(self) -> tuple[Buffers, Call]:
        case, mpi = self.case, self.ranks.mpi
        if mpi is None:
            raise ValueError(self.ranks.refusals[MPI])
        if case.dtype not in _MPI_TYPES or case.op not in ("sum", "none"):
            raise ValueError(f"is asked for sums of C's types only, not {case.op} of {case.dtype}")
        of = getattr(mpi, _MPI_TYPES[case.dtype])
        return self._plain, COLLECTIVES[case.collective].mpi(self._plain, mpi, of)

    def _through_symm_mem(self) -> tuple[Buffers, Call]:
        self._group(SYMM_MEM)
        return symm_mem_call(self.case, self.ranks.meeting.rank)

    def _try(self, name: str, make: _Make) -> None:
        """Add it unless it refuses the case on some rank, as all do alike."""
        refusal = ""
        try:
            buffers, call = make()
            call()
            Place(self._device).synchronize()
        except pycollect.CollectiveError as error:
            if not name.startswith(RUNG):  # one of these has a group that nobody else needs
                raise
            refusal = reason(error)
        except (TypeError, ValueError, NotImplementedError) as error:
            refusal = reason(error)
        except RuntimeError as error:  # of a peer it is a reason; of what is measured, a failure
            if name == OURS:
                raise
            refusal = reason(error)
        refused = self.ranks.meeting.gather(float(bool(refusal)))
        if any(refused):
            self.not_run[name] = refusal or f"rank {refused.index(1.0)} refused"
            return
        check = partial(buffers.wrong, call)
        if self.case.collective == "barrier":
            check = partial(_early, call, self.ranks.meeting)
        kind = "peer" if name in (*PEERS, *DEVICE_PEERS) else "pycollect"
        self.found.append(Contestant(name, kind, call, buffers.rewrite, check, name == ZERO_COPY))


def reason(error: Exception) -> str:
    """Return one line that says why somebody does not run.

    >>> reason(RuntimeError("NCCL error in: a.cpp:1\\nLast error:\\nDuplicate GPU detected"))
    'NCCL error in: a.cpp:1 ... Duplicate GPU detected'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # What NCCL has to say itself comes last, after where torch called it.
    of_nccl = len(lines) > 1 and lines[0].startswith("NCCL")
    return f"{lines[0]} ... {lines[-1]}" if of_nccl else lines[0]


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
