"""Collectives between hosts: network namespaces of this machine, joined by limited links.

gloo and pycollect are one call on a group of all ranks; `fast` is pycollect's with
`options(hosts="fast")`. `hsdp` is the all_reduce that torch's HSDP composes: reduce_scatter in the
group of the host, all_reduce of the shard over gloo among the ranks in the same place of each host,
all_gather in the group of the host. The limit, `link`, is one send of the same bytes by gloo, from
the first rank of the first host to the first rank of the second.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

import pycollect as pc
from pycollect._sizes import size_range

from . import options, report
from .cases import CPU, Case, sized_case
from .namespaces import MOST_HOSTS, Namespaces, why_no_namespaces
from .rank_work import FAST, GLOO, HSDP, LINK, PROGRAM, Task
from .ranks import Ranks
from .report import Column, Table
from .runner import OURS, Result, Row

PEERS = (GLOO, HSDP)
_LEGEND = """\
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
_SHARE_OF_RATE, _LEAST_FOR_MODEL = 0.8, 1 << 20  # bytes
# Bytes of a call that cross the link of the busiest host in its busier direction, at least, divided
# by the size, for this number of hosts and ranks of a host. Hosts reduce before they send.
LEAST: dict[str, Callable[[int, int], float]] = {
    "all_reduce": lambda hosts, ranks: 2 * (hosts - 1) / hosts,
    "broadcast": lambda hosts, ranks: 1,
    "all_gather": lambda hosts, ranks: (hosts - 1) / hosts,
    "reduce_scatter": lambda hosts, ranks: (hosts - 1) / hosts,
    "all_to_all": lambda hosts, ranks: ranks * (hosts - 1) / hosts,
    "send_recv": lambda hosts, ranks: ranks,
}


def ranks_of(text: str) -> tuple[int, int]:
    """Return the numbers of hosts and of ranks on each host.

    >>> ranks_of("2x4")
    (2, 4)
    """
    numbers = text.split("x")
    if len(numbers) != 2 or not all(n.isascii() and n.isdigit() and int(n) for n in numbers):
        raise ValueError(f"{text!r} is not hosts x ranks of each host; give for example 2x4")
    if int(numbers[0]) < 2:
        raise ValueError(f"{text!r} has one host, and so no link")
    return int(numbers[0]), int(numbers[1])


def rate_of(text: str) -> float | None:
    """Return a rate in bits per second, of Gbit/s.

    >>> rate_of("2.5")
    2500000000.0
    """
    if text == "none":
        return None
    rate = float(text) * 1e9
    if not 1e6 <= rate <= 1e12:
        raise ValueError(f"{text!r} is not a rate from 0.001 to 1000 Gbit/s, or none")
    return rate


def gigabits(rate: float | None) -> str:
    """Return a rate in Gbit/s as text.

    >>> gigabits(2.5e9), gigabits(None)
    ('2.5', 'none')
    """
    return "none" if rate is None else f"{rate / 1e9:g}"


def peers(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of all peers between hosts."""
    return PEERS


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if the options are wrong for hosts, or none can be made here."""
    if args.collective not in LEAST:
        known = ", ".join(LEAST)
        raise ValueError(f"--collective {args.collective} is not measured on hosts, only {known}")
    for hosts, _ in args.hosts:
        if hosts > MOST_HOSTS:
            raise ValueError(f"--hosts: {hosts} hosts are too many; there may be {MOST_HOSTS}")
    if reason := why_no_namespaces():
        raise ValueError(reason)


def measure(args: argparse.Namespace) -> Iterator[Table | Result | str]:
    """Measure world by world, each on links of each rate."""
    sizes = size_range(args.minbytes, args.maxbytes, args.stepfactor)
    for hosts, ranks in args.hosts:
        devices = (CPU,) * hosts * ranks
        make = partial(sized_case, args.collective, op=args.op, devices=devices, of_group=True)
        cases = tuple(dict.fromkeys(make(n, dtype) for dtype in args.dtype for n in sizes))
        names = (*(PEERS if args.peers is None else args.peers), OURS, FAST)
        with Namespaces(hosts) as namespaces:
            for rate in args.rates:
                namespaces.limit(rate)
                task = Task(devices, cases, names, options.effort(args), hosts=hosts, rate=rate)
                yield _table()
                yield from _measured(task, namespaces)


def _measured(task: Task, namespaces: Namespaces) -> Iterator[Result | str]:
    found: list[Result] = []
    with Ranks(len(task.devices), PROGRAM, task, hosts=namespaces) as ranks:
        for case in task.cases:
            result = ranks.answer()
            shape = f"{task.hosts}x{task.ranks_per_host}"
            about = result.about | {"shape": shape, "rate": task.rate}
            rows = [_completed(task, case, row) for row in result.rows]
            found.append(replace(result, about=about, rows=rows))
            yield found[-1]
    yield from _link_lines(task, found)


def _table() -> Table:
    return Table(
        _LEGEND,
        (
            report.of_about("ranks", "shape"),
            Column("link", "(Gb/s)", 6, lambda about, row: gigabits(about["rate"])),
            report.of_about("size", "bytes", "(B)", 11),
            report.of_about("type", "dtype", width=13),
            report.name("peer", 9),
            *report.times(),
            report.of_row("first", "first", "(ms)", scale=1e3),
            Column("algbw", "(GB/s)", 8, lambda a, r: f"{a['bytes'] / r.seconds / 1e9:.2f}"),
            report.limit(),
            report.faster(GLOO),
            report.of_row("out/S", "sent", width=6),
            report.of_row("in/S", "received", width=6),
            report.of_row("least/S", "least", width=7),
            report.of_row("model", "model", width=6),
            report.wrong(),
        ),
    )


def _completed(task: Task, case: Case, row: Row) -> Row:
    """Return the row with the lower bound of its bytes and, where the model is of use, the
    predicted time divided by its time.
    """
    least = LEAST[case.collective](task.hosts, task.ranks_per_host)
    numbers = row.numbers | {"least": 1 if row.name == LINK else least}
    is_ours = row.name in (OURS, FAST) and case.collective != "send_recv"
    is_planned = is_ours and case.dtype == torch.float32
    if not is_planned or not task.rate or case.nbytes < _LEAST_FOR_MODEL:
        return replace(row, numbers=numbers)
    fast = row.name == FAST and case.spec.reduces
    plan = pc.plan(
        case.collective,
        hosts=(task.ranks_per_host,) * task.hosts,
        nbytes=case.nbytes,
        algorithm="host_direct" if fast else None,
    )
    seconds = plan.predict(replace(_MODEL, network=_SHARE_OF_RATE * task.rate / 8))
    return replace(row, numbers=numbers | {"model": seconds / row.seconds})


def _link_lines(task: Task, results: Sequence[Result]) -> Iterator[str]:
    """Yield a line with the measured rate of the link, and a warning if it is not the wanted."""
    largest = max(results, key=lambda result: result.about["bytes"])
    row, nbytes = largest.row(LINK), largest.about["bytes"]
    if row is None or nbytes < _LEAST_FOR_RATE:
        return
    rate = 8 * nbytes / row.seconds
    wanted = f"of {gigabits(task.rate)}" if task.rate else "without a limit"
    yield f"# link: sends of {nbytes} bytes move {rate / 1e9:.2f} Gbit/s {wanted}"
    if task.rate and abs(rate / task.rate - 1) > _MOST_MISSED:
        yield "# WARNING: this machine does not reach the rate of the link, or exceeds it"
