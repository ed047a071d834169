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
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import pycollect
from pycollect._sizes import size_range
from pycollect._timing import (
    Effort,
    Sampler,
    Timing,
    batched,
    host_time,
    interleave,
    no_garbage_collection,
    shuffled,
    turns,
)
from pycollect.gpus import synchronizer
from pycollect.threads import launch

from . import report
from .lists import reason
from .options import effort
from .ranks import Rank, Ranks
from .report import Target, where
from .runner import OURS, PEER, Item, Result, Row

# Backends of the processes.
PEERS = ("gloo", "pycollect")
# Ways to call all_reduce; of the threads also the way to run a world.
THREADS, PARALLEL, LIST = "threads", "threads, parallel", "list"
GLOO_PROCESSES = "processes, gloo"
# One call without other ranks, and its backend: what torch, Python and this library take for it.
FLOORS = {"fake backend": "fake", "world of one": "pycollect"}
# A case of its own, and its peer.
START, PROCESSES = "start and end of a world", "processes"

_KIB, _MIB = 1 << 10, 1 << 20
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
# idle between their turns. list: pycollect.all_reduce on a list. fake backend: torch and Python
# alone; world of one: a group without other ranks.
# All ways take turns; times are medians, ratios are medians over rounds.
# xgloo, xlist: the time of gloo between processes, and of the list call, divided by this time.""",
    [
        report.Column(
            "world", "", 5, lambda a, row: "1" if row.name in FLOORS else str(a["world"])
        ),
        report.of_about("size", "bytes", "(B)", 9),
        report.name("way", 24),
        *report.times(),
        report.of_row("call", "call", "(us)", 9, scale=1e6),
        report.faster("gloo"),
        report.faster("list"),
    ],
)
_START_TABLE = report.Table(
    "# Start and end of a world whose ranks do nothing: a launch, or processes that import torch.",
    [
        report.of_about("world", "world"),
        report.name("way", 10),
        *report.times("ms"),
        report.faster(PROCESSES),
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
    """Run the batches on this rank, after an untimed call whose result is checked.

    The fake backend does nothing, and nothing is checked.
    """
    tensor = torch.full((elements,), 1.0 + rank, device=device)
    dist.all_reduce(tensor, group=group)
    right = dist.get_backend(group) == "fake" or (tensor == world * (world + 1) / 2).all()
    if not right:
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
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank.init_process_group("gloo")
    ours = dist.new_group(backend="pycollect", timeout=_CALL_LIMIT)
    with no_garbage_collection():  # as in the process of the other ways
        for backend, *asked in rank.requests():
            group = ours if backend == "pycollect" else None
            rank.send(run_batches(rank.number, rank.world, group, device, *asked))


def _alone(
    backend: str, device: torch.device, elements: int, batches: int, calls: int
) -> list[list[Interval]]:
    """Run the batches in this thread, as the only rank of a group."""
    import_module("torch.testing._internal.distributed.fake_pg")  # registers "fake"
    store: Any = vars(dist)["HashStore"]()  # torch has no type annotations for its stores
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        return [run_batches(0, 1, None, device, elements, batches, calls)]
    finally:
        dist.destroy_process_group()


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


def _calls(make: Callable[[int], Sampler]) -> int:
    """Return the number of calls in a batch of about `_BATCH_SECONDS`.

    Unlike `clocks.sized`, it regards the calls alone: the start of a world takes longer.
    """
    calls = 1
    while (took := calls * make(calls)(1)[0]) < _BATCH_SECONDS and calls < _MOST_CALLS:
        wanted = int(1.2 * calls * _BATCH_SECONDS / took)
        calls = min(_MOST_CALLS, max(2 * calls, min(wanted, 16 * calls)))
    return calls


def _measure_sizes(
    args: argparse.Namespace, world: int, device: torch.device, names: Sequence[str]
) -> Iterator[Result]:
    """Measure all ways at each size, and those without other ranks at the smallest one."""
    server = f"{__name__}:{serve.__name__}"
    with Ranks(world, server, device) if names else nullcontext() as ranks:
        for nbytes in size_range(args.minbytes, args.maxbytes, args.stepfactor):
            elements = nbytes // _ELEMENT_BYTES
            ways = _ways(world, device, elements, ranks, names)
            if nbytes == args.minbytes:
                for floor, backend in FLOORS.items():
                    ways[floor] = partial(_sampler, partial(_alone, backend, device, elements))
            about = {"collective": "all_reduce", "bytes": nbytes}
            yield _measured({**about, "world": world, "device": str(device)}, ways, effort(args))


def _measured(
    about: dict[str, Any], ways: Mapping[str, Callable[[int], Sampler]], effort: Effort
) -> Result:
    """Measure all ways at one size, interleaved; those that fail have their reason in `not_run`."""
    samplers: dict[str, Sampler] = {}
    not_run: dict[str, str] = {}
    for way, make in ways.items():
        try:
            samplers[way] = make(_calls(make))
        except Exception as error:  # any error is the reason why the way has no time
            not_run[way] = reason(error)
    timings = interleave(samplers, effort, shuffled(about["bytes"]))
    rows = [_row(way, about["world"], timings) for way in timings]
    return Result(about, rows, not_run, failed=bool(not_run.keys() & {THREADS, PARALLEL}))


def _row(way: str, world: int, timings: Mapping[str, Timing]) -> Row:
    timing = timings[way]
    if way in FLOORS:
        return Row(way, timing, "floor", numbers={"call": timing.percentile(50)})
    of_rank = {} if way == LIST else {"call": timing.percentile(50) / world}  # a list has one call
    peers = {"gloo": GLOO_PROCESSES, "list": LIST}
    row = Row(way, timing, PEER if way == GLOO_PROCESSES else OURS, numbers=of_rank)
    return row.compared({key: timings[peer] for key, peer in peers.items() if peer in timings})


def nothing(rank: object, argument: object) -> None:
    """Do nothing, as a rank of a launch or as one of the processes."""


def _start_and_end(world: int, rounds: int, with_processes: bool) -> Result:
    """Start and end worlds in turns: in a round, some launches and one world of processes.

    A way that fails leaves the turns, and its error is in `not_run`.
    """

    def processes() -> None:
        with Ranks(world, f"{__name__}:{nothing.__name__}"):
            pass

    ways = {THREADS: host_time(partial(launch, nothing, world))}
    if with_processes:
        ways[PROCESSES] = host_time(processes)
    samples: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    not_run: dict[str, str] = {}
    # The first launch is untimed, as it may import modules.
    for number, way in [(-1, THREADS), *turns(list(ways), rounds)]:
        if way in not_run:
            continue
        try:
            seconds = ways[way](_LAUNCHES if way == THREADS and number >= 0 else 1)
        except Exception as error:  # any error is the reason why the way has no time
            not_run[way] = reason(error)
        else:
            samples[way] += [tuple(seconds)] * (number >= 0)
    timings = {way: Timing(tuple(of)) for way, of in samples.items() if way not in not_run}
    peers = {way: timing for way, timing in timings.items() if way != THREADS}
    kinds = {THREADS: OURS, PROCESSES: PEER}
    rows = [Row(way, timing, kinds[way]).compared(peers) for way, timing in timings.items()]
    return Result({"what": START, "world": world}, rows, not_run, failed=THREADS in not_run)


_LIST_SHARE = report.time_over(LIST)
_GPU_TARGETS = (
    Target("all_reduce on a GPU: time over the list call's", 1.2, THREADS, _LIST_SHARE,
           where(bytes=report.at_least(_MIB)), "<="),
    Target("all_reduce on a GPU: faster than gloo", 10, THREADS, report.over("gloo"),
           where(bytes=report.at_least(_MIB))),
)  # fmt: skip
_TARGETS = (
    Target("start and end of a world of threads", 50, THREADS, lambda row: row.seconds * 1e3,
           where(what=(START,)), "<=", " ms"),
    Target("all_reduce of little data: a rank's call", 15, THREADS,
           lambda row: row.numbers["call"] * 1e6, where(bytes=range(_KIB + 1)), "<=", " us"),
    Target("all_reduce of 1 MiB: time over the list call's", 1.3, THREADS, _LIST_SHARE,
           where(bytes=(_MIB,)), "<="),
)  # fmt: skip


def targets(args: argparse.Namespace) -> Sequence[Target]:
    """Return the targets of the device."""
    return _GPU_TARGETS if _device(args).type == "cuda" else _TARGETS
