"""Measure training steps: naive loop, pycollect, and DDP processes, against one replica.

`python bench/train.py --targets` takes about fifteen minutes on two cores, most of them for the
ResNet-18; `--models lenet` takes one minute. With `--devices cuda:0 --worlds 4` the four processes
of DDP share a GPU. The exit status is 1 if a process of DDP fails, 3 if a target is missed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import pycollect
from pycollect._command import Interruption
from pycollect._timing import Effort
from pycollect.train.models import MODELS
from pycollect_bench import environment, scripts, table, training
from pycollect_bench.output import keep_json, write_json
from pycollect_bench.record import call_record, rounds_record, target_record
from pycollect_bench.targets import Outcome, status
from pycollect_bench.training.picture import draw

DIGITS = 1442  # training examples of the digits data set, for the seconds of an epoch
LEGEND = f"""\
# x one: step time divided by one replica's on the whole batch, median over rounds.
# reduction: the time in which a step waits for it; for DDP, which overlaps, a separate
# reduction of the same bytes. epoch: the steps for {DIGITS} digits
#{"step":<26} {"p50 (ms)":>9} {"p99 (ms)":>9} {"x one":>6} {"epoch (s)":>9} \
{"reduct(ms)":>10} {"% step":>6}"""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=list(MODELS),
        default=list(MODELS),
        help="models to train (both)",
    )
    add("--worlds", nargs="+", type=int, default=[1, 2, 4], help="numbers of ranks (1 2 4)")
    add("--batch", type=int, default=256, help="examples of all ranks together (256)")
    add("--size", type=int, default=28, help="height and width of the images; LeNet needs 28 (28)")
    add("--devices", help="devices of the ranks, in turn, as pycollect.devices reads them")
    add("-n", "--iterations", type=int, help="timed steps of each (by time, if not given)")
    add("-w", "--warmup", type=int, default=1, help="steps before the first timed one (1)")
    add("--seconds", type=float, default=30.0, help="time for a case, with 7 steps at least (30)")
    add("--no-ddp", action="store_true", help="leave out DDP")
    add("--compile", action="store_true", help="add the step as one graph of torch.compile")
    add(
        "--no-loading", action="store_true", help="leave out the benefit of preparing batches ahead"
    )
    add("--targets", action="store_true", help="check the speed targets of this device")
    add("--json", metavar="FILE", help="all results, in medians and their spread")
    add("--plot", metavar="FILE", help="a picture: bars of steps and of their reductions")
    args = scripts.parse(parser, argv)
    if min(*args.worlds, args.batch, args.size) < 1:
        parser.error("numbers and sizes must be positive")
    if args.size != 28 and "lenet" in args.models:
        parser.error("LeNet takes images of 28 x 28: add --models resnet18")
    return args


def cases(args: argparse.Namespace) -> list[training.TrainingCase]:
    """Return a case for every model and number of ranks."""
    devices = pycollect.devices(args.devices)
    return [
        training.TrainingCase(
            model, args.batch, tuple(devices[r % len(devices)] for r in range(world)), args.size
        )
        for model in args.models
        for world in args.worlds
    ]


def lines(result: training.Result) -> list[str]:
    """Return the table of one case."""
    case = result.case
    ranks = "1 rank" if case.world == 1 else f"{case.world} ranks"
    out = [f"# {case.model}, {ranks}, batch {case.batch}, {case.size} x {case.size}"]
    steps = -(-DIGITS // case.batch)
    for name, entry in result.entries.items():
        share = 100 * (result.share(name) or 0)
        out.append(
            f" {name:<26} {entry.step * 1e3:>9.1f} {entry.timing.percentile(99) * 1e3:>9.1f} "
            f"{result.slowdown(name) or 0:>6.2f} {entry.step * steps:>9.2f} "
            f"{entry.reduction * 1e3:>10.3f} {share:>6.2f}"
        )
    return out + [f"# {name} not run: {why}" for name, why in result.not_run.items()]


def loading_lines(result: training.LoadingResult) -> list[str]:
    """Return the table about batches prepared ahead."""
    out = [f"#{'lenet on two ranks':<26} {'p50 (ms)':>9} {'p99 (ms)':>9} {'waited (ms)':>11}"]
    for name, entry in result.entries.items():
        p50, p99 = (entry.timing.percentile(p) * 1e3 for p in (50, 99))
        out.append(f" {name:<26} {p50:>9.1f} {p99:>9.1f} {entry.waited * 1e3:>11.3f}")
    return out + [f"# {name} not run: {why}" for name, why in result.not_run.items()]


def loading_record(result: training.LoadingResult) -> dict[str, Any]:
    """Return the loading result for the JSON file."""
    rows = [
        {**call_record(name, entry.timing), "waited": entry.waited}
        for name, entry in result.entries.items()
    ]
    return {"not_run": result.not_run, "rows": rows}


def result_record(result: training.Result) -> dict[str, Any]:
    """Return the result of one case for the JSON file."""
    case = result.case
    about = {"model": case.model, "batch": case.batch, "world": case.world, "size": case.size}
    rows = [
        {
            **call_record(name, entry.timing),
            "reduction": entry.reduction,
            "of_one_replica": rounds_record(result.slowdowns(name)),
        }
        for name, entry in result.entries.items()
    ]
    devices = [str(device) for device in case.devices]
    return {**about, "devices": devices, "not_run": result.not_run, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("train", lambda: compare(argv))


def compare(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    about = environment.describe(shlex.join(sys.orig_argv))
    print(*environment.header(about), sep="\n", flush=True)
    before = environment.Load.now()
    effort = Effort(args.seconds, args.iterations, args.warmup, single_calls=True)
    print(LEGEND)
    results, loading = [], None

    def content(outcomes: Sequence[Outcome] = ()) -> dict[str, Any]:
        record = {"environment": about}
        record["noise"] = environment.noise(before, environment.Load.now(), [])
        record["training"] = [result_record(result) for result in results]
        record["loading"] = loading_record(loading) if loading else None
        record["targets"] = [target_record(outcome) for outcome in outcomes]
        return record

    with Interruption() as interruption:
        for case in cases(args):
            results.append(training.measure(case, effort, not args.no_ddp, args.compile))
            print(*lines(results[-1]), sep="\n", flush=True)
            keep_json(args.json, content)
        if not args.no_loading:
            ranks = [cases(args)[0].devices[0]] * 2
            loading = training.measure_loading(ranks, args.batch, effort)
            print(*loading_lines(loading), sep="\n", flush=True)
    outcomes = training.judge(results) if args.targets else []
    if outcomes:
        print(*table.target_lines(outcomes), sep="\n")
    record = content(outcomes)
    print(*environment.footer(record["noise"]), sep="\n")
    write_json(args.json, record, interruption)
    if args.plot and results:
        draw(record, args.plot)
    interruption.reraise(args.json)
    return status(outcomes, any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
