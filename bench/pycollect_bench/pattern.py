"""Test inputs whose reduction is known exactly, so that every wrong element can be counted.

The values of each rank are small integers, so small that every partial result, in any order, is
exact in the element type. They repeat after a prime number of elements. The expected result is
computed for one period, in int64, by code that shares nothing with the measured code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor

# A prime: no chunk boundary is a multiple of it, so a misplaced chunk is detected.
PERIOD = 65_521
# Largest number of distinct values; more would find no more errors.
MOST_VALUES = 13

_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": partial(torch.sum, dim=0),
    "prod": partial(torch.prod, dim=0),
    "min": partial(torch.amin, dim=0),
    "max": partial(torch.amax, dim=0),
    "band": partial(reduce, torch.bitwise_and),
    "bor": partial(reduce, torch.bitwise_or),
    "bxor": partial(reduce, torch.bitwise_xor),
}


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
    >>> bool((p.part(0, 0, 9) + p.part(1, 0, 9) == p.part(None, 0, 9)).all())
    True
    """

    def __init__(
        self, dtype: torch.dtype, op: str, world: int, device: torch.device | None = None
    ) -> None:
        rows = _inputs(dtype, op, world)
        # Products are of real values: imaginary parts would make them too large to be exact.
        factor = 1 + 1j if dtype.is_complex and op != "prod" else 1
        # One period is computed on the CPU, and repeated on the ranks' device.
        periods = dict[int | None, Tensor](enumerate(rows))
        periods[None] = _reduction(rows, dtype, op)
        self._of = {key: (one * factor).to(dtype).to(device) for key, one in periods.items()}

    def part(self, source: int | None, start: int, count: int) -> Tensor:
        """Return elements [start, start + count) of a rank's input, or of the reduction for None.

        They are one-dimensional.
        """
        skip = start % PERIOD
        copies = -(-(skip + count) // PERIOD)
        return self._of[source].repeat(copies)[skip : skip + count]


def _inputs(dtype: torch.dtype, op: str, world: int) -> Tensor:
    """Return the inputs of one period as int64, one row per rank."""
    room = largest_exact(dtype)
    # A multiplicative hash: neighbours differ, and no shift maps the sequence onto itself.
    digits = (torch.arange(PERIOD, dtype=torch.int64) * 2_654_435_761 >> 15) % 5_003
    mixed = digits + torch.arange(world, dtype=torch.int64).unsqueeze(1)
    if dtype == torch.bool:
        return mixed % 2
    if op == "prod":  # at most `twos` ranks have a 2, the others a 1
        twos = room.bit_length() - 1
        return 1 + (mixed % max(world, 2) < min(twos, world)).long()
    if op not in ("sum", "avg"):
        return 1 + mixed % min(room, MOST_VALUES)
    # If there are more ranks than the type's largest exact integer, most of them have a 0.
    values = 1 + mixed % max(1, min(room // world, MOST_VALUES))
    return values * (mixed % -(-world // room) == 0)


def _reduction(rows: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """Return the reduction of the rows, before the conversion to `dtype`."""
    if op != "avg":
        return _REDUCE[op](rows)
    total, world = rows.sum(0), len(rows)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.div(total, world, rounding_mode="trunc")  # toward zero
    # Definition of "avg": the sum times 1/world in the accumulator's type, then one rounding.
    wide = dtype in (torch.float64, torch.complex128)
    accumulator = torch.float64 if wide else torch.float32
    return total.to(accumulator) * (torch.tensor(1.0, dtype=accumulator) / world)


def are_zero(values: Tensor) -> Tensor:
    """Return which elements of a flat tensor of any dtype are zero.

    >>> are_zero(torch.tensor([0.0, 2.0])).tolist()
    [True, False]
    """
    return (_bytes(values) == 0).all(dim=1)


def count_wrong(got: Tensor, wanted: Tensor) -> int:
    """Return the number of elements that differ in any byte; all of them if shape or type differ.

    >>> count_wrong(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    1
    """
    got = got.detach().to(wanted.device).reshape(-1)
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return max(got.numel(), wanted.numel(), 1)
    a, b = _bytes(got), _bytes(wanted)
    return 0 if torch.equal(a, b) else int((a != b).any(dim=1).sum())


def _bytes(values: Tensor) -> Tensor:
    """Return the bytes of a flat tensor, one row per element."""
    return values.contiguous().view(torch.uint8).view(values.numel(), values.itemsize)
