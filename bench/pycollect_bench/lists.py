"""Collectives in one process, on a list of tensors: candidates, clocks, table and targets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import pycollect
from pycollect import _C
from pycollect._sizes import size_range
from pycollect._timing import Effort, batched, host_time
from pycollect.gpus import synchronizer

from . import options, report
from .cases import CPU, LENET, Buffers, Call, Case, run_checked, sized_case
from .clocks import GRAPH_CALLS, gpu_time, graph_of
from .options import devices
from .peers import NAIVE, NAMES, limits, naive_all_reduce, peer, stack_all_reduce
from .report import ONE_GPU, Column, Table, Target, at_least, over, percent_of_limit, where
from .runner import (
    GPU,
    GRAPH,
    INSIDE,
    LIMIT,
    OURS,
    PEER,
    Result,
    Row,
    Way,
    clocked,
    in_turns,
    reason,
)

DEFAULT = "default"  # `algorithm=None`
KIB, MIB = 1 << 10, 1 << 20
# Name of the row in the table of call costs that has a target.
CALL = "all_reduce, 4 ranks x 4 elements"
_RANKS, _ELEMENTS = 4, 4
# Calls in a batch: enough to make the cost of reading the clock negligible, few enough to be rarely
# disturbed.
_BATCH = 500

_LEGEND = """\
# One process. Times are of one call through Python; `inside` leaves Python out.
# Before each timed call every rank's buffer is rewritten, so caches hold dirty lines of all ranks,
# as after a producer (`inside` calls follow each other, on the results of the last call).
# %limit: relative to the faster of `memory` and `memory_flat`, which multiply the same bytes in
# place."""
_GPU_LEGEND = f"""\
# One process. Times are of one call through Python until the GPU is done; `:gpu` is the GPU's own
# time, by events, and `:graph` the same for one of {GRAPH_CALLS} calls replayed in a graph (on
# zeros). Before each timed call every rank's buffer is rewritten.
# %limit: relative to `memcpy`, which copies the same bytes on the device, by the same clock.
# xnaive of `:graph` is the naive loop's `:gpu` time divided by this candidate's."""
_RATIOS = """
# xnaive: the naive loop's time divided by this candidate's. The candidates take turns; ratios are
# medians over rounds.
# #wrong: elements of all ranks that differ from the exact result, in a separate run."""
_MOVED = (
    "\n# moved: bytes that must be read and written (all_reduce: 2 x world x size), per second."
)
_BUS = "\n# busbw: as nccl-tests define it; no limit is measured between memories."


def table(
    one_memory: bool,
    peers: Sequence[str],
    legend: str,
    title: Callable[[Result], str] = lambda result: "",
    more: Sequence[Column] = (),
) -> Table:
    """Return nccl-tests' table; for ranks on one memory `moved` replaces `busbw`."""
    speed = "moved" if one_memory else "busbw"
    columns = (
        Column("world"),
        Column("size", "bytes", "(B)", 11),
        Column("count", width=10),
        Column("type", "dtype", width=13),
        Column("redop", "op", width=5),
        Column("algorithm", "name", width=-16),
        *report.times(),
        Column("algbw", unit="(GB/s)", width=8, scale=1e-9),
        Column(speed, unit="(GB/s)", width=8, scale=1e-9),
        report.LIMIT,
        *(Column(f"x{peer}") for peer in peers),
        *more,
        report.WRONG,
    )
    return Table(legend, columns, title)


def algorithms(text: str | None, collective: str) -> tuple[str | None, ...]:
    """Return the algorithms to run; the first is always None, the library's own choice.

    Raises:
        ValueError: if a name is not registered for the collective.
    """
    if text is None:
        return (None,)
    known = pycollect.algorithms(collective.removesuffix("_coalesced"))
    names = known if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not an algorithm of {collective}; there are {known}")
    return (None, *names)


def cases(args: argparse.Namespace) -> list[Case]:
    """Return the cases that the options request."""
    found, sizes = [], size_range(args.minbytes, args.maxbytes, args.stepfactor)
    for dtype in args.dtype:
        for world in args.world:
            on = devices(args.devices, world)
            for size in () if only_extras(args) else sizes:
                found.append(sized_case(args.collective, size, dtype, args.op, on))
            if args.coalesced or args.targets:
                found.append(Case("all_reduce_coalesced", dtype, args.op, on, LENET))
    return list(dict.fromkeys(found))  # small sizes are rounded to the same one


