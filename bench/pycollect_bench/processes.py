"""Collectives of ranks that are processes, also on several hosts: cases, table and targets.

The ranks do all the timing (rank_work.py), while the process that starts them sleeps. Hosts are
network namespaces of this machine, joined by limited links. There `hsdp` is the all_reduce that
torch's HSDP composes: reduce_scatter in the group of the host, all_reduce of the shard over gloo
among the ranks in the same place of each host, all_gather in the group of the host. The limit,
`link`, is one send of the same bytes by gloo, from the first rank of the first host to the first
rank of the second.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Container, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec

import torch

from pycollect._sizes import size_range

from . import mpi, options
from .cases import COLLECTIVES, Case, sized_case
from .lists import KIB, MANY, MIB, SUMS, table
from .namespaces import MOST_HOSTS, Namespaces, why_no_namespaces
from .options import devices
from .rank_work import DEEPSPEED, GLOO, HSDP, LINK, MPI, OPERATOR, PEERS, PROGRAM, ZERO_COPY, Task
from .ranks import Ranks, threads_of
from .report import Column, Target, at_least, over, where
from .runner import OURS, Item, Result

HOST_PEERS = (GLOO, HSDP)
# Timeout of a call in seconds, and of the answer of ranks on devices. On one host longer is a hang,
# and a run on a device has only minutes.
_TIMEOUT, _DEVICE_TIMEOUT, _DEVICE_ANSWER = 120.0, 30.0, 120.0
# Sizes in bytes of the targets of other collectives than all_reduce: one element per part, 1 MiB.
_LEAST, _OTHERS = 4, MIB
# Share of a link's rate by which sends may miss it before a warning; headers take 4 %. For fewer
# bytes the token bucket is too large.
_MOST_MISSED, _LEAST_FOR_RATE = 0.12, MIB

_LEGEND = """\
# A process per rank, with torch's threads: {threads}. Times are of one call through Python, on the
# slowest rank. Before each timed call all rewrite their buffers and pass a barrier. Up to 16 KiB
# calls are timed in batches instead, on zeros (except zero-copy, where peers write to a rank's
# tensors). The candidates take turns, in a new order every round.
# zero-copy: the same call on tensors in symmetric memory. operator: torch.ops.pycollect's, which
# passes by torch.distributed's Python. mpi: Open MPI's call, through mpi4py. deepspeed: the
# operator inference_all_reduce_.
# %limit: relative to `memory`, which multiplies the bytes that must be read and written in place.
# xgloo, xmpi, ...: the peer's time divided by this candidate's, medians over rounds.
# #wrong: elements of all ranks that differ from the exact result, in a separate run."""
_DEVICE_LEGEND = """\
# A process per rank; times are of one call through Python until the device is done, on the slowest
# rank; `:return` until the call returns, `:gpu` the device's own time, by events around a batch of
# calls on zeros. Before each timed call every rank rewrites its buffer, and all pass a barrier. The
# candidates take turns, in a new order every round.
# moved: bytes that must be read and written (all_reduce: 2 x world x size), per second.
# %limit: on one GPU, relative to `memcpy`, which copies the same bytes there, by the same clock.
# xgloo: the peer's time divided by this candidate's by the same clock, medians over rounds.
# #wrong: elements of all ranks that differ from the exact result, in a separate run."""


_HOSTS_LEGEND = """\
# Hosts are network namespaces of this machine. A process per rank; times are of one call through
# Python, on the slowest rank. Before each timed call every rank rewrites its buffer, and all pass a
# barrier in shared memory; up to 16 KiB calls are timed in batches. The candidates take turns.
# hsdp, of even parts: reduce_scatter in a pycollect group of the host, all_reduce of the shard over
# gloo between the hosts, all_gather in the group of the host. link: one send of S bytes by gloo
# from the first host to the second. %limit: relative to link. xgloo, xhsdp: the peer's time divided
# by this one's. first: the first call of this size. out/S, in/S: bytes of a call on the link, with
# headers, that a host sends and receives, on the host with most, divided by the size; least/S: the
# lower bound.
# #wrong: elements that differ from the exact result, in a separate run."""
_HOSTS_COLUMNS = (
    Column("ranks", "shape"),
    Column("link", lambda a, row: f"{a['rate'] / 1e9:g}" if a["rate"] else "none", "(Gb/s)"),
    Column("first", unit="(ms)", width=8, scale=1e3),
    Column("out/S", "sent"),
    Column("in/S", "received"),
    Column("least/S", "least"),
)


