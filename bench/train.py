"""Measure training steps: naive loop, pycollect, and DDP processes, against one replica.

`python bench/train.py --targets` takes about fifteen minutes on two cores, most of them for the
ResNet-18; `--models lenet` takes one minute. With `--devices cuda:0 --worlds 4` the four ranks
share a GPU, and LeNet's step is also measured as a CUDA graph. The exit status is 1 if a process of
DDP fails or a parameter is wrong, 3 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import pycollect
from pycollect.train.models import MODELS
from pycollect_bench import report, training
from pycollect_bench.options import effort, positive
from pycollect_bench.report import Column, Table, Target, where
from pycollect_bench.runner import Item, Result, Script

DIGITS = 1442  # training examples of the digits data set, for the seconds of an epoch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, models = parser.add_argument, list(MODELS)
    add("--models", nargs="+", choices=models, default=models, help="models to train (both)")
    add("--worlds", nargs="+", type=positive, default=[1, 2, 4], help="numbers of ranks (1 2 4)")
    add("--batch", type=positive, default=256, help="examples of all ranks together (256)")
    what = "height and width of the images; LeNet needs 28 (28)"
    add("--size", type=positive, default=28, help=what)
    add("--devices", help="devices of the ranks, in turn, as pycollect.devices reads them")
    add("--no-ddp", action="store_true", help="leave out DDP")
    add("--compile", action="store_true", help="add the step as one graph of torch.compile")
    what = "leave out the benefit of preparing batches ahead"
    add("--no-loading", action="store_true", help=what)


def cases(args: argparse.Namespace) -> list[training.TrainingCase]:
    """Return a case for every model and number of ranks; raise ValueError if one is impossible."""
    if args.size != 28 and "lenet" in args.models:
        raise ValueError("LeNet takes images of 28 x 28: add --models resnet18")
    devices = pycollect.devices(args.devices)
    return [
        training.TrainingCase(
            model, args.batch, tuple(devices[r % len(devices)] for r in range(world)), args.size
        )
        for model in args.models
        for world in args.worlds
    ]


def title(result: Result) -> str:
    ranks = "1 rank" if result.about["world"] == 1 else "{world} ranks"
    return f"# {{model}}, {ranks}, batch {{batch}}, {{size}} x {{size}}".format_map(result.about)


OF_ONE, STEP = report.time_over(training.ONE), where(what=(training.STEP,))
STEPS = Table(
    f"""\
# x one: step time divided by one replica's on the whole batch, median over rounds.
# reduct: the time in which a step waits for its reduction; for DDP, which overlaps, a separate
# reduction of the same bytes. epoch: the steps for {DIGITS} digits. #wrong: parameters of all ranks
# whose bits differ from the naive loop's""",
    (
        report.name("step", 26),
        *report.times("ms"),
        Column(
            "x one", "", 6, lambda about, row: report.number(report.time_over(training.ONE)(row))
        ),
        Column("epoch", "(s)", 9, lambda a, row: f"{row.seconds * -(-DIGITS // a['batch']):.2f}"),
        report.of_row("reduct", "reduction", "(ms)", 10, 3, 1e3),
        Column("% step", "", 6, lambda about, row: report.number(training.share(row))),
        report.wrong(),
    ),
    title,
)
WAITED = report.of_row("waited", "waited", "(ms)", 9, 3, 1e3)
LOADING = Table(
    "# waited: the time in which a step waits for its batch",
    (report.name("lenet on two ranks", 32), *report.times("ms"), WAITED),
)


def measure(args: argparse.Namespace) -> Iterator[Item]:
    found, how = cases(args), effort(args, single_calls=True)
    yield STEPS
    for case in found:
        yield training.measure(case, how, not args.no_ddp, args.compile)
    if not args.no_loading:
        yield LOADING
        yield training.measure_loading([found[0].devices[0]] * 2, args.batch, how)


TWO = where(STEP, world=(2,), batch=report.at_least(256))
TARGETS = (
    *(Target(f"{m}: two ranks' step, of {training.ONE}", 1.05, training.OVERLAPPED, OF_ONE,
             where(TWO, model=(m,)), "<=") for m in MODELS),
    *(Target(f"{m}: reduction's share of the step", most, training.PYCOLLECT, training.share,
             where(STEP, model=(m,)), "<", "%")
      for m, most in (("lenet", 10.0), ("resnet18", 2.0))),
)  # fmt: skip
SHARED = where(STEP, model=("lenet",), world=(4,), devices=report.ONE_GPU)
GPU_TARGETS = (
    Target("lenet: DDP of 4 processes on a GPU, of gloo", 3.0, training.DDP_OURS,
           report.over(training.DDP_GLOO), SHARED),
    Target("lenet: graph of 4 ranks on a GPU, of the naive loop", 5.0, training.GRAPH,
           report.over(training.WHOLE), SHARED),
    Target("lenet: reduction's share on 4 ranks", 3.0, training.PYCOLLECT, training.share, SHARED,
           "<=", "%"),
)  # fmt: skip


def targets(args: argparse.Namespace) -> Sequence[Target]:
    """Return the targets of this device.

    The slowdown is that of steps with overlap, the default, the reduction's share without.
    """
    on_gpu = any(device.type == "cuda" for case in cases(args) for device in case.devices)
    return GPU_TARGETS if on_gpu else TARGETS


SCRIPT = Script(
    "train", __doc__, add_arguments, measure, 30.0, 1, cases, targets=targets, draw=training.draw
)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
