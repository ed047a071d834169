"""Benchmark of the collectives: nccl-tests' columns, with peers and limit measured in the same run.

`main` is the command; `add_arguments` and `run` let another command include it. Importing this
package does not affect measurements. matplotlib is loaded only for a plot.
"""

from __future__ import annotations

import pycollect  # before torch: Ctrl-C from here on prints no traceback

# isort: split
import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from pycollect import _command
from pycollect._command import Interruption
from pycollect._sizes import parse_size, size_range
from pycollect._timing import Effort, Timing

from . import environment, output, processes, record, table
from .baselines import NAMES, usual
from .cases import COLLECTIVES, LENET, Case, sized_case
from .comparison import DEFAULT, Candidates, CaseResult, run_case
from .gpu import GRAPH_CALLS
from .options import add_arguments, algorithms
from .overhead import call_costs
from .targets import Outcome, judge, status

__all__ = ["add_arguments", "main", "run"]

_LEGEND = """\
# One process. Times are of one call through Python; `inside` leaves Python out.
# Before each timed call every rank's buffer is rewritten, so caches hold dirty lines of all ranks,
# as after a producer (`inside` calls follow each other, on the results of the last call).
# {speed}
# %limit: relative to the faster of `memory` and `memory_flat`, which multiply the same bytes in
# place (`inside`: `memory_flat` without rewrites, minus the time of a torch call on one element).
# xnaive: the naive loop's time divided by this candidate's. The candidates take turns; ratios are
# medians over rounds.
# #wrong: elements of all ranks that differ from the exact result, in a separate run."""
_GPU_LEGEND = """\
# One process. Times are of one call through Python until the GPU is done; `:gpu` is the GPU's own
# time, by events, and `:graph` the same for one of {calls} calls replayed in a graph (on zeros).
# Before each timed call every rank's buffer is rewritten.
# {speed}
# %limit: relative to `memcpy`, which copies the same bytes on the device, by the same clock.
# xnaive: the naive loop's time divided by this candidate's, by the same clock (graph: by `:gpu`).
# #wrong: elements of all ranks that differ from the exact result, in a separate run."""
_MOVED = "moved: bytes that must be read and written (all_reduce: 2 x world x size), per second."
_BUS = "busbw: as nccl-tests define it; no limit is measured between memories."


def _devices(spec: str | None, world: int) -> tuple[torch.device, ...]:
    """Return a device per rank: the named devices, repeated in order."""
    named = pycollect.devices(spec)
    return tuple(named[rank % len(named)] for rank in range(world))


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    only_extras = (args.coalesced or args.overhead) and not args.targets
    for dtype in args.dtype:
        for world in args.world:
            devices = _devices(args.devices, world)
            if not only_extras:
                for size in size_range(args.minbytes, args.maxbytes, args.stepfactor):
                    yield sized_case(args.collective, size, dtype, args.op, devices)
            if args.coalesced or args.targets:
                yield Case("all_reduce_coalesced", dtype, args.op, devices, LENET)


def _measure(
    args: argparse.Namespace,
    cases: Sequence[Case],
    effort: Effort,
    results: list[CaseResult],
    keep: Callable[[], None],
) -> None:
    """Measure case by case: print every result, append it to `results`, and call `keep`."""
    if not cases:
        return
    one_memory = all(case.one_memory for case in cases)
    columns = table.columns(one_memory)
    legend = _GPU_LEGEND if all(case.on_gpus for case in cases) else _LEGEND
    legend = legend.format(speed=_MOVED if one_memory else _BUS, calls=GRAPH_CALLS)
    print(legend, *table.head(columns), sep="\n", flush=True)
    for case in cases:
        peers = usual(case) if args.peers is None else tuple(args.peers)
        selection = Candidates(algorithms(args.algorithms, case.collective), peers)
        results.append(run_case(case, selection, effort))
        print(*table.lines(results[-1], columns), sep="\n", flush=True)
        keep()


def run(args: argparse.Namespace, command: str) -> int:
    """Run the benchmark of `args` (see `add_arguments`), print it, and return the exit status.

    Ctrl-C and SIGTERM end the measurement, and results up to then are written.

    Raises:
        KeyboardInterrupt: after an interruption, once the results are written.
        OutputError: if a file cannot be written.
        ValueError: if sizes, devices or algorithms are invalid together.
    """
    if args.minbytes is None:
        args.minbytes = parse_size("4" if args.processes else "4K")
    if args.processes:
        return processes.run(args, command)
    if args.collective not in COLLECTIVES:
        raise ValueError(
            f"--collective {args.collective} does not exist in one process; there are "
            f"{', '.join(COLLECTIVES)}"
        )
    for peer in args.peers or ():
        if peer not in NAMES:
            raise ValueError(f"{peer!r} is not a peer of one process; there are {', '.join(NAMES)}")
    if args.threads:
        torch.set_num_threads(args.threads)
    effort = Effort(args.seconds, args.iterations, args.warmup)
    cases = list(_cases(args))
    output.check(args, any(len(case.shapes) == 1 for case in cases))
    about = environment.describe(command) | record.requested(args)
    before = environment.Load.now()
    print(*environment.header(about), sep="\n", flush=True)
    results: list[CaseResult] = []
    calls: dict[str, Timing] = {}

    def content(outcomes: Sequence[Outcome] = ()) -> dict[str, Any]:
        noise = environment.noise(before, environment.Load.now(), results)
        return record.run_record(about, noise, results, calls, outcomes)

    with Interruption() as interruption:
        _measure(args, cases, effort, results, partial(output.keep_json, args.json, content))
        if args.overhead or args.targets:
            calls = call_costs(effort, _devices(args.devices, 1)[0])
            print(*table.call_lines(calls), sep="\n")
    outcomes = judge(results, calls) if args.targets else []
    if outcomes:
        print(*table.target_lines(outcomes), sep="\n")
    found = content(outcomes)
    print(*environment.footer(found["noise"]), sep="\n")
    output.write_all(args, found, interruption)
    return status(outcomes, any(result.failed(DEFAULT) for result in results))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with these arguments, or those of the process; return the exit status."""
    return _command.run("pycollect bench", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="pycollect bench", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    command = shlex.join(sys.orig_argv if argv is None else ["pycollect", "bench", *argv])
    try:
        return run(args, command)
    except ValueError as error:
        parser.error(str(error))
