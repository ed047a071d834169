"""Sizes in bytes as text: the suffixes K, M and G are powers of two (4K, 1M, 2G)."""

from __future__ import annotations

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Return the number of bytes that `text` names.

    >>> parse_size("4K"), parse_size("1m"), parse_size("100")
    (4096, 1048576, 100)

    Raises:
        ValueError: if `text` is not a positive whole number with at most a suffix K, M or G.
    """
    digits, factor = text.strip().upper(), 1
    if digits and digits[-1] in _SUFFIXES:
        digits, factor = digits[:-1], _SUFFIXES[digits[-1]]
    if not (digits.isascii() and digits.isdigit() and int(digits)):
        raise ValueError(
            f"{text!r} is not a size; pass a number of bytes, such as 100, 4K, 1M or 2G"
        )
    return int(digits) * factor


def size_range(begin: int, end: int, factor: int) -> list[int]:
    """Return begin, begin * factor, ... up to end.

    >>> size_range(4096, 70_000, 4)
    [4096, 16384, 65536]

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
