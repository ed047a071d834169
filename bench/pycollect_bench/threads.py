"""Ranks as threads: `dist.all_reduce`, and whole worlds of small test cases, beside processes.

Processes that run batches of all_reduce on request are started once, and idle between their turns;
those of a test case are started for it, and end with it. All ranks share one device.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from statistics import median
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
    median_ratio,
    no_garbage_collection,
    shuffled,
    turns,
)
from pycollect.threads import launch

from .clocks import synchronizer
from .options import effort
from .ranks import Rank, Ranks
from .report import (
    Column,
    Outcome,
    Table,
    Target,
    at_least,
    faster,
    name,
    of_about,
    of_row,
    over,
    time_over,
    times,
    where,
    worst,
)
from .runner import OURS, PEER, Item, Result, Row
from .small_programs import PROGRAMS, nothing, run_in_processes

# Backends of the processes.
PEERS = ("gloo", "pycollect")
# Ways to call all_reduce; of the threads also the way to run a world.
THREADS, PARALLEL, LIST = "threads", "threads, parallel", "list"
GLOO_PROCESSES = "processes, gloo"
# One call of one rank, without other ranks: what torch, Python and this library take for it.
FLOORS = ("fake backend", "fake backend, in a rank", "world of one", "world of one, in a rank")
EMPTY = "start and end of a world"  # the name of a program that does nothing

_KIB, _MIB = 1 << 10, 1 << 20
_ELEMENT_BYTES = 4  # of float32
# Seconds of a batch, some time slices of each rank if there are more ranks than cores, and the
# largest number of its calls.
_BATCH_SECONDS, _MOST_CALLS = 20e-3, 4096
# Limits of all batches of a turn in seconds, and of a call of pycollect.
_ANSWER, _CALL_LIMIT = 180.0, datetime.timedelta(seconds=30)
# Launches in one round beside one world of processes, which takes a thousand times longer.
_LAUNCHES, _LAUNCHES_OF_EMPTY, _ROUNDS = 3, 21, 3

Interval = tuple[float, float]  # begin and end in seconds of the host's clock
# Runs this number of batches of this number of calls; returns the intervals of every rank.
RunBatches = Callable[[int, int], Sequence[Sequence[Interval]]]

_REDUCE_LEGEND = """\
# dist.all_reduce of float32 in batches of calls on zeros. collective: from the first rank's begin
# to the last rank's end, per collective; call: that divided by the number of ranks' calls.
# threads: pycollect.threads.launch, one rank at a time unless parallel. processes: started once,
# idle between their turns. list: pycollect.all_reduce on a list. fake backend: torch and Python
# alone; world of one: a group without other ranks; in a rank: the same in a launch of one rank.
# All ways take turns; times are medians, ratios are medians over rounds.
# xgloo, xlist: the time of gloo between processes, and of the list call, divided by this time."""
_PROGRAM_LEGEND = """\
# Whole worlds: threads of pycollect.threads.launch, or processes of torch.multiprocessing.spawn,
# started and ended for each run. first: the first run on threads, in which this process imports
# what the test case needs. xgloo, xpycollect: the time of processes divided by that of threads."""


def _reduce_table() -> Table:
    ranks = Column("world", "", 5, lambda about, row: str(row.numbers.get("ranks", about["world"])))
    time, p99 = times()
    columns = [ranks, of_about("size", "bytes", "(B)", 9), name("way", 24)]
    columns += [replace(time, head="collective"), p99, of_row("call", "call", "(us)", 9, scale=1e6)]
    return Table(_REDUCE_LEGEND, [*columns, faster("gloo"), faster("list")])


def _program_table() -> Table:
    columns = [of_about("world", "world", width=5), of_about("test case", "program", width=-24)]
    columns += [name("way", 10), of_row("first", "first", "(s)", 9, digits=4), *times("s")]
    return Table(_PROGRAM_LEGEND, [*columns, *map(faster, PEERS)])


def _device(args: argparse.Namespace) -> torch.device:
    """Return the device of all ranks."""
    found = pycollect.devices(args.devices or "cpu")
    if len(found) != 1:
        raise ValueError(f"{args.devices} names {len(found)} devices; ranks as threads share one")
    return found[0]


