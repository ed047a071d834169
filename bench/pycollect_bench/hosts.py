"""Collectives between hosts: network namespaces of this machine, joined by limited links.

gloo and pycollect are one call on a group of all ranks. `hsdp` is the all_reduce that torch's HSDP
composes: reduce_scatter in the group of the host, all_reduce of the shard over gloo among the ranks
in the same place of each host, all_gather in the group of the host. The limit, `link`, is one send
of the same bytes by gloo, from the first rank of the first host to the first rank of the second.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from pycollect._sizes import size_range

from . import options, report
from .cases import CPU, Case, sized_case
from .namespaces import MOST_HOSTS, Namespaces, why_no_namespaces
from .rank_work import GLOO, HSDP, LINK, PROGRAM, Task
from .ranks import Ranks
from .report import Column, Table
from .runner import OURS, Result

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
# #wrong: elements that differ from the exact result; of pycollect's reductions also those that
# differ in a bit from the fold of random values in rank order."""
# Share of the rate by which the sends may miss it before a warning. Headers take 4 %.
_MOST_MISSED = 0.12
# Least size in bytes of a send that measures the rate: for fewer the token bucket is too large.
_LEAST_FOR_RATE = 1 << 20
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
    hosts, x, ranks = text.partition("x")
    if not x:
        raise ValueError(f"{text!r} is not hosts x ranks of each host; give for example 2x4")
    if not 2 <= options.whole(hosts) <= MOST_HOSTS:
        raise ValueError(f"{text!r} has {hosts} hosts; there may be 2 to {MOST_HOSTS}")
    return int(hosts), options.whole(ranks)


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


_TABLE = Table(
    _LEGEND,
    (
        report.of_about("ranks", "shape"),
        Column("link", "(Gb/s)", 6, lambda a, r: f"{a['rate'] / 1e9:g}" if a["rate"] else "none"),
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
        report.wrong(),
    ),
)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if the options are wrong for hosts, or none can be made here."""
    if args.collective not in LEAST:
        known = ", ".join(LEAST)
        raise ValueError(f"--collective {args.collective} is not measured on hosts, only {known}")
    if reason := why_no_namespaces():
        raise ValueError(reason)


def measure(args: argparse.Namespace) -> Iterator[Table | Result]:
    """Measure world by world, each on links of each rate."""
    sizes = size_range(args.minbytes, args.maxbytes, args.stepfactor)
    names = (*(PEERS if args.peers is None else args.peers), OURS)
    for hosts, ranks in args.hosts:
        on = (CPU,) * hosts * ranks
        make = partial(sized_case, args.collective, op=args.op, devices=on, of_group=True)
        cases = dict.fromkeys(make(n, dtype) for dtype in args.dtype for n in sizes)
        with Namespaces(hosts) as namespaces:
            for rate in args.rates:
                namespaces.limit(rate)
                yield _TABLE
                task = Task(on, names, options.effort(args), hosts=hosts, rate=rate)
                with Ranks(len(on), PROGRAM, task, hosts=namespaces) as processes:
                    for case in cases:
                        yield _completed(task, case, processes.ask(case)[0])


def _completed(task: Task, case: Case, result: Result) -> Result:
    """Return the result with the shape and the rate, and what follows from the times."""
    about = {"shape": f"{task.hosts}x{task.ranks_per_host}", "rate": task.rate}
    rows = []
    for row in result.rows:
        least = LEAST[case.collective](task.hosts, task.ranks_per_host)
        numbers = row.numbers | {"least": 1 if row.name == LINK else least}
        rows.append(replace(row, numbers=numbers))
    link = next(row.seconds for row in rows if row.name == LINK)
    notes = _notes(task, case.nbytes, link)
    return replace(result, about=result.about | about, rows=rows, notes=notes)


def _notes(task: Task, nbytes: int, seconds: float) -> tuple[str, ...]:
    """Return a warning if sends of these bytes have not the wanted rate of the link."""
    rate = 8 * nbytes / seconds
    if not task.rate or nbytes < _LEAST_FOR_RATE or abs(rate / task.rate - 1) < _MOST_MISSED:
        return ()
    measured = f"{rate / 1e9:.2f} Gbit/s instead of {task.rate / 1e9:g}"
    return (f"# WARNING: sends of {nbytes} bytes move {measured}",)
