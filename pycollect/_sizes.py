"""Sizes in bytes as text: K, M and G, or KiB, MiB and GiB, are powers of two (4K, 1 MiB, 2G).

Also runs of consecutive numbers, which are shown as ranges.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from itertools import groupby

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_argument(text: str) -> int:
    """Return the number of bytes that `text` names; a type for argparse, which prints its message.

    >>> [size_argument(text) for text in ("4K", "1m", "1 GiB", "100 B")]
    [4096, 1048576, 1073741824, 100]

    Raises:
        argparse.ArgumentTypeError: if `text` is not a positive whole number with at most a suffix:
            B, K, M or G, KiB, MiB or GiB, in either case.
    """
    found = re.fullmatch(r"\s*([0-9]{1,30})\s*(?:B|([KMG])(?:IB)?)?\s*", text.upper())
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; pass a number of bytes, such as 100, 4K, 1M or 2GiB"
        )
    return int(found[1]) * _SUFFIXES.get(found[2], 1)


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


def bytes_text(count: float) -> str:
    """Return a size in readable units.

    >>> [bytes_text(n) for n in (0, 1000, 1536, 1 << 20, 5e9)]
    ['0 B', '1000 B', '1.5 KiB', '1 MiB', '4.66 GiB']
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"


def runs(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yield the runs of consecutive numbers, in their order.

    >>> [*runs([5, 1, 2, 3])]
    [[5], [1, 2, 3]]
    """
    # In a run the difference between number and index is constant.
    for _, group in groupby(enumerate(numbers), lambda at: at[1] - at[0]):
        yield [number for _, number in group]
