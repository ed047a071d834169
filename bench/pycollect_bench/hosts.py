"""Collectives between hosts: network namespaces of this machine, joined by limited links.

gloo and pycollect are one call on a group of all ranks; `fast` is pycollect's with
`options(hosts="fast")`. `hsdp` is the all_reduce that torch's HSDP composes: reduce_scatter in the
group of the host, all_reduce of the shard over gloo among the ranks in the same place of each host,
all_gather in the group of the host. The limit, `link`, is one send of the same bytes by gloo, from
the first rank of the first host to the first rank of the second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycollect as pc
from pycollect._sizes import size_range
from pycollect._timing import Timing

from . import options, report
from .cases import CPU, OPS, Buffers, Call, Case, all_gather, reduce_scatter, sized_case
from .namespaces import INTERFACE, MOST_HOSTS, Namespaces, why_no_namespaces
from .pattern import count_wrong
from .rank_work import FAST, GLOO, HSDP, PROGRAM, Candidate, Setting, Task
from .ranks import Ranks
from .report import Column, Table
from .runner import LIMIT, OURS, Result, Row

LINK = "link"
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
# Seconds of a send of one byte, about, on a busy machine.
_LATENCY = 300e-6
# Calls of a batch whose bytes are counted: enough of them to make the bytes of acknowledgements
# and of address resolution few, and few enough to take no longer than the timed calls.
_COUNTED_BYTES, _LEAST_COUNTED, _MOST_COUNTED = 1 << 20, 4, 64
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
            rows = [_with_model(task, case, row) for row in result.rows]
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


def _with_model(task: Task, case: Case, row: Row) -> Row:
    """Return the row with the predicted time, divided by its time, where the model is of use."""
    is_ours = row.name in (OURS, FAST) and case.collective != "send_recv"
    is_planned = is_ours and case.dtype == torch.float32
    if not is_planned or not task.rate or case.nbytes < _LEAST_FOR_MODEL:
        return row
    fast = row.name == FAST and case.spec.reduces
    plan = pc.plan(
        case.collective,
        hosts=(task.ranks_per_host,) * task.hosts,
        nbytes=case.nbytes,
        algorithm="host_direct" if fast else None,
    )
    seconds = plan.predict(replace(_MODEL, network=_SHARE_OF_RATE * task.rate / 8))
    return replace(row, numbers=row.numbers | {"model": seconds / row.seconds})


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


# What follows runs in the ranks.


@dataclass(frozen=True)
class HsdpGroups:
    """Two groups of a rank: the ranks of its host, and those in its place on each host."""

    host: Any
    column: Any


def groups(task: Task) -> dict[str, Callable[[], Any]]:
    """Return what makes the groups of the candidates that only hosts have; collective."""
    fast = pc.distributed.options(hosts="fast")
    return {
        HSDP: partial(_hsdp_groups, task.hosts, task.ranks_per_host),
        FAST: partial(dist.new_group, backend=OURS, pg_options=fast),
    }


def _hsdp_groups(hosts: int, ranks_per_host: int) -> HsdpGroups:
    """Make the groups of HSDP's device mesh, (hosts, ranks of a host)."""
    of_hosts = [list(range(h * ranks_per_host, (h + 1) * ranks_per_host)) for h in range(hosts)]
    columns = [list(column) for column in zip(*of_hosts, strict=True)]
    split: Any = dist.new_subgroups_by_enumeration  # torch has no type annotations for it
    host, _ = split(of_hosts, backend=OURS)
    column, _ = split(columns, backend=GLOO)
    return HsdpGroups(host, column)


