"""Sizes in bytes as text: K, M and G, or KiB, MiB and GiB, are powers of two (4K, 1 MiB, 2G)."""

from __future__ import annotations

import argparse
import re

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Return the number of bytes that `text` names.

    >>> parse_size("4K"), parse_size("1m"), parse_size("1 GiB"), parse_size("100 B")
    (4096, 1048576, 1073741824, 100)

    Raises:
        ValueError: if `text` is not a positive whole number with at most a suffix: B, K, M or G,
            KiB, MiB or GiB, in either case.
    """
    found = re.fullmatch(r"\s*([0-9]{1,30})\s*(?:B|([KMG])(?:IB)?)?\s*", text.upper())
    if found is None or not int(found[1]):
        raise ValueError(
            f"{text!r} is not a size; pass a number of bytes, such as 100, 4K, 1M or 2GiB"
        )
    return int(found[1]) * _SUFFIXES.get(found[2], 1)


def size_argument(text: str) -> int:
    """`parse_size` as a type for argparse, which then prints its message."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size_range(begin: int, end: int, factor: int) -> list[int]:
    """Return begin, begin * factor, ... up to end.

    >>> size_range(4096, 70_000, 4)
    [4096, 16384, 65536]
    >>> size_range(8, 4, 2)
    Traceback (most recent call last):
    ValueError: sizes begin at 8 bytes, past their end at 4
    >>> size_range(4, 8, 1)
    Traceback (most recent call last):
    ValueError: the step factor is 1; it must be 2 or more

    Raises:
        ValueError: if the range is empty, or `factor` would not make it grow.
    """
    if begin > end:
        raise ValueError(f"sizes begin at {begin} bytes, past their end at {end}")
    if factor < 2:
        raise ValueError(f"the step factor is {factor}; it must be 2 or more")
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return sizes


def binary_size(nbytes: int) -> str:
    """Format `nbytes` with the largest unit that leaves a whole number.

    >>> binary_size(4096), binary_size(1 << 20), binary_size(1000)
    ('4 KiB', '1 MiB', '1000 B')
    """
    for suffix, unit in reversed(_SUFFIXES.items()):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {suffix}iB"
    return f"{nbytes} B"
