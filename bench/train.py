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
from typing import Any

from pycollect.train.models import MODELS
from pycollect_bench import plot, report, training
from pycollect_bench.options import devices, effort, positive
from pycollect_bench.report import Column, Table, Target, where
from pycollect_bench.runner import Item, Script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, models = parser.add_argument, list(MODELS)
    add("--models", nargs="+", choices=models, default=models, help="models to train (both)")
    add("--worlds", nargs="+", type=positive, default=[1, 2, 4], help="numbers of ranks (1 2 4)")
    add("--batch", type=positive, default=256, help="examples of all ranks together (256)")
    add("--devices", help="devices of the ranks, in turn, as pycollect.devices reads them")
    add("--no-ddp", action="store_true", help="leave out DDP")


def cases(args: argparse.Namespace) -> list[training.TrainingCase]:
    """Return a case for every model and number of ranks; raise ValueError if DDP refuses them."""
    every = devices(args.devices, max(args.worlds))
    if not args.no_ddp and len({device.type for device in every}) > 1:
        raise ValueError("DDP needs all ranks on CPUs or all on GPUs: add --no-ddp")
    return [
        training.TrainingCase(model, args.batch, every[:world])
        for model in args.models
        for world in args.worlds
    ]


OF_ONE = report.time_over(training.ONE)
STEPS = Table(
    """\
# x one: step time divided by one replica's on the whole batch, median over rounds.
# reduct: the time in which a step waits for its reduction; for DDP, which overlaps, a separate
# reduction of the same bytes. #wrong: parameters of all ranks whose bits differ from the naive
# loop's""",
    (
        Column("step", "name", width=-26),
        *report.times("ms"),
        Column("x one", lambda about, row: OF_ONE(row)),
        Column("reduct", "reduction", "(ms)", 10, 3, 1e3),
        Column("% step", lambda about, row: training.share(row)),
        report.WRONG,
    ),
    lambda result: f"# {report.place(result.about)}",
)


def measure(args: argparse.Namespace) -> Iterator[Item]:
    how = effort(args, single_calls=True)
    yield STEPS
    for case in cases(args):
        yield training.measure(case, how, not args.no_ddp)


TWO = where(world=(2,), batch=report.at_least(256))
TARGETS = (
    *(Target(f"{m}: two ranks' step, of {training.ONE}", 1.05, training.OVERLAPPED, OF_ONE,
             where(TWO, model=(m,)), "<=") for m in MODELS),
    *(Target(f"{m}: reduction's share of the step", most, training.PYCOLLECT, training.share,
             where(model=(m,)), "<", "%")
      for m, most in (("lenet", 10.0), ("resnet18", 2.0))),
)  # fmt: skip
SHARED = where(model=("lenet",), world=(4,), devices=report.ONE_GPU)
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


COLOURS = {training.ONE: plot.BASELINE, "forward, backward, update": plot.COMPUTING}
COLOURS |= {"reduction (%)": plot.MOVING}


def draw(record: dict[str, Any], path: str) -> None:
    """Write bars of a run's steps to `path`: a row of panels per number of ranks, of which each has
    a model.
    """
    one, computing, reduction = COLOURS
    worlds: dict[int, dict[str, list[plot.Bar]]] = {}
    for case in record["cases"]:
        ranks = f"{case['world']} rank{'s' * (case['world'] > 1)}"
        title = f"{case['model']}, batch {case['batch']}, {ranks}"
        bars = worlds.setdefault(case["world"], {}).setdefault(title, [])
        for row in case["rows"]:
            step, name = row["time"]["p50"] * 1e3, row["name"]
            reduced = min(row.get("reduction", 0.0) * 1e3, step)
            parts = {one if name == one else computing: step - reduced, reduction: reduced}
            text = f"{1 / row['speedup'][one]:.2f}x"
            text += f", {100 * reduced / step:.2g} %" if reduced else ""
            bars.append((name, parts, text))
    what = "ms per step, ratio to one replica"
    plot.plot_bars(list(worlds.values()), COLOURS, what, record, path)


SCRIPT = Script("train", __doc__, add_arguments, measure, 30.0, 1, cases, targets, draw=draw)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
