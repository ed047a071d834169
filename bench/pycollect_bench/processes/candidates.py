"""The candidates between processes: torch.distributed over several backends, and MPI itself.

All candidates use the same tensors, except `zero-copy`, whose tensors are in the group's symmetric
memory. The limit is `memory`: every rank multiplies its share of the bytes in place. For ranks on
one GPU it is `memcpy`: rank 0 copies the same bytes on the GPU.
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
from ..gpu import synchronizer
from .candidate import Candidate
from .cases import COLLECTIVES, Buffers, ProcessCase
from .groups import GLOO, MPI, OURS, ZERO_COPY
from .speed_limit import limits
from .spin_barrier import SpinBarrier

PEERS = (GLOO, MPI)
# Least size in bytes for a limit: fewer bytes take no longer than a call through Python and a
# barrier.
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
# Seconds by which the last rank is late in the check of a barrier.
_LATE = 0.01


@dataclass
class RankState:
    """The process groups, barrier page and MPI module of one rank's process.

    `refusals` has the reason for each candidate without a group. With `both_clocks` candidates are
    timed by the host's and by the device's clock.
    """

    spin_barrier: SpinBarrier
    groups: dict[str, Any] = field(default_factory=dict)
    mpi: Any = None
    refusals: dict[str, str] = field(default_factory=dict)
    both_clocks: bool = False


class CandidateSet:
    """The candidates of one case on this rank, and why other candidates do not run."""

    def __init__(self, case: ProcessCase, ranks: RankState, names: tuple[str, ...]) -> None:
        self.case, self.ranks = case, ranks
        self.found: list[Candidate] = []
        self.not_run: dict[str, str] = {}
        self._device = case.devices[ranks.spin_barrier.rank]
        self._plain = Buffers(case, ranks.spin_barrier.rank, self._empty)
        ways = {ZERO_COPY: self._zero_copy, MPI: self._through_mpi}
        for name in names:
            if name != ZERO_COPY or case.count:
                self._try(name, ways.get(name, partial(self._through_torch, name)))
        if case.nbytes >= LEAST_FOR_LIMIT:
            self.found += limits(case, ranks.spin_barrier)

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)

    def _group(self, name: str) -> Any:
        if name not in self.ranks.groups:
            raise ValueError(self.ranks.refusals[name])
        return self.ranks.groups[name]

    def _through_torch(self, name: str) -> tuple[Buffers, Call]:
        group = self._group(name)
        if (name, self.case.collective, self._device.type) == (GLOO, "send_recv", "cuda"):
            # gloo reads GPU memory as host memory, and the failing write ends the process.
            raise ValueError("cannot send CUDA tensors")
        return self._plain, COLLECTIVES[self.case.collective].call(self._plain, group)

    def _zero_copy(self) -> tuple[Buffers, Call]:
        group = self._group(OURS)

        def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
            return pycollect.symmetric_empty(count, dtype=dtype, group=group)

        buffers = Buffers(self.case, self.ranks.spin_barrier.rank, empty)
        return buffers, COLLECTIVES[self.case.collective].call(buffers, group)

    def _through_mpi(self) -> tuple[Buffers, Call]:
        case, mpi = self.case, self.ranks.mpi
        if mpi is None:
            raise ValueError(self.ranks.refusals[MPI])
        if case.dtype not in _MPI_TYPES or case.op not in ("sum", "none"):
            raise ValueError(f"is measured only for sums of C types, not {case.op} of {case.dtype}")
        of = getattr(mpi, _MPI_TYPES[case.dtype])
        return self._plain, COLLECTIVES[case.collective].mpi(self._plain, mpi, of)

    def _try(self, name: str, make: _Make) -> None:
        """Add a candidate, unless it refuses the case on any rank; collective."""
        refusal = ""
        try:
            buffers, call = make()
            call()
            synchronizer([self._device])()
        except (TypeError, ValueError, NotImplementedError) as error:
            refusal = reason(error)
        # The error of a peer is the reason why it does not run; one of pycollect fails the run.
        except RuntimeError as error:
            if name == OURS or isinstance(error, pycollect.CollectiveError):
                raise
            refusal = reason(error)
        refused = self.ranks.spin_barrier.gather(float(bool(refusal)))
        if any(refused):
            self.not_run[name] = refusal or f"rank {refused.index(1.0)} refused"
            return
        check = partial(buffers.wrong, call)
        if self.case.collective == "barrier":
            check = partial(_early, call, self.ranks.spin_barrier)
        kind = "peer" if name in PEERS else "pycollect"
        self.found.append(Candidate(name, kind, call, buffers.rewrite, check, name == ZERO_COPY))


def reason(error: Exception) -> str:
    """Return one line with the reason why a candidate does not run.

    >>> reason(RuntimeError("no connection\\nat a.cpp:1"))
    'no connection'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _early(call: Call, spin_barrier: SpinBarrier) -> int:
    """Return the number of ranks that had not entered the barrier when this rank left it."""
    spin_barrier.gather(0.0)
    if spin_barrier.rank == spin_barrier.world - 1:
        time.sleep(_LATE)
    spin_barrier.publish(1.0)
    call()
    early = sum(number != 1.0 for number in spin_barrier.published())
    spin_barrier.barrier()  # before any rank publishes its next number
    return early
