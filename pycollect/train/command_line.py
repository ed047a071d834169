"""The command-line options of `python -m pycollect.train`, and their `Config`."""

import argparse
from dataclasses import fields
from pathlib import Path

from .comparison import DEFAULT_BACKEND, PAIR, parse_names
from .comparison import NAMES as COMPARED
from .config import PREFETCH, Config
from .datasets import DIGITS, FASHION_MNIST, IMAGE_SIZE, NAMES
from .models import MODELS
from .reduce import GRADIENT_REDUCTIONS

EPILOG = """\
The line of an epoch gives the seconds of its training steps (splitting the batch, forward,
backward, reduction, update) without the evaluation and without waiting for data, the mean loss per
training example, and the share of test examples that are classified correctly. All ranks evaluate,
each a part of the test set. If loss or model are not finite at the end, a last line on standard
error reports it, and so does the log; the exit status is still 0.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m pycollect.train",
        usage="%(prog)s [option ...]",  # the full list would hide an error message below it
        description="Train a model data-parallel: one replica per rank, the batch scattered over "
        "the ranks, the gradients summed in one collective.",
        epilog=EPILOG,
    )
    _add_ranks(p.add_argument_group("ranks"))
    _add_data(p.add_argument_group("model and data"))
    _add_hyperparameters(p.add_argument_group("training"))
    _add_output(p.add_argument_group("output"))
    _add_reduction(p.add_argument_group("reduction"))
    _add_speed(p.add_argument_group("speed"))
    return p


def config(args: argparse.Namespace) -> Config:
    """Return the config of the parsed command line."""
    names = {field.name for field in fields(Config)}
    return Config(**{name: value for name, value in vars(args).items() if name in names})


def _add_ranks(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--devices",
        nargs="+",
        metavar="SPEC",
        help="one rank per device, e.g. 'cpu*4', 'cuda:*', 'cuda:0*2' or cuda:0 cpu "
        "(default: every CUDA device, else two ranks on the CPU)",
    )
    p.add_argument(
        "--num-gpus",
        type=int,
        metavar="N",
        help="the first N GPUs, or N ranks on the CPU where there is no GPU",
    )
    p.add_argument(
        "--weights",
        metavar="W,W,...",
        help="shares of a batch per rank, e.g. 80,20 for a fast and a slow device, or auto: "
        "by measured throughput (default: even shares)",
    )
    _switch(p, "--strict", "refuse a batch that the number of ranks does not divide")


def _add_data(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--model",
        choices=tuple(MODELS),
        help="default: resnet18 for a folder, else lenet",
    )
    p.add_argument(
        "--data",
        choices=NAMES,
        help="auto: Fashion-MNIST if it is in --data-dir or can be downloaded (needs torchvision "
        "and a network), else the handwritten digits of scikit-learn; folder: the images in "
        "--data-dir, which has train/ and val/ or test/ with one folder per class (default: auto)",
    )
    p.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="folder of Fashion-MNIST, also for its download, or the image folder (default: data)",
    )
    p.add_argument(
        "--image-size",
        type=int,
        metavar="PIXELS",
        help=f"height and width to which a folder's images are scaled (default: {IMAGE_SIZE})",
    )
    _switch(p, "--shuffle", "shuffle the examples by seed and epoch (default: yes)")
    _switch(p, "--drop-last", "leave out the last batch of an epoch if it is smaller")


def _add_hyperparameters(p: argparse._ArgumentGroup) -> None:
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
            help=f"{meaning} (default for LeNet: {usual}Fashion-MNIST)",
        )
    for flag, what in (("--scale-batch", "batch size"), ("--scale-lr", "learning rate")):
        p.add_argument(
            flag, action="store_true", help=f"multiply the {what} by the number of ranks"
        )
    p.add_argument("--momentum", type=float, metavar="M", help="momentum of SGD (default: 0)")
    p.add_argument("--weight-decay", type=float, metavar="D", help="weight decay (default: 0)")
    p.add_argument(
        "--microbatch",
        type=int,
        metavar="N",
        help="accumulate the gradients of N examples of all ranks at a time, to save memory",
    )
    _switch(p, "--sync-batchnorm", "take batch statistics over all ranks")
    p.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of initialisation and order; the same seed gives the same bits (default: 0)",
    )


def _add_output(p: argparse._ArgumentGroup) -> None:
    files = (
        ("--checkpoint", "write the state to FILE after every epoch, and at Ctrl-C or SIGTERM"),
        ("--resume", "continue the run of a checkpoint, with its options unless they are given"),
        ("--init-from", "start a new run with the parameters and buffers of a checkpoint"),
        ("--replay-shares", "split every batch by the measured shares of a checkpoint"),
        ("--plot", "draw loss, accuracy and the time per step (.png, .svg or .pdf)"),
    )
    for flag, meaning in files:
        p.add_argument(flag, type=Path, metavar="FILE", help=meaning)
    p.add_argument(
        "--log",
        "--log-file",  # torchrun takes a script's --log as an abbreviation of its own --log-dir
        type=Path,
        metavar="FILE",
        help="write JSON lines: the start, every step, every epoch, the end (under torchrun it is "
        "--log-file)",
    )


def _add_reduction(p: argparse._ArgumentGroup) -> None:
    how = p.add_mutually_exclusive_group()
    how.add_argument(
        "--reduce",
        choices=tuple(GRADIENT_REDUCTIONS),
        default="pycollect",
        help="naive: Dive into Deep Learning's loop over the tensors (default: pycollect)",
    )
    how.add_argument(
        "--compare",
        nargs="?",
        type=_names,
        const=PAIR,
        metavar="NAME,NAME",
        help=f"run several of {','.join(COMPARED)} one after the other on the same batches, and "
        "print the ratios of the median times of a reduction, a step and an epoch (alone: "
        f"{','.join(PAIR)})",
    )
    p.add_argument(
        "--backend",
        metavar="NAME",
        help="pycollect, gloo or nccl: one process per rank, started by torchrun, or those of "
        f"--compare (default there: {DEFAULT_BACKEND})",
    )


def _add_speed(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="reduce the gradients of the last layers while the backward pass still "
        "computes the first; the bits are the same (default: yes, but not for --compare)",
    )
    p.add_argument(
        "--prefetch",
        type=int,
        metavar="N",
        help="batches to prepare ahead, 0 for none; the bits are the same (default: "
        f"{PREFETCH} if files are decoded or a GPU is used, else 0)",
    )
    p.add_argument(
        "--graph",
        action="store_true",
        help="capture the whole step in a CUDA graph, with all ranks on one GPU",
    )
    p.add_argument(
        "--compile",
        nargs="?",
        const=True,
        default=False,
        metavar="BACKEND",
        help="run the steps after the first as one graph of torch.compile (alone: by inductor)",
    )
    p.add_argument(
        "--deterministic",
        action="store_true",
        help="use only algorithms of torch that give the same bits every time; GPUs need it",
    )
    p.add_argument(
        "--exact-times",
        action="store_true",
        help="wait for the GPUs at every time measurement, so that a step's times are exact",
    )


def _names(text: str) -> tuple[str, ...]:
    try:
        return parse_names(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _switch(p: argparse._ArgumentGroup, flag: str, meaning: str) -> None:
    """Add a flag and its negation, so that a resumed run can be given either."""
    p.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=meaning)