def only_extras(args: argparse.Namespace) -> bool:
    """Return whether no sizes are measured."""
    return bool((args.coalesced or args.overhead) and not args.targets)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if the options are wrong for one process."""
    if args.coalesced and args.collective != "all_reduce":
        raise ValueError(f"--coalesced is all_reduce, not --collective {args.collective}")
    algorithms(args.algorithms, args.collective)
    cases(args)


def measure(args: argparse.Namespace) -> Iterator[Table | Result]:
    """Measure the cases, and what a call costs."""
    effort, found = options.effort(args), cases(args)
    if found:
        one_memory = all(case.one_memory for case in found)
        legend = _GPU_LEGEND if all(case.on_gpus for case in found) else _LEGEND
        legend += (_MOVED if one_memory else _BUS) + _RATIOS
        yield table(one_memory, [NAIVE], legend)
    for case in found:
        usual = NAMES if case.on_gpus else NAMES[:2]
        names = usual if args.peers is None else args.peers
        yield Candidates(case, algorithms(args.algorithms, case.collective), names).result(effort)
    if args.overhead or args.targets:
        yield Table("", (Column("call", "name", width=-36), *report.times()))
        yield call_costs(effort, devices(args.devices, 1)[0])


class Candidates:
    """The candidates of a case on one set of buffers, and why other candidates do not run."""

    def __init__(
        self, case: Case, algorithms: Sequence[str | None] = (None,), peers: Sequence[str] = ()
    ) -> None:
        self.case = case
        self.memory: list[Tensor] = []  # that of all buffers, as float32
        self.ranks = [Buffers(case, r, partial(self._empty, d)) for r, d in enumerate(case.devices)]
        self.synchronize = synchronizer(case.devices)
        self.ways: dict[str, Way] = {}  # by row
        self.not_run: dict[str, str] = {}
        for algorithm in algorithms:
            self._try(algorithm or DEFAULT, OURS, partial(self._call, algorithm))
        on_cpu = case.one_memory and not case.on_gpus
        if case.collective == "all_reduce" and on_cpu and DEFAULT in self.ways:
            self.ways[INSIDE] = Way(self._inside, INSIDE)
        for name in peers:
            self._try(name, PEER, partial(peer, name, case, self.ranks))
        for limit, (call, rewrite) in limits(case, self.memory).items():
            self._add(limit, LIMIT, call, rewrite)

    def _empty(self, device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
        nbytes = count * dtype.itemsize
        self.memory.append(torch.ones(-(-nbytes // 4), device=device))
        return self.memory[-1].view(torch.uint8)[:nbytes].view(dtype)

    def _call(self, algorithm: str | None) -> Call:
        """Return pycollect's call on the buffers."""
        case, spec = self.case, self.case.spec
        tensors = [one.inputs if len(case.shapes) > 1 else one.input for one in self.ranks]
        arguments = [tensors, *[0] * spec.rooted, *[case.op] * spec.reduces]
        out = {} if spec.in_place else {"out": [one.output for one in self.ranks]}
        return partial(getattr(pycollect, case.collective), *arguments, **out, algorithm=algorithm)

    def rewrite(self, value: int = 1) -> None:
        """Write every input, as a producer would."""
        for one in self.ranks:
            one.rewrite(value)

    def _try(self, name: str, kind: str, make: Callable[[], Call]) -> None:
        """Add a candidate, or its reason if it refuses the case; other errors are not caught.

        Any error of a peer is the reason why it does not run: what a GPU library needs is not known
        before.
        """
        self.rewrite()
        try:
            call = make()
            call()
        except Exception as error:
            if kind != PEER and not isinstance(error, TypeError | ValueError | NotImplementedError):
                raise
            self.not_run[name] = reason(error)
            return
        self._add(name, kind, call, self.rewrite, self._check(call))
        if kind == OURS and self.case.on_gpus and self.case.one_memory:
            graph = clocked(name, GRAPH)
            try:
                # Many calls, on zeros, which no op changes; one call is checked.
                replay, once = (graph_of(call, number) for number in (GRAPH_CALLS, 1))
            except RuntimeError as error:  # the calls themselves are still measured
                self.not_run[graph] = reason(error)
            else:
                zeros = partial(self.rewrite, 0)
                sampler = gpu_time(replay, zeros, self.case.devices, GRAPH_CALLS)
                self.ways[graph] = Way(sampler, OURS, GRAPH, self._check(once))

    def _check(self, call: Call) -> Callable[[], int]:
        return partial(run_checked, self.ranks, call, self.synchronize)

    def _add(
        self,
        name: str,
        kind: str,
        call: Call,
        rewrite: Call,
        check: Callable[[], int] | None = None,
    ) -> None:
        sampler = host_time(call, rewrite, self.synchronize)
        self.ways[name] = Way(sampler, kind, check=check)
        if self.case.on_gpus:
            sampler = gpu_time(call, rewrite, self.case.devices)
            self.ways[clocked(name, GPU)] = Way(sampler, kind, GPU)

    def _inside(self, calls: int) -> list[float]:
        """Return the seconds of calls that the extension makes itself, without Python."""
        self.rewrite(0)  # no op changes zeros, however often it runs
        inputs = [one.input for one in self.ranks]
        return _C.time_all_reduce(inputs, self.case.op, None, calls)

    def result(self, effort: Effort) -> Result:
        """Measure every candidate in turns, check its result, and return its ratios."""
        rows = in_turns(self.ways, effort, numbers=lambda row: self.case.speed(row.seconds))
        # A call that does not run in a graph fails the run as well.
        failed = DEFAULT in {name.partition(":")[0] for name in self.not_run}
        return Result(self.case.about(), rows, self.not_run, failed)


