"""Measure scatter and copy_ against `.to()`, torch.cuda.comm.scatter and a bare pinned copy.

Try `python bench/copy_bandwidth.py -e 256M --world 4`. Without a GPU the ranks are on the CPU, and
the peers are .to() and torch.tensor_split with clone. Candidates take turns; ratios are medians.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pycollect
from pycollect._command import Interruption
from pycollect._sizes import binary_size, size_argument, size_range
from pycollect._timing import Effort
from pycollect_bench import environment, scripts, table
from pycollect_bench.copies import (
    BARE,
    PLAIN,
    CopyCase,
    CopyResult,
    copy_record,
    direct_copies,
    measure_copy,
    outcomes,
    scatter_copies,
)
from pycollect_bench.output import keep_json, write_json
from pycollect_bench.record import target_record
from pycollect_bench.targets import Outcome, status

HEAD = (
    f"#{'what':<42} {'size':>8} {'way':<12} {'time (us)':>10} {'GB/s':>8} {'x to':>6} {'%bare':>6}"
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("-b", "--minbytes", type=size_argument, default="1M", help="smallest whole tensor (1M)")
    add("-e", "--maxbytes", type=size_argument, default="256M", help="largest whole tensor (256M)")
    add("-f", "--stepfactor", type=int, default=16, help="from size to size (16)")
    add("--world", type=int, default=4, help="ranks of a scatter (4)")
    add("--devices", help="devices of the ranks, in turn, as pycollect.devices reads them")
    add(
        "--dims",
        type=int,
        nargs="+",
        choices=(0, 1),
        default=(0, 1),
        help="dimensions of a scatter (0 1)",
    )
    add("-n", "--iterations", type=int, help="timed calls of each (by time, if not given)")
    add("-w", "--warmup", type=int, default=3, help="calls before the first timed one (3)")
    add("--seconds", type=float, default=1.0, help="time for each copy, about (1.0)")
    add("--targets", action="store_true", help="check the speed targets of scatters to GPUs")
    add("--json", metavar="FILE", help="all results, in medians and their spread")
    return scripts.parse(parser, argv)


def copies(args: argparse.Namespace) -> Iterator[CopyCase]:
    named = pycollect.devices(args.devices)
    devices = tuple(named[rank % len(named)] for rank in range(args.world))
    for size in size_range(args.minbytes, args.maxbytes, args.stepfactor):
        yield from chain(scatter_copies(size, devices, args.dims), direct_copies(size, devices[0]))


def cell(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.2f}"


def lines(result: CopyResult) -> Iterator[str]:
    for name, timing in result.timings.items():
        median = timing.percentile(50)
        yield (
            f" {result.copy.what:<42} {binary_size(result.copy.nbytes):>8} {name:<12} "
            f"{median * 1e6:>10.2f} {result.copy.nbytes / median / 1e9:>8.2f} "
            f"{cell(result.times_faster(name, PLAIN)):>6} "
            f"{cell(result.times_faster(name, BARE), 100):>6}"
        )
    if result.wrong:
        yield f"# WRONG: {result.wrong} elements of {result.copy.what}"


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("copy_bandwidth", lambda: measure(argv))


def measure(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    about = environment.describe(shlex.join(sys.orig_argv))
    print(*environment.header(about), HEAD, sep="\n", flush=True)
    effort = Effort(args.seconds, args.iterations, args.warmup)
    before, results = environment.Load.now(), []

    def content(outcomes: Sequence[Outcome] = ()) -> dict[str, Any]:
        record = {"environment": about}
        record["noise"] = environment.noise(before, environment.Load.now(), [])
        record["copies"] = [copy_record(result) for result in results]
        record["targets"] = [target_record(outcome) for outcome in outcomes]
        return record

    with Interruption() as interruption:
        for copy in copies(args):
            results.append(measure_copy(copy, effort))
            print(*lines(results[-1]), sep="\n", flush=True)
            keep_json(args.json, content)
    checked = outcomes(results) if args.targets else []
    if checked:
        print(*table.target_lines(checked), sep="\n")
    record = content(checked)
    print(*environment.footer(record["noise"]), sep="\n")
    write_json(args.json, record, interruption)
    interruption.reraise(args.json)
    return status(checked, any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