def ranks_of(text: str) -> tuple[int, int]:
    """Parse the numbers of hosts and of ranks on each host.

    >>> ranks_of("2x4")
    (2, 4)
    """
    hosts, x, ranks = text.partition("x")
    if not x:
        raise ArgumentTypeError(f"{text!r} is not hosts x ranks of each host, for example 2x4")
    if not 2 <= options.positive(hosts) <= MOST_HOSTS:
        raise ArgumentTypeError(f"{text!r} has {hosts} hosts; there may be 2 to {MOST_HOSTS}")
    return int(hosts), options.positive(ranks)


def rate_of(text: str) -> float | None:
    """Parse a rate in Gbit/s; return bits per second.

    >>> rate_of("2.5")
    2500000000.0
    """
    if text == "none":
        return None
    rate = float(text) * 1e9
    if not 1e6 <= rate <= 1e12:
        raise ArgumentTypeError(f"{text!r} is not a rate from 0.001 to 1000 Gbit/s, or none")
    return rate


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if there are no such devices or hosts, or no such calls on them."""
    devices(args.devices or "cpu", 1)
    if args.devices and not {GLOO}.issuperset(args.peers or ()):
        raise ValueError(f"with --processes and --devices the only peer is {GLOO}")
    if args.hosts and COLLECTIVES[args.collective].link is None:
        raise ValueError(f"--collective {args.collective} is not measured on hosts")
    if args.hosts and (reason := why_no_namespaces()):
        raise ValueError(reason)


def cases(args: argparse.Namespace, on: tuple[torch.device, ...]) -> Iterator[Case]:
    """Yield the cases that the options request, and those that only the targets need."""
    make = partial(sized_case, devices=on, of_group=True)
    sizes = size_range(args.minbytes, args.maxbytes, args.stepfactor)
    for dtype in args.dtype:
        for size in [0] if args.collective == "barrier" else [*sizes, args.maxbytes]:
            yield make(args.collective, size, dtype, args.op)
    if args.targets:
        for name in (name for name, spec in COLLECTIVES.items() if spec.group):
            for nbytes in (_LEAST, _OTHERS):
                yield make(name, nbytes, torch.float32, "sum")


def measure(args: argparse.Namespace) -> Iterator[Item]:
    """Measure world by world; between hosts each on links of each rate."""
    usual: Sequence[str] = PEERS
    ours, legend, timeout, seconds = [OURS, ZERO_COPY, OPERATOR], _LEGEND, _TIMEOUT, None
    if args.devices:
        usual = [GLOO]
        ours, legend, timeout, seconds = [OURS], _DEVICE_LEGEND, _DEVICE_TIMEOUT, _DEVICE_ANSWER
    elif args.hosts:
        usual, ours, legend = HOST_PEERS, [OURS], _HOSTS_LEGEND
    names = usual if args.peers is None else args.peers
    launcher = mpi.find(mpi.OPEN_MPI) if MPI in names and find_spec("mpi4py") else None
    missing = [MPI] * (not launcher) + [DEEPSPEED] * (not find_spec("deepspeed"))
    shown = [name for name in names if name not in missing]
    for hosts, ranks in args.hosts or [(1, world) for world in args.processes]:
        on = devices(args.devices or "cpu", hosts * ranks)
        found = tuple(dict.fromkeys(cases(args, on)))
        threads = args.torch_threads or threads_of(len(on))
        one_memory = all(case.one_memory for case in found)
        more = _HOSTS_COLUMNS if args.hosts else ()
        header = table(one_memory, shown, legend.format(threads=threads), title, more)
        with Namespaces(hosts) if args.hosts else nullcontext() as namespaces:
            for rate in args.rates if namespaces else [None]:
                if namespaces:
                    namespaces.limit(rate)
                yield header
                both_clocks, effort = bool(args.devices), options.effort(args)
                task = Task(on, (*ours, *names), effort, args.backend, both_clocks, hosts, rate)
                with Ranks(len(on), PROGRAM, task, threads, timeout, launcher, namespaces) as pool:
                    for case in found:
                        result = pool.ask(case, seconds)[0]
                        yield result
                        if warning := rate_missed(result, rate):
                            yield warning


def rate_missed(result: Result, rate: float | None) -> str | None:
    """Return a warning if sends of so many bytes that they measure the link have another rate."""
    nbytes = result.about["bytes"]
    seconds = next((row.seconds for row in result.rows if row.name == LINK), 0.0)
    if not rate or not seconds or nbytes < _LEAST_FOR_RATE:
        return None
    found = 8 * nbytes / seconds
    wanted = f"{found / 1e9:.2f} Gbit/s instead of {rate / 1e9:g}"
    missed = abs(found / rate - 1) >= _MOST_MISSED
    return f"# WARNING: sends of {nbytes} bytes move {wanted}" if missed else None


def title(result: Result) -> str:
    """Return the line above the results of a collective and a world."""
    return f"# {result.about['collective']}, {result.about['world']} ranks"


_TO_GLOO, _TO_MPI = over(GLOO), over(MPI)


def _versus_gloo(world: int, spans: Sequence[tuple[str, float, Container[object]]]) -> list[Target]:
    return [
        Target(f"gloo, {world} ranks, {name}", wanted, OURS, _TO_GLOO,
               where(SUMS, world=(world,), bytes=sizes))
        for name, wanted, sizes in spans
    ]  # fmt: skip


_TARGETS = (
    *_versus_gloo(2, (("to 1 KiB", 40, range(KIB + 1)), ("at 64 KiB", 30, (64 * KIB,)),
                      ("at 1 MiB", 8, (MIB,)), ("at 16 MiB", 6, (16 * MIB,)),
                      ("at 128 MiB", 4, (128 * MIB,)))),
    *_versus_gloo(4, (("to 64 KiB", 150, range(64 * KIB + 1)), ("at 1 MiB", 15, (MIB,)),
                      ("at 16 MiB", 5, (16 * MIB,)), ("at 128 MiB", 4, (128 * MIB,)))),
    Target("gloo, from 8 ranks, everything", 1, OURS, _TO_GLOO, where(world=(8, 16))),
    *(Target(f"gloo, {name}, {size}", 5, OURS, _TO_GLOO,
             where(collective=(name,), world=(2, 4), bytes=sizes))
      for name in ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")
      for size, sizes in (
          [("no bytes", (0,))] if name == "barrier"
          # A part has one element.
          else [("4 B a rank", range(4 * _LEAST + 1)), ("1 MiB", (_OTHERS,))])),
    Target("Open MPI, from 64 KiB", 1, OURS, _TO_MPI,
           where(SUMS, world=MANY, bytes=at_least(64 * KIB))),
    Target("Open MPI, zero-copy, from 1 MiB", 2.5, ZERO_COPY, _TO_MPI,
           where(SUMS, world=MANY, bytes=at_least(MIB))),
    Target("DeepSpeed's operator, from 8 KiB", 1.2, OPERATOR, over(DEEPSPEED),
           where(SUMS, world=(2,), bytes=at_least(8 * KIB))),
)  # fmt: skip
# Targets for CUDA tensors on one GPU; the time is the host's, until the device is done.
_DEVICE_TARGETS = (
    *_versus_gloo(4, (("from 1 MiB", 10, at_least(MIB)),)),
    Target("gloo, everything", 1, OURS, _TO_GLOO, where(world=MANY)),
)


def targets(args: argparse.Namespace) -> Sequence[Target]:
    """Return the targets of the ranks' device."""
    return _DEVICE_TARGETS if args.devices else _TARGETS
