"""`python -m pycollect.train`: trains LeNet on the command line, see --help."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .compare import compare
from .data import DIGITS, FASHION_MNIST, NAMES
from .fashion import DataError
from .reduce import REDUCTIONS
from .report import Report
from .settings import Choice
from .trainer import run

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended

EPILOG = """\
The line of an epoch gives the seconds of its training steps (splitting the batch, forward,
backward, reduction, update) without the evaluation, the mean loss per training example, and the
share of test examples that are classified right. All ranks evaluate, each a part of the test set.
"""


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    p = argparse.ArgumentParser(
        prog="python -m pycollect.train",
        description="Train LeNet data-parallel: one replica per rank, the batch scattered over "
        "the ranks, the gradients summed in one collective.",
        epilog=EPILOG,
    )
    p.add_argument(
        "--devices",
        nargs="+",
        metavar="SPEC",
        help="one rank per device, e.g. 'cpu*4', 'cuda:*', 'cuda:0*2' or cuda:0 cpu "
        "(default: every CUDA device, else two ranks on the CPU)",
    )
    p.add_argument(
        "--data",
        choices=NAMES,
        default="auto",
        help="auto: Fashion-MNIST if it is in --data-dir or can be downloaded (needs torchvision "
        "and a network), else the handwritten digits of scikit-learn (default: auto)",
    )
    p.add_argument(
        "--data-dir",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="where Fashion-MNIST is or goes (default: data)",
    )
    hyperparameters = (
        ("--batch-size", "batch_size", int, "examples of all ranks together"),
        ("--lr", "lr", float, "learning rate"),
        ("--epochs", "epochs", int, "passes over the training set"),
    )
    for flag, name, kind, meaning in hyperparameters:
        usual = f"{getattr(DIGITS, name)} for the digits, {getattr(FASHION_MNIST, name)} for "
        p.add_argument(
            flag,
            type=kind,
            metavar="N" if kind is int else "RATE",
            help=f"{meaning} (default: {usual}Fashion-MNIST)",
        )
    p.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="for initialisation and order; the same seed gives the same bits",
    )
    how = p.add_mutually_exclusive_group()
    how.add_argument(
        "--reduce",
        choices=tuple(REDUCTIONS),
        default="pycollect",
        help="naive: the book's loop over the tensors (default: pycollect)",
    )
    how.add_argument(
        "--compare",
        action="store_true",
        help="run both, taking turns at every step, and print the ratios of the "
        "median reduction time and of the median epoch time",
    )
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; give the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    command = parser()
    args = command.parse_args(arguments)
    choice = Choice(
        args.devices, args.batch_size, args.lr, args.epochs, args.seed, args.data, args.data_dir
    )
    report = Report()
    try:
        try:
            data, settings, notice = choice.prepare()
        except ValueError as error:
            command.error(str(error))
        if notice:
            report.line(notice)
        if args.compare:
            compare(data, settings, report)
        else:
            run(data, settings, args.reduce, report)
    except DataError as error:
        print(f"{command.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
