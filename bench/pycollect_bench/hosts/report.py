"""The printed table and the record of a run between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import pycollect as pc

from ..cases import Case
from ..comparison import CaseResult, Row
from ..record import case_record
from ..table import Column, gigabytes_per_second
from ..table import columns as usual_columns
from .candidates import LINK
from .comparison import HostRow
from .groups import FAST, GLOO, OURS
from .pool import HostJob

LEGEND = """\
# Hosts are network namespaces of this machine. A process per rank; times are of one call through
# Python, on the slowest rank. Before each timed call every rank rewrites its buffer, and all pass a
# barrier in shared memory; up to 16 KiB calls are timed in batches. The candidates take turns.
# hsdp: reduce_scatter in a pycollect group of the host, all_reduce of the shard over gloo between
# the hosts, all_gather in the group of the host. link: one send of S bytes by gloo from the first
# host to the second. %limit: relative to link. xgloo: gloo's time divided by this candidate's.
# first: the first call of this size. out/S, in/S: bytes of a call on the link, with headers, that a
# host sends and receives, on the host with most, divided by the size; least/S: the lower bound.
# model: the seconds that pycollect.plan(...).predict() says, divided by the time.
# #wrong: elements that differ from the exact result; of pycollect's reductions also those that
# differ in a bit from the fold of random values in rank order."""
# Share of the rate by which the sends may miss it before a warning. Headers take 4 %.
_MOST_MISSED = 0.12
# Least size in bytes of a send that measures the rate: for fewer the token bucket is too large.
_LEAST_FOR_RATE = 1 << 20

# Of a machine with fewer cores than ranks, which therefore take turns: fitted to one of two cores,
# on which every wait takes a turn and sends reach four fifths of the rate of a link.
_MODEL = pc.CostModel(alpha=100e-6, port=8e9, memory=10e9, latency=500e-6)
_SHARE_OF_RATE = 0.8
_LEAST_FOR_MODEL = 1 << 20  # bytes
_REDUCTIONS = ("all_reduce", "reduce_scatter_tensor")
# The names of collectives in pycollect.plan, if other ones.
_PLANNED = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}

# Bytes of a call that cross the link of the busiest host in its busier direction, at least, divided
# by the size, for this number of hosts and ranks of a host. Hosts reduce before they send.
LEAST: dict[str, Callable[[int, int], float]] = {
    "all_reduce": lambda hosts, ranks: 2 * (hosts - 1) / hosts,
    "broadcast": lambda hosts, ranks: 1,
    "all_gather_into_tensor": lambda hosts, ranks: (hosts - 1) / hosts,
    "reduce_scatter_tensor": lambda hosts, ranks: (hosts - 1) / hosts,
    "all_to_all_single": lambda hosts, ranks: ranks * (hosts - 1) / hosts,
    "send_recv": lambda hosts, ranks: ranks,
}


def least(job: HostJob, case: Case, row: Row) -> float:
    """Return the lower bound of the bytes of a call on a link, divided by the size."""
    return 1 if row.name == LINK else LEAST[case.collective](job.hosts, job.ranks_per_host)


def predicted(job: HostJob, case: Case, row: Row) -> float | None:
    """Return the predicted seconds of a call; None for a peer, and where the model is no use."""
    is_ours = row.name in (OURS, FAST) and case.collective != "send_recv"
    is_planned = is_ours and case.dtype == torch.float32
    if not is_planned or not job.rate or case.nbytes < _LEAST_FOR_MODEL:
        return None
    plan = pc.plan(
        _PLANNED.get(case.collective, case.collective),
        hosts=(job.ranks_per_host,) * job.hosts,
        nbytes=case.nbytes,
        algorithm="host_direct" if row.name == FAST and case.collective in _REDUCTIONS else None,
    )
    return plan.predict(replace(_MODEL, network=_SHARE_OF_RATE * job.rate / 8))