def check(args: argparse.Namespace) -> None:
    """Check the options.

    Raises:
        ValueError: if a size, a device or a peer is none of ranks as threads.
    """
    _device(args)
    for nbytes in size_range(args.minbytes, args.maxbytes, args.stepfactor):
        if not nbytes or nbytes % _ELEMENT_BYTES:
            raise ValueError(f"a size of {nbytes} bytes is no multiple of {_ELEMENT_BYTES}")


def peers(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of all peers of threads."""
    return PEERS


def measure(args: argparse.Namespace) -> Iterator[Item]:
    """Yield the tables and results of all_reduce and, if they are asked for, of the test cases."""
    names = PEERS if args.peers is None else args.peers
    worlds = [_World(size, _device(args), names) for size in args.threads]
    yield f"# {', '.join(map(str, args.threads))} ranks on {_device(args)}"
    yield _reduce_table()
    for world in worlds:
        yield from _measure_sizes(args, world)
    if args.programs:
        yield _program_table()
        for world in worlds:
            yield from _measure_programs(world, args.iterations or _ROUNDS)


@dataclass(frozen=True)
class _World:
    """The number of ranks, their device, and the backends of the processes."""

    size: int
    device: torch.device
    peers: Sequence[str]

    def about(self, **case: object) -> dict[str, Any]:
        """Return what the results of a case are about."""
        return {**case, "world": self.size, "device": str(self.device)}


def _intervals(
    device: torch.device, elements: int, batches: int, calls: int, fake: bool, group: Any = None
) -> list[Interval]:
    """Run the batches on this rank, after an untimed call whose result is checked.

    A fake backend does nothing, and nothing is checked.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    tensor = torch.full((elements,), 1.0 + rank, device=device)
    dist.all_reduce(tensor, group=group)
    if not fake and not bool((tensor == world * (world + 1) / 2).all()):
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


def seconds_of(of_ranks: Sequence[Sequence[Interval]]) -> list[float]:
    """Return the seconds of each batch, from the begin of the first rank to the end of the last.

    Ranks that take turns do not begin together. All processes of a host read the same clock.

    >>> seconds_of([[(1.0, 4.0)], [(2.0, 6.0)]])
    [5.0]
    """
    return [
        max(end for _, end in batch) - min(begin for begin, _ in batch)
        for batch in zip(*of_ranks, strict=True)
    ]


def serve(rank: Rank, device: torch.device) -> None:
    """Run batches as one of the processes: a request names the backend and the batches."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank.init_process_group("gloo")
    ours = dist.new_group(backend="pycollect", timeout=_CALL_LIMIT)
    with no_garbage_collection():  # as in the process of the other ways
        for backend, elements, batches, calls in rank.requests():
            group = ours if backend == "pycollect" else None
            rank.send(_intervals(device, elements, batches, calls, False, group))


def _on_threads(
    device: torch.device,
    elements: int,
    world: int,
    batches: int,
    calls: int,
    parallel: bool = False,
    fake: bool = False,
) -> list[list[Interval]]:
    """Run the batches in a launch of its own."""

    def run(rank: int, world: int) -> list[Interval]:
        if fake:
            dist.init_process_group("fake", rank=rank, world_size=world)
        return _intervals(device, elements, batches, calls, fake)

    return launch(run, world, device=device, parallel=parallel)


def _alone(
    device: torch.device, elements: int, backend: str, batches: int, calls: int
) -> list[list[Interval]]:
    """Run the batches in this thread, as the only rank of a group, or the first of a fake one."""
    store: Any = vars(dist)["HashStore"]()  # torch has no type annotations for its stores
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        return [_intervals(device, elements, batches, calls, backend == "fake")]
    finally:
        dist.destroy_process_group()


def _batches(run: RunBatches) -> Callable[[int], Sampler]:
    """Return a function that returns the sampler of batches of this number of calls."""
    return lambda calls: lambda batches: [s / calls for s in seconds_of(run(batches, calls))]


def _sized(make: Callable[[int], Sampler]) -> Sampler:
    """Return a sampler of batches of `make(calls)`; its first use determines the number of calls.

    Unlike that of `clocks.sized`, it regards the calls alone: the start of a world takes longer.
    """
    found: list[Sampler] = []

    def sample(batches: int) -> list[float]:
        calls = 1
        while not found:
            took = calls * (sampler := make(calls))(1)[0]
            if took >= _BATCH_SECONDS or calls == _MOST_CALLS:
                found.append(sampler)
            wanted = int(1.2 * calls * _BATCH_SECONDS / took)
            calls = min(_MOST_CALLS, max(2 * calls, min(wanted, 16 * calls)))
        return found[0](batches)

    return sample


def _ways(
    world: _World, elements: int, ranks: Ranks | None, floors: bool
) -> dict[str, Callable[[int], Sampler]]:
    """Return how each way samples batches of a number of calls."""
    here = (world.device, elements)
    ways = {
        THREADS: _batches(partial(_on_threads, *here, world.size)),
        PARALLEL: _batches(partial(_on_threads, *here, world.size, parallel=True)),
    }
    if ranks:
        for backend in world.peers:
            ways[f"processes, {backend}"] = _batches(
                lambda *asked, backend=backend: ranks.ask((backend, elements, *asked), _ANSWER)
            )
    tensors = [torch.zeros(elements, device=world.device) for _ in range(world.size)]
    timer = partial(host_time, synchronize=synchronizer([world.device]))
    ways[LIST] = partial(batched, partial(pycollect.all_reduce, tensors), timer=timer)
    if floors:
        import_module("torch.testing._internal.distributed.fake_pg")  # registers "fake"
        of_floors = (
            partial(_alone, *here, "fake"),
            partial(_on_threads, *here, 1, fake=True),
            partial(_alone, *here, "pycollect"),
            partial(_on_threads, *here, 1),
        )
        ways |= {floor: _batches(run) for floor, run in zip(FLOORS, of_floors, strict=True)}
    return ways


def _measure_sizes(args: argparse.Namespace, world: _World) -> Iterator[Result]:
    sizes = size_range(args.minbytes, args.maxbytes, args.stepfactor)
    server = f"{__name__}:{serve.__name__}"
    with Ranks(world.size, server, world.device) if world.peers else nullcontext() as ranks:
        for nbytes in sizes:
            ways = _ways(world, nbytes // _ELEMENT_BYTES, ranks, floors=nbytes == sizes[0])
            yield _measured(world.about(collective="all_reduce", bytes=nbytes), ways, effort(args))


def _measured(
    about: dict[str, Any], ways: Mapping[str, Callable[[int], Sampler]], effort: Effort
) -> Result:
    """Measure all ways at one size, interleaved; those that fail have their reason in `not_run`."""
    samplers: dict[str, Sampler] = {}
    not_run: dict[str, str] = {}
    for way, make in ways.items():
        sampler = _sized(make)
        try:
            sampler(1)
        except Exception as error:  # any error is the reason why the way has no time
            not_run[way] = _reason(error)
        else:
            samplers[way] = sampler
    timings = interleave(samplers, effort, shuffled(about["bytes"]))
    rows = [_row(way, about["world"], timings) for way in timings]
    return Result(about, rows, not_run, failed=bool(not_run.keys() & {THREADS, PARALLEL}))


def _row(way: str, world: int, timings: Mapping[str, Timing]) -> Row:
    peers = {"gloo": GLOO_PROCESSES, "list": LIST} if way not in FLOORS else {}
    kind = "floor" if way in FLOORS else PEER if way == GLOO_PROCESSES else OURS
    row = Row(way, timings[way], kind)
    row = row.compared({key: timings[p] for key, p in peers.items() if p in timings})
    if way == LIST:  # one call serves all ranks
        return row
    ranks = 1 if way in FLOORS else world
    return replace(row, numbers={"ranks": ranks, "call": row.seconds / ranks})


def _reason(error: Exception) -> str:
    """Return the error in one line; the last line of a rank's traceback is its error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1 if 'Traceback' in str(error) else 0]}"


def _measure_programs(world: _World, rounds: int) -> Iterator[Result | str]:
    results = []
    for program in (EMPTY, *PROGRAMS):
        results.append(_measured_world(world, program, rounds))
        yield results[-1]
    for peer in world.peers:
        if pairs := _in_both(results, peer):
            mine, theirs = _totals(pairs)
            first = sum(row.numbers["first"] for row, _ in pairs)
            yield (
                f"# {len(pairs)} test cases, {world.size} ranks: threads {median(mine):.3f} s, "
                f"processes of {peer} {median(theirs):.3f} s, {median_ratio(theirs, mine):.1f}x; "
                f"first runs on threads, with imports, {first:.3f} s"
            )


def _measured_world(world: _World, program: str, rounds: int) -> Result:
    """Run the program in turns: in a round, some times on threads and once on each backend.

    A way that fails leaves the turns, and its error is in `not_run`.
    """
    run, size, device = PROGRAMS.get(program, nothing), world.size, world.device
    runs = {THREADS: host_time(partial(launch, run, size, device, device=device))}
    for peer in world.peers:
        runs[peer] = host_time(partial(run_in_processes, run, size, peer, device))
    not_run: dict[str, str] = {}
    samples: dict[str, list[tuple[float, ...]]] = {way: [] for way in runs}

    def sample(way: str, calls: int) -> tuple[float, ...]:
        try:
            return () if way in not_run else tuple(runs[way](calls))
        except Exception as error:  # any error of a program is the reason why it has no time
            not_run[way] = f"{program}: {_reason(error)}"
            return ()

    first = sample(THREADS, 1)  # untimed: it may import modules
    launches = _LAUNCHES_OF_EMPTY if program == EMPTY else _LAUNCHES
    for _, way in turns(list(runs), rounds):
        samples[way].append(sample(way, launches if way == THREADS else 1))
    timings = {way: Timing(tuple(s)) for way, s in samples.items() if way not in not_run}
    rows = [Row(way, timing, PEER if way == "gloo" else OURS) for way, timing in timings.items()]
    if mine := timings.pop(THREADS, None):
        rows[0] = Row(THREADS, mine, numbers={"first": first[0]}).compared(timings)
    return Result(world.about(program=program), rows, not_run, failed=THREADS in not_run)


def _in_both(results: Sequence[Result], peer: str) -> list[tuple[Row, Row]]:
    """Return the rows of threads and of the peer, of all test cases that ran in both ways."""
    cases = [result for result in results if result.about.get("program") in PROGRAMS]
    return [
        (mine, theirs)
        for case in cases
        if (mine := case.row(THREADS)) and (theirs := case.row(peer))
    ]


def _totals(pairs: Sequence[tuple[Row, Row]]) -> list[list[float]]:
    """Return the seconds of all cases by round, of each of the two ways."""
    return [
        [sum(seconds) for seconds in zip(*(row.timing.rounds for row in rows), strict=True)]
        for rows in zip(*pairs, strict=True)
    ]


_LIST_SHARE = time_over(LIST)
_GPU_TARGETS = (
    Target("all_reduce on a GPU: time over the list call's", 1.2, THREADS, _LIST_SHARE,
           where(bytes=at_least(_MIB)), "<="),
    Target("all_reduce on a GPU: faster than gloo", 10, THREADS, over("gloo"),
           where(bytes=at_least(_MIB))),
)  # fmt: skip
_TARGETS = (
    Target("start and end of a world of threads", 50, THREADS, lambda row: row.seconds * 1e3,
           where(program=(EMPTY,)), "<=", " ms"),
    Target("all_reduce of little data: a rank's call", 15, THREADS,
           lambda row: row.numbers["call"] * 1e6, where(bytes=range(_KIB + 1)), "<=", " us"),
    Target("all_reduce of 1 MiB: time over the list call's", 1.3, THREADS, _LIST_SHARE,
           where(bytes=(_MIB,)), "<="),
)  # fmt: skip


def judge(args: argparse.Namespace, results: Sequence[Result]) -> list[Outcome]:
    """Return the outcomes of the targets of the device."""
    if _device(args).type == "cuda":
        return [target.judge(results) for target in _GPU_TARGETS]
    programs: list[tuple[float | None, str]] = []
    for world in args.threads:
        if pairs := _in_both([r for r in results if r.about["world"] == world], "gloo"):
            mine, theirs = _totals(pairs)
            programs.append((median_ratio(theirs, mine), f"{world} ranks"))
    whole = worst("test cases: faster than processes of gloo", 10, programs)
    return [*(target.judge(results) for target in _TARGETS), whole]
