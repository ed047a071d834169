"""The options of `python -m pycollect.train`."""

import argparse
from pathlib import Path

from .data import DIGITS, FASHION_MNIST, NAMES
from .reduce import REDUCTIONS

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
    _add_data(p)
    _add_hyperparameters(p)
    _add_reduction(p)
    return p


def _add_data(p: argparse.ArgumentParser) -> None:
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


def _add_hyperparameters(p: argparse.ArgumentParser) -> None:
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


def _add_reduction(p: argparse.ArgumentParser) -> None:
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
