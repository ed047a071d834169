"""Test inputs whose reduction is known exactly, so that every wrong element can be counted.

The values of each rank are small integers, so small that every partial result, in any order, is
exact in the element type. They repeat after a prime number of elements. The expected result is
computed for one period, in int64, by code that shares nothing with the measured code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

# A prime: no chunk boundary is a multiple of it, so a misplaced chunk is detected.
PERIOD = 65_521
# Largest number of distinct values; more would find no more errors.
MOST_VALUES = 13

_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "avg": lambda rows: rows.sum(0),
    "prod": lambda rows: rows.prod(0),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
    "band": lambda rows: functools.reduce(torch.bitwise_and, rows),
    "bor": lambda rows: functools.reduce(torch.bitwise_or, rows),
    "bxor": lambda rows: functools.reduce(torch.bitwise_xor, rows),
}
OPS = tuple(_REDUCE)


def largest_exact(dtype: torch.dtype) -> int:
    """Return n such that every integer from 0 to n is a value of `dtype`.

    >>> largest_exact(torch.bfloat16), largest_exact(torch.float8_e5m2), largest_exact(torch.int8)
    (256, 8, 127)
    """
    if dtype == torch.bool:
        return 1
    if dtype.is_floating_point or dtype.is_complex:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


class Pattern:
    """The inputs of `world` ranks for one `op` and `dtype`, and their reduction.

    >>> p = Pattern(torch.float32, "sum", 2)
    >>> bool((p.rank(0, 9) + p.rank(1, 9) == p.reduced(9)).all())
    True
    """

    def __init__(
        self, dtype: torch.dtype, op: str, world: int, device: torch.device | None = None
    ) -> None:
        self.dtype, self.op, self.world = dtype, op, world
        # A multiplicative hash: neighbours differ, and no shift maps the sequence onto itself.
        digits = (torch.arange(PERIOD, dtype=torch.int64) * 2_654_435_761 >> 15) % 5_003
        ranks = torch.arange(world, dtype=torch.int64).unsqueeze(1)
        rows = self._integers(digits, ranks)
        # One period is computed on the CPU, and repeated on the ranks' device.
        self._rows = [self._convert(row).to(device) for row in rows]
        self._reduced = self._convert_total(_REDUCE[op](rows)).to(device)

    def rank(self, rank: int, count: int, start: int = 0) -> Tensor:
        """Return elements [start, start + count) of a rank's input, one-dimensional."""
        return _repeat(self._rows[rank], start, count)

    def reduced(self, count: int, start: int = 0) -> Tensor:
        """Return elements [start, start + count) of the reduction over all ranks."""
        return _repeat(self._reduced, start, count)

    def _integers(self, digits: Tensor, ranks: Tensor) -> Tensor:
        """Return the inputs of one period as int64, one row per rank."""
        room = largest_exact(self.dtype)
        if self.dtype == torch.bool:
            return (digits + ranks) % 2
        if self.op == "prod":  # at most `twos` ranks have a 2, the others a 1
            twos = room.bit_length() - 1
            return 1 + ((digits + ranks) % max(self.world, 2) < min(twos, self.world)).long()
        if self.op not in ("sum", "avg"):
            return 1 + (digits + ranks) % min(room, MOST_VALUES)
        if self.world <= room:
            return 1 + (digits + ranks) % min(room // self.world, MOST_VALUES)
        # More ranks than the type's largest exact integer: most of them have a 0.
        return ((digits + ranks) % -(-self.world // room) == 0).long()

    def _convert_total(self, total: Tensor) -> Tensor:
        if self.op != "avg":
            return self._convert(total)
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            # Values are positive, so this division rounds toward zero.
            return self._convert(total // self.world)
        # Definition of "avg": the sum times 1/world in the accumulator's type, then one rounding.
        wide = self.dtype in (torch.float64, torch.complex128)
        accumulator = torch.float64 if wide else torch.float32
        share = torch.tensor(1.0, dtype=accumulator) / self.world
        return self._convert(total.to(accumulator) * share)

    def _convert(self, values: Tensor) -> Tensor:
        if not self.dtype.is_complex:
            return values.to(self.dtype)
        # Products are of real values: imaginary parts would make them too large to be exact.
        real = values.to(torch.float64)
        imag = torch.zeros_like(real) if self.op == "prod" else real
        return torch.complex(real, imag).to(self.dtype)


def _repeat(period: Tensor, start: int, count: int) -> Tensor:
    skip = start % PERIOD
    copies = -(-(skip + count) // PERIOD)
    return period.repeat(copies)[skip : skip + count]


def are_zero(values: Tensor) -> Tensor:
    """Return which elements of a flat tensor of any dtype are zero.

    >>> are_zero(torch.tensor([0.0, 2.0])).tolist()
    [True, False]
    """
    return (values.view(torch.uint8).view(values.numel(), -1) == 0).all(dim=1)


def count_wrong(got: Tensor, wanted: Tensor) -> int:
    """Return the number of elements that differ in any byte; all of them if shape or type differ.

    >>> count_wrong(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    1
    """
    got = got.detach().to(wanted.device).reshape(-1)
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return max(got.numel(), wanted.numel(), 1)
    if not got.numel():
        return 0
    a, b = (t.contiguous().view(torch.uint8).view(t.numel(), -1) for t in (got, wanted))
    return 0 if torch.equal(a, b) else int((a != b).any(dim=1).sum())