def call_costs(effort: Effort, device: torch.device) -> Result:
    """Measure a call on little data, of pycollect, of its peers and of one torch function.

    The buffers hold zeros, which no sum changes, so they are not rewritten between calls. On a GPU
    the time ends when the call returns, without synchronization between calls.
    """
    data = [torch.zeros(_ELEMENTS, device=device) for _ in range(_RANKS)]
    few, many = _BATCH // 10, _BATCH
    ways = {
        CALL: Way(batched(partial(pycollect.all_reduce, data), many)),
        "the same, naive loop": Way(batched(partial(naive_all_reduce, data), few), PEER),
        "the same, stack and sum": Way(batched(partial(stack_all_reduce, data), few), PEER),
        "torch: one add_ of 4 elements": Way(batched(partial(data[0].add_, data[1]), many), PEER),
    }
    if device == CPU:
        inside = partial(_C.time_all_reduce, data, "sum", None)
        ways["the same, inside the extension"] = Way(inside, INSIDE)
    about = {"collective": "cost of a call", "world": _RANKS, "bytes": 4 * _ELEMENTS}
    return Result(about, in_turns(ways, effort))


# What results of the sums with targets are about.
SUMS = where(collective=("all_reduce",), dtype=("float32",), op=("sum",))
MANY = at_least(2)  # ranks
_ON_CPU = where(SUMS, devices=("cpu",))
_LENET = where(SUMS, collective=("all_reduce_coalesced",), devices=("cpu", *ONE_GPU), world=(4,))
_LOOP, _LIMIT = over(NAIVE), percent_of_limit


def _microseconds(row: Row) -> float:
    return row.seconds * 1e6


_TARGETS = (
    Target("limit, from 1 MiB", 90, DEFAULT, _LIMIT,
           where(_ON_CPU, world=MANY, bytes=at_least(MIB)), unit="%"),
    Target("naive loop, 2 ranks, every size", 1.5, DEFAULT, _LOOP, where(_ON_CPU, world=(2,))),
    *(Target(f"naive loop, {w} ranks, {name}", wanted, DEFAULT, _LOOP,
             where(_ON_CPU, world=(w,), bytes=sizes))
      for w in (4, 8)
      for name, wanted, sizes in (
          ("at 4 KiB", 3.0, (4 * KIB,)), ("at 64 KiB", 3.0, (64 * KIB,)),
          ("at 1 MiB", 2.0, (MIB,)), ("from 16 MiB", 3.0, at_least(16 * MIB)))),
    Target("naive loop, LeNet's gradients of 4 ranks", 5.0, DEFAULT, _LOOP, _LENET),
    Target("cost of a call, 4 ranks x 4 elements", 3.0, CALL, _microseconds, None, "<", "us"),
)  # fmt: skip
_ON_GPU = where(SUMS, dtype=("float32", "bfloat16"), devices=ONE_GPU)
_SMALL = where(_ON_GPU, world=(4, 8), bytes=range(256 * KIB + 1))
_LARGE = where(_ON_GPU, world=(4, 8), bytes=at_least(64 * MIB))
_BY_GPU, _IN_GRAPH = clocked(DEFAULT, GPU), clocked(DEFAULT, GRAPH)
_GPU_TARGETS = (
    Target("limit, from 64 MiB, GPU time", 92, _BY_GPU, _LIMIT, _LARGE, unit="%"),
    Target("naive loop, from 64 MiB", 2.0, DEFAULT, _LOOP, _LARGE),
    Target("a call up to 256 KiB, GPU time", 8.0, _BY_GPU, _microseconds, _SMALL, "<=", "us"),
    Target("the same in a graph of many", 5.0, _IN_GRAPH, _microseconds, _SMALL, "<=", "us"),
    *(Target(f"naive loop, {w} ranks, up to 256 KiB", x, DEFAULT, _LOOP, where(_SMALL, world=(w,)))
      for w, x in ((4, 6.0), (8, 10.0))),
    Target("naive loop, LeNet's gradients of 4 ranks", 20.0, DEFAULT, _LOOP, _LENET),
)  # fmt: skip


def targets(args: argparse.Namespace) -> Sequence[Target]:
    """Return the targets of the ranks' device."""
    on_gpus = all(device.type == "cuda" for device in devices(args.devices, max(args.world)))
    return _GPU_TARGETS if on_gpus else _TARGETS
