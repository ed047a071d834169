"""Parsers of options, and the options of the effort, with nccl-tests' letters where they exist.

A parser is a type for argparse, whose message names the option.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection
from itertools import cycle, islice
from typing import TypeVar

import torch

import pycollect
from pycollect._timing import Effort

T = TypeVar("T")


def list_of(one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of comma-separated values that drops repeats."""

    def number(text: str) -> list[T]:  # named so in argparse's message about a ValueError
        return list(dict.fromkeys(one(item.strip()) for item in text.split(",")))

    return number


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """Return a parser of one of the known words."""

    def parse(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"{text!r} is not among {', '.join(known)}")
        return text

    return parse


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    found = float(text)
    if not 0 < found < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return found


def dtype(text: str) -> torch.dtype:
    """Parse the name of a dtype of torch."""
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentTypeError(f"{text!r} is not a torch dtype, as float32 or bfloat16")
    return found


def devices(named: str | None, world: int) -> tuple[torch.device, ...]:
    """Return a device per rank: the named devices, repeated in order."""
    return tuple(islice(cycle(pycollect.devices(named)), world))


def add_effort(parser: ArgumentParser, usual: float | None, warmup: int) -> None:
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


def effort(args: Namespace, single_calls: bool = False) -> Effort:
    """Return the effort that the options ask for."""
    return Effort(args.seconds, args.iterations, args.warmup, single_calls)