def hsdp(buffers: Buffers, groups: HsdpGroups) -> Call:
    """Return the all_reduce that HSDP composes, in place; a buffer of uneven parts is padded."""
    case, tensor = buffers.case, buffers.input
    if case.collective != "all_reduce":
        raise NotImplementedError(f"HSDP composes an all_reduce, no {case.collective}")
    op, count, ranks = OPS[case.op], tensor.numel(), dist.get_world_size(groups.host)
    part = -(-count // ranks)
    shard = torch.empty(part, dtype=tensor.dtype)
    even = part * ranks == count
    whole = tensor if even else torch.zeros(part * ranks, dtype=tensor.dtype)

    def call() -> None:
        if not even:
            whole[:count].copy_(tensor)
        reduce_scatter(shard, whole, op, groups.host)
        dist.all_reduce(shard, op, groups.column)
        all_gather(whole, shard, groups.host)
        if not even:
            tensor.copy_(whole[:count])

    return call


def link(case: Case, setting: Setting) -> Candidate:
    """Return the limit: this rank's part of one send between the first two hosts.

    Ranks without a part sleep for about its duration, because their barrier takes time of the core.
    """
    data = torch.zeros(case.nbytes, dtype=torch.uint8)
    sender, receiver = _link_ends(setting.task)
    seconds = 8 * case.nbytes / setting.task.rate if setting.task.rate else 0
    call: Call = partial(time.sleep, _LATENCY + seconds)
    if setting.rank.number == sender:
        call = partial(dist.send, data, receiver)
    if setting.rank.number == receiver:
        call = partial(dist.recv, data, sender)
    # It is timed call by call, as a batch of sends is no latency.
    return Candidate(LINK, LIMIT, call, data.fill_, None, one_by_one=True)


def _link_ends(task: Task) -> tuple[int, int]:
    return 0, task.ranks_per_host


def only_ends(mine: dict[str, Timing], setting: Setting) -> None:
    """Let the link take no time on ranks without a part in it: their sleep is no send."""
    if setting.rank.number not in _link_ends(setting.task):
        mine[LINK] = Timing(tuple((0.0,) * len(seconds) for seconds in mine[LINK].samples))


def fold_checked(buffers: Buffers, call: Call, check: Callable[[], int]) -> int:
    """Return this rank's wrong elements, and those that differ in a bit from the fold of random
    inputs.

    The fold adds the inputs from the left in rank order, in float32 or wider, and rounds once.
    """
    case, wrong = buffers.case, check()
    wide = torch.promote_types(case.dtype, torch.float32)
    total = torch.zeros(())
    for rank in range(case.world):
        values = torch.empty(case.count, dtype=wide)
        # No uniform values: those are multiples of 2**-24, whose sums are exact in any order.
        values.normal_(generator=torch.Generator().manual_seed(rank))
        values = values.to(case.dtype)
        if rank == buffers.rank:
            buffers.input.copy_(values)
        total = total + values.to(wide) if rank else values.to(wide)
    call()
    wanted = total.to(case.dtype)
    parts = case.spec.parts(case, buffers.rank)
    whole = torch.cat([wanted[at : at + n] for _, at, n in parts])
    return wrong + count_wrong(buffers.output, whole)


def counted(one: Candidate, case: Case, setting: Setting) -> dict[str, Any]:
    """Return the bytes of one call on the link of the busiest host, divided by the size.

    Collective. The bytes have the headers of packets, and are counted by the interface of each
    host, in a batch of their own. `first` is the seconds of the first call of this size.
    """
    task, barrier = setting.task, setting.rank.barrier
    one.rewrite(0)
    calls = max(_LEAST_COUNTED, min(_MOST_COUNTED, _COUNTED_BYTES // max(1, case.nbytes)))
    barrier.barrier()
    before = own_counters()
    barrier.barrier()
    for _ in range(calls):
        one.call()
    barrier.barrier()
    after = own_counters()
    sent, received = (
        max(barrier.gather((end - begin) / calls / case.nbytes))
        for begin, end in zip(before, after, strict=True)
    )
    least = 1 if one.name == LINK else LEAST[case.collective](task.hosts, task.ranks_per_host)
    return {"first": one.first, "sent": sent, "received": received, "least": least}


def own_counters() -> tuple[int, int]:
    """Return the bytes that the host of this process has sent and received so far."""
    folder = Path("/sys/class/net", INTERFACE, "statistics")
    sent, received = (int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received
