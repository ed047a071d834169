"""Peers that may hang, measured beside pycollect in separate processes with a time limit.

Their ratios are to pycollect in the same processes and rounds, and are merged into the earlier
result of the case. A peer that hangs is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..comparison import CaseResult, Row
from .groups import NCCL, OURS, SYMM_MEM
from .worker_pool import PoolJob, WorkerPool

# Environment variables that let ranks of these peers share a GPU (experimental).
_SWITCHES = {
    NCCL: ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
    SYMM_MEM: ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1"),
}
ISOLATED = tuple(_SWITCHES)
_SHARING_NCCL = (2, 30)  # the first version of NCCL whose ranks may share a GPU
_nccl: Any = torch.cuda.nccl  # without types in torch
Report = Callable[[CaseResult], None]


def _shares_gpus(job: PoolJob) -> bool:
    return len(set(job.devices)) < job.world


def _peer_job(peer: str, job: PoolJob) -> PoolJob:
    environ = (_SWITCHES[peer],) if _shares_gpus(job) else ()
    job = replace(job, ours=(OURS,), peers=(peer,), cases=job.cases[: job.requested])
    return replace(job, environ=environ)


def _refusal_of(peer: str, job: PoolJob) -> str:
    """Return the reason why the peer cannot run, or "" if it can."""
    if any(device.type != "cuda" for device in job.devices):
        return "needs every rank on a GPU"
    if peer == NCCL and not torch.distributed.is_nccl_available():
        return "this torch has no NCCL"
    if peer == NCCL and _shares_gpus(job) and (version := _nccl.version()) < _SHARING_NCCL:
        return f"NCCL {'.'.join(map(str, version))} allows one rank per GPU"
    return ""


class Isolated:
    """Runs the peers that may hang; `seconds` is the limit of each case, with the process start."""

    def __init__(self, seconds: float, report: Report) -> None:
        self._seconds, self._report = seconds, report
        self._refusals: dict[str, str] = {}

    def join(self, peer: str, job: PoolJob, results: Sequence[CaseResult]) -> list[CaseResult]:
        """Return the results of the requested cases, merged with those of this peer."""
        joined: list[CaseResult] = []
        refusal = self._refusals.get(peer) or _refusal_of(peer, job)
        try:
            if not refusal:
                with WorkerPool(_peer_job(peer, job)) as worker_pool:
                    self._collect(worker_pool, peer, results, joined)
        except (RuntimeError, TimeoutError) as error:
            refusal = str(error).strip().splitlines()[-1]
            self._refusals[peer] = f"{refusal} ({job.world} ranks)"
        rest = results[len(joined) :]
        if rest:
            self._report(replace(rest[0], rows=[], not_run={peer: refusal}))
        return joined + [replace(r, not_run={**r.not_run, peer: refusal}) for r in rest]

    def _collect(
        self,
        worker_pool: WorkerPool,
        peer: str,
        results: Sequence[CaseResult],
        joined: list[CaseResult],
    ) -> None:
        refusal = ""
        for result in results:
            try:
                found = worker_pool.result(self._seconds)
            except TimeoutError:
                raise TimeoutError(f"did not answer within {self._seconds:g} s") from None
            self._report(found)
            # After the same refusal of two successive sizes, assume it for all sizes.
            refusal, before = found.not_run.get(peer, ""), refusal
            if refusal and refusal == before:
                raise RuntimeError(refusal)
            joined.append(_merged(result, found, peer))
        worker_pool.abandon()  # the processes may hang when they end


def _is_of(row: Row, name: str) -> bool:
    return row.name.split(":")[0] == name


def _merged(result: CaseResult, found: CaseResult, peer: str) -> CaseResult:
    """Return the result with the rows of the peer, and its ratios in pycollect's rows."""
    beside = {row.clock: row for row in found.rows if _is_of(row, OURS)}
    rows = []
    for row in result.rows:
        other = beside.get(row.clock) if _is_of(row, OURS) else None
        ratio = other.speedup.get(peer) if other else None
        rows.append(replace(row, speedup={**row.speedup, peer: ratio}) if ratio else row)
    rows += [row for row in found.rows if _is_of(row, peer)]
    refused = {k: v for k, v in found.not_run.items() if k == peer}
    return replace(result, rows=rows, not_run={**result.not_run, **refused})
