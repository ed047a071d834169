"""Parsers of options, and the options of the effort, with nccl-tests' letters where they exist."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from typing import TypeVar

import torch

from pycollect._timing import Effort

T = TypeVar("T")


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


def positive(text: str) -> int:
    """Parse one number of at least 1, as a type for argparse."""
    return list_of(whole)(text)[0]


def seconds(text: str) -> float:
    """Parse a positive number of seconds, as a type for argparse."""
    found = float(text)
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return found


def dtype(text: str) -> torch.dtype:
    """Parse the name of a dtype of torch, for `list_of`."""
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text!r} is not a torch dtype; give for example float32 or bfloat16")
    return found


def add_effort(parser: argparse.ArgumentParser, usual: float | None, warmup: int) -> None:
    """Add the options that say how long is measured; without usual seconds only `-n`."""
    add = parser.add_argument_group("how it is measured").add_argument
    if usual is None:
        add("-n", "--iterations", type=positive, help="timed runs of each")
        return
    add("-n", "--iterations", type=positive, help="timed calls of each (by time, if not given)")
    what = "calls before the first timed one"
    add("-w", "--warmup", type=positive, default=warmup, help=f"{what} ({warmup})")
    what = "time for each case, about"
    add("--seconds", type=seconds, default=usual, help=f"{what} ({usual:g})")


def effort(args: argparse.Namespace, single_calls: bool = False) -> Effort:
    """Return the effort that the options ask for."""
    return Effort(args.seconds, args.iterations, args.warmup, single_calls)
