"""Ranks as threads: `dist.all_reduce`, and the start and end of their world, beside processes.

Processes that run batches of all_reduce on request are started once, and idle between their turns.
All ranks share one device.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

import pycollect
from pycollect._sizes import size_range
from pycollect._timing import Effort, Sampler, batched, host_time, no_garbage_collection, shuffled
from pycollect.gpus import synchronizer
from pycollect.threads import launch

from . import report
from .clocks import sized
from .lists import KIB, MIB
from .options import effort
from .ranks import Rank, Ranks
from .report import Column, Target, where
from .runner import OURS, PEER, Item, Result, Row, Way, in_turns, reason

# Backends of the processes.
PEERS = ("gloo", "pycollect")
# Ways to call all_reduce; of the threads also the way to run a world.
THREADS, PARALLEL, LIST = "threads", "threads, parallel", "list"
GLOO_PROCESSES = "processes, gloo"
# A case of its own, and its peer.
START, PROCESSES = "start and end of a world", "processes"
# Kinds of rows; the others are pycollect's.
KINDS = dict.fromkeys((LIST, GLOO_PROCESSES, PROCESSES), PEER)

_ELEMENT_BYTES = 4  # of float32
# Seconds of a batch, some time slices of each rank if there are more ranks than cores, and the
# largest number of its calls.
_BATCH_SECONDS, _MOST_CALLS = 20e-3, 4096
# Limits of all batches of a turn in seconds, and of a call of pycollect.
_ANSWER, _CALL_LIMIT = 180.0, datetime.timedelta(seconds=30)
# Launches in one round beside one world of processes, which takes a thousand times longer, and the
# largest number of these rounds.
_LAUNCHES, _ROUNDS = 21, 3

Interval = tuple[float, float]  # begin and end in seconds of the host's clock
# Runs this number of batches of this number of calls; returns the intervals of every rank.
RunBatches = Callable[[int, int], Sequence[Sequence[Interval]]]

_TABLE = report.Table(
    """\
# dist.all_reduce of float32 in batches of calls on zeros. time: from the first rank's begin to the
# last rank's end, per collective; call: that divided by the number of ranks' calls.
# threads: pycollect.threads.launch, one rank at a time unless parallel. processes: started once,
# idle between their turns. list: pycollect.all_reduce on a list.
# All ways take turns; times are medians, ratios are medians over rounds.
# xgloo, xlist: the time of gloo between processes, and of the list call, divided by this time.""",
    [
        Column("world"),
        Column("size", "bytes", "(B)", 9),
        Column("way", "name", width=-24),
        *report.times(),
        Column("call", unit="(us)", width=9, scale=1e6),
        Column("xgloo", f"x{GLOO_PROCESSES}"),
        Column("xlist"),
    ],
)
_START_TABLE = report.Table(
    "# Start and end of a world whose ranks do nothing: a launch, or processes that import torch.",
    [
        Column("world"),
        Column("way", "name", width=-10),
        *report.times("ms"),
        Column(f"x{PROCESSES}"),
    ],
)


