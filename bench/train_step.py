"""Measure a LeNet training step on ranks that share a device: naive loop, pycollect, and a graph.

Try `python bench/train_step.py --devices cuda:0 --targets`. On a CPU there is no graph. Times are
wall times of a step until the device is done. The exit status is 3 if a target is missed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

import pycollect
from pycollect._command import Interruption
from pycollect._timing import Effort
from pycollect_bench import environment, scripts, table
from pycollect_bench.lenet_step import NAIVE, measure_steps
from pycollect_bench.output import write_json
from pycollect_bench.record import call_record, target_record
from pycollect_bench.targets import status


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--devices", help="one device, as pycollect.devices reads it (the first of the machine)")
    add("--world", type=int, default=4, help="ranks on it (4)")
    add("--batch", type=int, default=256, help="examples of all ranks together (256)")
    add("-n", "--iterations", type=int, help="timed calls of each (by time, if not given)")
    add("-w", "--warmup", type=int, default=3, help="calls before the first timed one (3)")
    add("--seconds", type=float, default=5.0, help="time for all candidates, about (5)")
    add("--targets", action="store_true", help="check the speed targets of one GPU")
    add("--json", metavar="FILE", help="all results, in medians and their spread")
    return scripts.parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("train_step", lambda: compare(argv))


def compare(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    about = environment.describe(shlex.join(sys.orig_argv))
    print(*environment.header(about), sep="\n", flush=True)
    devices = [pycollect.devices(args.devices)[0]] * args.world
    before = environment.Load.now()
    effort = Effort(args.seconds, args.iterations, args.warmup)
    result = measure_steps(devices, args.batch, effort)
    print(f"# LeNet, {args.batch} examples, {args.world} ranks on {devices[0]}")
    print(f"#{'what':<28} {'p50 (us)':>10} {'p99 (us)':>10} {'xnaive':>7}")
    for name, timing in result.timings.items():
        p50, p99 = (timing.percentile(p) * 1e6 for p in (50, 99))
        print(f" {name:<28} {p50:>10.1f} {p99:>10.1f} {result.ratio(NAIVE, name) or 0:>7.2f}")
    outcomes = result.outcomes() if args.targets else []
    if outcomes:
        print(*table.target_lines(outcomes), sep="\n")
    if result.wrong:
        print(f"# WRONG: {result.wrong} parameters differ in bits from those of the naive loop")
    noise = environment.noise(before, environment.Load.now(), [])
    print(*environment.footer(noise), sep="\n")
    record = {"environment": about, "noise": noise, "wrong": result.wrong}
    record["world"], record["batch"] = args.world, args.batch
    record["steps"] = [call_record(name, timing) for name, timing in result.timings.items()]
    record["targets"] = [target_record(outcome) for outcome in outcomes]
    write_json(args.json, record, Interruption())  # a single measurement has no partial results
    return status(outcomes, bool(result.wrong))


if __name__ == "__main__":
    sys.exit(main())
