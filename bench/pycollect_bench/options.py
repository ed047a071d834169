"""The command line of the benchmark, with nccl-tests' option letters where they exist."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from typing import TypeVar

import torch

import pycollect
from pycollect._sizes import size_argument

from .baselines import NAMES
from .cases import COLLECTIVES
from .pattern import OPS
from .processes import cases as between
from .processes.candidates import PEERS

T = TypeVar("T")

EPILOG = """\
The exit status is 1 if a result is wrong or pycollect refuses a case, and with --targets 3 if a
target is missed. --coalesced and --overhead replace the sizes; --targets adds the cases that the
targets need.
"""


def list_of(one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of comma-separated values that drops repeats."""

    def parse(text: str) -> list[T]:
        try:
            return list(dict.fromkeys(one(item.strip()) for item in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """Return a parser of one of the known words, for `list_of`."""

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text!r} is not among {', '.join(known)}")
        return text

    return parse


def whole(text: str) -> int:
    """Parse a number of at least 1, for `list_of`."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"{text!r} is not a positive whole number")
    return int(text)


def _positive(text: str) -> int:
    return list_of(whole)(text)[0]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is not a torch dtype; give for example float32 or bfloat16")
    return dtype


def _peer(text: str) -> str:
    known = (*NAMES, *PEERS)
    if text not in known:
        raise ValueError(f"{text!r} is not a peer; there are {', '.join(known)}, all, none")
    return text


def _peers(text: str) -> list[str] | None:
    """Parse the names of peers; None stands for the default peers of a case."""
    named = {"all": None, "none": list[str]()}
    return named[text] if text in named else list_of(_peer)(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to `parser`; `pycollect_bench.run` takes the parsed options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    what = parser.add_argument_group("what is measured")
    add = what.add_argument
    collectives = dict.fromkeys((*COLLECTIVES, *between.COLLECTIVES))
    add("--collective", choices=list(collectives), default="all_reduce", help="(all_reduce)")
    add("-b", "--minbytes", type=size_argument, help="smallest size (4K; 4 with --processes)")
    add("-e", "--maxbytes", type=size_argument, default="128M", help="largest size (128M)")
    add("-f", "--stepfactor", type=_positive, default=4, help="from size to size (4)")
    dtypes = list_of(_dtype)
    add("-d", "--dtype", type=dtypes, default="float32", help="one or more, comma-separated")
    add("-o", "--op", choices=OPS, default="sum", help="the reduction (sum)")
    worlds = list_of(whole)
    add("--world", type=worlds, default="2,4,8", help="numbers of ranks (2,4,8)")
    add("--devices", help="devices of the ranks, in turn, as pycollect.devices reads them")
    add("--algorithms", help="'all' or names, besides the default choice")
    peers = f"{', '.join(NAMES)}; with --processes {', '.join(PEERS)}; all or none (all)"
    add("--peers", type=_peers, default="all", help=peers)
    add(
        "--processes", type=worlds, metavar="N", help="a process per rank, for each of these worlds"
    )
    add("--backend", default="pycollect", help="of torch.distributed, with --processes (pycollect)")
    add("--coalesced", choices=["lenet"], help="the gradients of LeNet in one coalesced call")
    add("--overhead", action="store_true", help="the cost of a call on 4 ranks of 4 elements")
    add("--targets", action="store_true", help="check the speed targets")
    how = parser.add_argument_group("how it is measured")
    add = how.add_argument
    add("-n", "--iterations", type=_positive, help="timed calls of each (by time, if not given)")
    add("-w", "--warmup", type=_positive, default=3, help="calls before the first timed one (3)")
    add("--seconds", type=_seconds, default=1.0, help="time for each case, about (1.0)")
    add("-t", "--threads", type=_positive, help="threads that torch may use (its own choice)")
    out = parser.add_argument_group("where results go besides standard output")
    out.add_argument("--json", metavar="FILE", help="all results, in medians and their spread")
    out.add_argument("--plot", metavar="FILE", help="speed against size (.png, .svg or .pdf)")


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