def gigabits(rate: float | None) -> str:
    """Return a rate in Gbit/s as text.

    >>> gigabits(2.5e9), gigabits(None)
    ('2.5', 'none')
    """
    return "none" if rate is None else f"{rate / 1e9:g}"


def columns(job: HostJob) -> list[Column]:
    """Return the columns of a job's table."""
    usual = {column.head: column for column in usual_columns(False, (GLOO,))}
    shape = f"{job.hosts}x{job.ranks_per_host}"

    def share(bytes_of: Callable[[HostRow], Sequence[float]]) -> Callable[[Case, Row], str]:
        def text(case: Case, row: Row) -> str:
            assert isinstance(row, HostRow)
            return f"{max(bytes_of(row)) / case.nbytes:.2f}"

        return text

    return [
        Column("ranks", "", 6, lambda case, row: shape),
        Column("link", "(Gb/s)", 6, lambda case, row: gigabits(job.rate)),
        *(usual[head] for head in ("size", "type")),
        Column("peer", "", -9, lambda case, row: row.name),
        *(usual[head] for head in ("time", "p99")),
        Column("first", "(ms)", 8, lambda case, row: _first(row)),
        *(usual[head] for head in ("algbw", "%limit", f"x{GLOO}")),
        Column("out/S", "", 6, share(lambda row: row.sent)),
        Column("in/S", "", 6, share(lambda row: row.received)),
        Column("least/S", "", 7, lambda case, row: f"{least(job, case, row):.2f}"),
        Column("model", "", 6, partial(_model, job)),
        usual["#wrong"],
    ]


def _model(job: HostJob, case: Case, row: Row) -> str:
    seconds = predicted(job, case, row)
    return "-" if seconds is None else f"{seconds / row.timing.percentile(50):.2f}"


def _first(row: Row) -> str:
    first = getattr(row, "first", None)
    return "-" if first is None else f"{first * 1e3:.2f}"


def link_rate(results: Sequence[CaseResult]) -> tuple[int, float] | None:
    """Return the size of the largest send, and the bits per second that its median moved."""
    found = max(results, key=lambda result: result.case.nbytes, default=None)
    row = found.row(LINK) if found else None
    if found is None or row is None or found.case.nbytes < _LEAST_FOR_RATE:
        return None
    return found.case.nbytes, 8e9 * gigabytes_per_second(found.case.nbytes, row.timing)


def link_lines(job: HostJob, results: Sequence[CaseResult]) -> list[str]:
    """Return a line with the measured rate of the link, and a warning if it is not the wanted."""
    measured = link_rate(results)
    if measured is None:
        return []
    nbytes, rate = measured
    wanted = f"of {gigabits(job.rate)}" if job.rate else "without a limit"
    out = [f"# link: sends of {nbytes} bytes move {rate / 1e9:.2f} Gbit/s {wanted}"]
    if job.rate and abs(rate / job.rate - 1) > _MOST_MISSED:
        out.append("# WARNING: this machine does not reach the rate of the link, or exceeds it")
    return out


def world_record(job: HostJob, results: Sequence[CaseResult]) -> dict[str, Any]:
    """Return the cases of one job."""
    measured = link_rate(results)
    return {
        "hosts": job.hosts,
        "ranks_per_host": job.ranks_per_host,
        "rate": job.rate,
        "measured_rate": measured[1] if measured else None,
        "cases": [_case_record(job, result) for result in results],
    }


def _case_record(job: HostJob, result: CaseResult) -> dict[str, Any]:
    rows = []
    for row in result.rows:
        assert isinstance(row, HostRow)
        sent, received = ([round(count) for count in counts] for counts in (row.sent, row.received))
        link = {"sent": sent, "received": received, "first": row.first}
        bound = least(job, result.case, row) * result.case.nbytes
        rows.append(link | {"least": bound, "predicted": predicted(job, result.case, row)})
    record = case_record(result)
    pairs = zip(record["rows"], rows, strict=True)
    return record | {"rows": [row | link for row, link in pairs]}
