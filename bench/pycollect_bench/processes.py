"""Collectives of ranks that are processes: cases, table and targets.

The ranks do all the timing (rank_work.py), while the process that starts them sleeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Container, Iterator, Sequence
from functools import partial
from importlib.util import find_spec

import torch

from pycollect._sizes import size_range

from . import mpi, options
from .cases import COLLECTIVES, Case, sized_case
from .lists import KIB, MANY, MIB, SUMS, devices, table
from .rank_work import DEEPSPEED, GLOO, MPI, OPERATOR, PEERS, PROGRAM, ZERO_COPY, Task
from .ranks import Ranks, threads_of
from .report import Table, Target, at_least, over, where
from .runner import OURS, Result

# Timeout of a call in seconds, and of the answer of ranks on devices. On one host longer is a hang,
# and a run on a device has only minutes.
_TIMEOUT, _DEVICE_TIMEOUT, _DEVICE_ANSWER = 120.0, 30.0, 120.0
# Sizes in bytes of the targets of other collectives than all_reduce: one element per part, 1 MiB.
_LEAST, _OTHERS = 4, MIB

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


def why_no_mpi() -> str:
    """Return the reason why MPI is not measured, or ""; between processes it is only Open MPI."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if mpi.find(mpi.OPEN_MPI) else "Open MPI was not found"


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if there are no such devices, or peers have no calls on devices."""
    devices(args.devices or "cpu", 1)
    if args.devices and not {GLOO}.issuperset(args.peers or ()):
        raise ValueError(f"with --processes and --devices the only peer is {GLOO}")


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


def measure(args: argparse.Namespace) -> Iterator[Table | Result]:
    """Measure world by world."""
    usual = [GLOO] if args.devices else [*PEERS]
    names = usual if args.peers is None else args.peers
    no_mpi = why_no_mpi()
    missing = [MPI] * bool(no_mpi) + [DEEPSPEED] * (find_spec("deepspeed") is None)
    shown = [name for name in names if name not in missing]
    launcher = mpi.find(mpi.OPEN_MPI) if MPI in shown else None
    ours, legend, timeout, seconds = [OURS, ZERO_COPY, OPERATOR], _LEGEND, _TIMEOUT, None
    if args.devices:
        ours, legend, timeout, seconds = [OURS], _DEVICE_LEGEND, _DEVICE_TIMEOUT, _DEVICE_ANSWER
    effort, both_clocks = options.effort(args), bool(args.devices)
    for world in args.processes:
        on = devices(args.devices or "cpu", world)
        found = tuple(dict.fromkeys(cases(args, on)))
        threads = args.torch_threads or threads_of(world)
        one_memory = all(case.one_memory for case in found)
        yield table(one_memory, shown, legend.format(threads=threads), title)
        task = Task(on, (*ours, *names), effort, args.backend, no_mpi, both_clocks)
        with Ranks(world, PROGRAM, task, threads=threads, timeout=timeout, mpi=launcher) as ranks:
            for case in found:
                yield ranks.ask(case, seconds)[0]


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
    Target("gloo, 8 and 16 ranks, everything", 1, OURS, _TO_GLOO, where(world=(8, 16))),
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