def _device(args: argparse.Namespace) -> torch.device:
    """Return the device of all ranks."""
    found = pycollect.devices(args.devices or "cpu")
    if len(found) != 1:
        raise ValueError(f"{args.devices} names {len(found)} devices; ranks as threads share one")
    return found[0]


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if the device or a size is none of ranks as threads."""
    _device(args)
    for nbytes in size_range(args.minbytes, args.maxbytes, args.stepfactor):
        if not nbytes or nbytes % _ELEMENT_BYTES:
            raise ValueError(f"a size of {nbytes} bytes is no multiple of {_ELEMENT_BYTES}")


def measure(args: argparse.Namespace) -> Iterator[Item]:
    """Yield the tables and results of all_reduce, and of the start and end of each world."""
    device, names = _device(args), PEERS if args.peers is None else args.peers
    yield f"# {', '.join(map(str, args.threads))} ranks on {device}"
    yield _TABLE
    for world in args.threads:
        yield from _measure_sizes(args, world, device, names)
    if device.type == "cpu":  # a world that does nothing uses no device
        yield _START_TABLE
        rounds = min(_ROUNDS, args.iterations or _ROUNDS)
        for world in args.threads:
            yield _start_and_end(world, rounds, with_processes=bool(names))


def run_batches(
    rank: int, world: int, group: Any, device: torch.device, elements: int, batches: int, calls: int
) -> list[Interval]:
    """Run the batches on this rank, after an untimed call whose result is checked."""
    tensor = torch.full((elements,), 1.0 + rank, device=device)
    dist.all_reduce(tensor, group=group)
    if not (tensor == world * (world + 1) / 2).all():
        raise AssertionError(f"all_reduce of {elements} elements is wrong on rank {rank}")
    tensor.zero_()  # no sum changes it
    synchronize = synchronizer([device])
    found = []
    for _ in range(batches):
        synchronize()
        dist.barrier(group)
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor, group=group)
        synchronize()
        found.append((begin, time.perf_counter()))
    return found


def serve(rank: Rank, device: torch.device) -> None:
    """Run batches as one of the processes: a request names the backend and the batches."""
    rank.init_process_group(device=device)
    ours = dist.new_group(backend="pycollect", timeout=_CALL_LIMIT)
    with no_garbage_collection():  # as in the process of the other ways
        for backend, *asked in rank.requests():
            group = ours if backend == "pycollect" else None
            rank.send(run_batches(rank.number, rank.world, group, device, *asked))


def _sampler(run: RunBatches, calls: int) -> Sampler:
    """Return the sampler of batches of this number of calls, as seconds of one call.

    A batch lasts from the begin of the first rank to the end of the last: ranks that take turns do
    not begin together. All processes of a host read the same clock.

    >>> _sampler(lambda batches, calls: [[(1.0, 4.0)], [(2.0, 6.0)]], calls=2)(1)
    [2.5]
    """

    def sample(batches: int) -> list[float]:
        found = []
        for intervals in zip(*run(batches, calls), strict=True):
            begins, ends = zip(*intervals, strict=True)
            found.append((max(ends) - min(begins)) / calls)
        return found

    return sample


def _ways(
    world: int, device: torch.device, elements: int, ranks: Ranks | None, names: Sequence[str]
) -> dict[str, Callable[[int], Sampler]]:
    """Return how each way, also on these backends, samples batches of a number of calls."""
    launched = partial(launch, run_batches, world, None, device, elements, device=device)
    runs: dict[str, RunBatches] = {THREADS: launched, PARALLEL: partial(launched, parallel=True)}
    if ranks:
        for backend in names:
            runs[f"{PROCESSES}, {backend}"] = lambda *asked, backend=backend: ranks.ask(
                (backend, elements, *asked), _ANSWER
            )
    ways = {way: partial(_sampler, run) for way, run in runs.items()}
    tensors = [torch.zeros(elements, device=device) for _ in range(world)]
    timer = partial(host_time, synchronize=synchronizer([device]))
    return {**ways, LIST: partial(batched, partial(pycollect.all_reduce, tensors), timer=timer)}


def _measure_sizes(
    args: argparse.Namespace, world: int, device: torch.device, names: Sequence[str]
) -> Iterator[Result]:
    """Measure all ways at each size."""

    def numbers(row: Row) -> dict[str, float]:
        return {} if row.name == LIST else {"call": row.seconds / world}  # a list has one call

    server = f"{__name__}:{serve.__name__}"
    with Ranks(world, server, device) if names else nullcontext() as ranks:
        for nbytes in size_range(args.minbytes, args.maxbytes, args.stepfactor):
            ways = _ways(world, device, nbytes // _ELEMENT_BYTES, ranks, names)
            samplers = {
                way: sized(make, float, _BATCH_SECONDS, 1, _MOST_CALLS)
                for way, make in ways.items()
            }
            about = {"collective": "all_reduce", "bytes": nbytes}
            about |= {"world": world, "device": str(device)}
            yield _in_turns(about, samplers, effort(args), numbers)


def _in_turns(
    about: dict[str, Any],
    samplers: Mapping[str, Sampler],
    effort: Effort,
    numbers: Callable[[Row], dict[str, float]] = lambda row: {},
) -> Result:
    """Measure in turns the samplers whose first use does not fail; of others keep the reason.

    A later failure ends the run.
    """
    ways: dict[str, Way] = {}
    not_run: dict[str, str] = {}
    for way, sampler in samplers.items():
        try:
            sampler(1)
        except Exception as error:  # any error is the reason why the way has no time
            not_run[way] = reason(error)
        else:
            ways[way] = Way(sampler, KINDS.get(way, OURS))
    order = shuffled(about.get("bytes", 0))
    rows = in_turns(ways, effort, order, numbers=numbers)
    return Result(about, rows, not_run, failed=bool(not_run.keys() & {THREADS, PARALLEL}))


def nothing(rank: object, argument: object) -> None:
    """Do nothing, as a rank of a launch or as one of the processes."""


def _start_and_end(world: int, rounds: int, with_processes: bool) -> Result:
    """Start and end worlds in turns: in a round, some launches and one world of processes."""

    def processes() -> None:
        with Ranks(world, f"{__name__}:{nothing.__name__}"):
            pass

    launches = host_time(partial(launch, nothing, world))
    samplers: dict[str, Sampler] = {THREADS: lambda calls: launches(_LAUNCHES * calls)}
    started, uses = host_time(processes), count()
    if with_processes:  # their second use would only warm up again, which takes seconds
        samplers[PROCESSES] = lambda calls: [] if next(uses) == 1 else started(calls)
    effort = Effort(iterations=rounds, warmup=1, single_calls=True)
    return _in_turns({"what": START, "world": world}, samplers, effort)


_LIST_SHARE = report.time_over(LIST)
_GPU_TARGETS = (
    Target("all_reduce on a GPU: time over the list call's", 1.2, THREADS, _LIST_SHARE,
           where(bytes=report.at_least(MIB)), "<="),
    Target("all_reduce on a GPU: faster than gloo", 10, THREADS, report.over(GLOO_PROCESSES),
           where(bytes=report.at_least(MIB))),
)  # fmt: skip
_TARGETS = (
    Target("start and end of a world of threads", 50, THREADS, lambda row: row.seconds * 1e3,
           where(what=(START,)), "<=", " ms"),
    Target("all_reduce of little data: a rank's call", 15, THREADS,
           lambda row: row.numbers["call"] * 1e6, where(bytes=range(KIB + 1)), "<=", " us"),
    Target("all_reduce of 1 MiB: time over the list call's", 1.3, THREADS, _LIST_SHARE,
           where(bytes=(MIB,)), "<="),
)  # fmt: skip


def targets(args: argparse.Namespace) -> Sequence[Target]:
    """Return the targets of the device."""
    return _GPU_TARGETS if _device(args).type == "cuda" else _TARGETS
