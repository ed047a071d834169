"""Measures which algorithm is the fastest on given devices, by collective and size.

Only algorithms that keep the numerical contract for a call's dtype are selected, so a tuning
changes the speed but not the bits.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import compress, pairwise
from numbers import Real
from typing import Any

import torch

from . import _C
from ._sizes import bytes_text
from ._timing import Effort, Sampler, host_time, interleave, median_ratio
from .collectives import Order, all_reduce, broadcast, reduce
from .collectives_along_dim import all_gather
from .errors import shown
from .gpus import synchronizer

# An algorithm replaces the library's default only if it is faster by this factor, not by noise.
_GAIN = 1.05
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
SECONDS = 0.1
# The collectives that can be tuned, each called with one tensor per rank.
_CALLS: Mapping[str, Callable[..., object]] = {
    call.__name__: call for call in (all_reduce, reduce, broadcast, all_gather)
}


@dataclass(frozen=True)
class SizeRange:
    """A range of sizes, in which the algorithms have one order of speed.

    up_to: the largest size of the range, in bytes of a rank's input; math.inf for the last range.
    ranking: names of algorithms, the fastest first; None stands for the library's default.
    """

    up_to: float
    ranking: tuple[str | None, ...]


@dataclass(frozen=True)
class Tuning:
    """The measured rankings of algorithms, by collective, in ranges of growing size.

    spans: for each collective, its size ranges, which together hold every size. ``str`` has one
    line per range.
    """

    spans: Mapping[str, tuple[SizeRange, ...]]

    def choice(self, call: str, ranks: Sequence[Any], order: Order = "rank") -> str | None:
        """Return the algorithm for a call on these tensors; None is the library's default.

        `call` is the name of a collective, and `ranks` has one tensor, or one list of tensors, per
        rank; rank 0's bytes and dtypes decide. Returns the fastest algorithm that keeps the
        numerical contract for all of them in this order, and None for a collective that was not
        measured.

        >>> tuning = Tuning({"all_reduce": (SizeRange(math.inf, ("chain", "two_shot", None)),)})
        >>> tuning.choice("all_reduce", [torch.ones(2), torch.ones(2)])
        'chain'
        >>> tuning.choice("all_reduce", [torch.ones(2).half(), torch.ones(2).half()])
        'two_shot'
        """
        collective = "all_reduce" if call == "all_reduce_coalesced" else call
        spans = self.spans.get(collective)
        first = ranks[0] if isinstance(ranks, (list, tuple)) and ranks else None
        tensors = first if isinstance(first, (list, tuple)) else (first,)
        if not spans or not all(isinstance(t, torch.Tensor) for t in tensors):
            return None
        nbytes = sum(t.nbytes for t in tensors)
        span = next(span for span in spans if nbytes <= span.up_to)
        return next(
            name
            for name in span.ranking
            if name is None
            or all(_keeps_contract(collective, name, t.dtype, order) for t in tensors)
        )

    def merged(self, other: Tuning | None) -> Tuning:
        """Return the rankings of both; this tuning's take precedence."""
        return self if other is None else Tuning({**other.spans, **self.spans})

    def __str__(self) -> str:
        lines = []
        for collective, spans in self.spans.items():
            begin = 0.0
            for span in spans:
                where = f"from {bytes_text(round(begin))}"
                ranking = ", ".join(name or "default" for name in span.ranking)
                lines.append(f"{collective} {where}: {ranking}")
                begin = span.up_to
        return "\n".join(lines)


@cache
def _keeps_contract(collective: str, name: str, dtype: torch.dtype, order: Order) -> bool:
    """Return whether an algorithm keeps the numerical contract for a dtype, in this order."""
    algorithm = _C.find_algorithm(collective, name)
    if order != "rank" and algorithm.order != "exact":
        return False
    try:
        return algorithm.keeps_contract(str(dtype).removeprefix("torch."))
    except (TypeError, ValueError):  # no dtype of sums: the call itself moves or rejects it
        return False


def tunable() -> list[str]:
    """List the collectives that can be tuned: those with several algorithms.

    >>> tunable()
    ['all_gather', 'all_reduce', 'broadcast', 'reduce']
    """
    return sorted(name for name in _CALLS if len(_candidates(name)) > 1)


def _candidates(collective: str) -> list[str]:
    """List the algorithms that keep the contract for float32; `choice` checks each dtype."""
    return [
        a.name
        for a in _C.algorithms(collective)
        if a.keeps_contract("float32") and (a.in_place or collective == "all_gather")
    ]


def measure(
    devices: Sequence[torch.device],
    wanted: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    seconds: float = SECONDS,
    *,
    peer_access: bool = True,
) -> Tuning:
    """Time all algorithms that keep the contract, on one new float32 tensor per device.

    `wanted` are names of collectives (default: those of `tunable`). `sizes` are bytes of a rank's
    input (default: 4 KiB, 64 KiB, 1 MiB and 16 MiB). `seconds` (default 0.1) is the approximate
    time for all algorithms of a collective at one size. `peer_access` is that of the collectives.
    Raises ValueError for a collective with one algorithm only, for sizes below 4 bytes or that need
    more than half of the host's memory, and for seconds that are not above 0 and finite; TypeError
    for other types.
    """
    chosen = _checked_collectives(wanted)
    sizes = _checked_sizes(SIZES if sizes is None else sizes)
    _check_memory(devices, chosen, sizes[-1])
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"tune: seconds is a {type(seconds).__name__}; pass a number")
    if not 0 < seconds <= sys.float_info.max:
        raise ValueError(f"tune: seconds is {seconds}; it must be more than 0, and finite")
    found = {}
    for collective in chosen:
        rankings = [_rank(collective, devices, size, float(seconds), peer_access) for size in sizes]
        found[collective] = _spans(sizes, rankings)
    return Tuning(found)


def _checked_collectives(wanted: Sequence[str] | None) -> list[str]:
    if isinstance(wanted, str) or not isinstance(wanted, Iterable | None):
        raise TypeError(f"tune: collectives is {shown(wanted)}; pass a list of names, or None")
    chosen = tunable() if wanted is None else list(wanted)
    for collective in chosen:
        if collective not in tunable():
            known = ", ".join(map(repr, tunable()))
            raise ValueError(f"tune: {shown(collective)} cannot be tuned; allowed are {known}")
    return chosen


def _checked_sizes(sizes: Sequence[int]) -> list[int]:
    if not isinstance(sizes, Iterable):
        raise TypeError(f"tune: sizes is a {type(sizes).__name__}; pass a list of ints")
    found = sorted({_C.int_from(size, "tune", "sizes") for size in sizes})
    if not found or found[0] < 4:
        raise ValueError(f"tune: sizes is {found}; pass one or more sizes of at least 4 bytes")
    return found


def _check_memory(devices: Sequence[torch.device], collectives: Sequence[str], size: int) -> None:
    """Raise ValueError if tensors on the CPU need more than half of the host's memory."""
    ranks = sum(device.type == "cpu" for device in devices)
    whole = size * (1 + len(devices) * ("all_gather" in collectives))  # its results are W as large
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if ranks * whole > memory // 2:
        raise ValueError(
            f"tune: sizes has {size} bytes, so {ranks} CPU ranks need {ranks * whole} bytes; "
            f"at most {memory // 2} are allowed, half of this machine's memory"
        )


def _rank(
    collective: str,
    devices: Sequence[torch.device],
    nbytes: int,
    seconds: float,
    peer_access: bool,
) -> tuple[str | None, ...]:
    """Time the algorithms on tensors of `nbytes` bytes and return them, the fastest first."""
    names: list[str | None] = [None, *_candidates(collective)]
    if all(d.type == "cpu" for d in devices):  # there the name of the library's default is known
        names.remove(_C.default_algorithm(collective, len(devices), nbytes))
    tensors = [torch.zeros(nbytes // 4, device=d) for d in devices]
    # Sums of zeros are zeros, so no number of calls overflows.
    samplers = {name or "": _sampler(collective, tensors, name, peer_access) for name in names}
    timings = interleave(samplers, Effort(seconds))
    own = timings[""].rounds
    gain = {name: median_ratio(own, timings[name or ""].rounds) for name in names}
    gain[None] = _GAIN
    return tuple(sorted(names, key=lambda name: -gain[name]))


def _sampler(
    collective: str, tensors: list[torch.Tensor], name: str | None, peer_access: bool
) -> Sampler:
    def rewrite() -> None:
        for t in tensors:
            t.zero_()

    run = partial(_CALLS[collective], tensors, algorithm=name, peer_access=peer_access)
    return host_time(run, rewrite, synchronizer(t.device for t in tensors))


def _spans(
    sizes: Sequence[int], rankings: Sequence[tuple[str | None, ...]]
) -> tuple[SizeRange, ...]:
    """Return size ranges that end where the ranking changes, at the sizes' geometric mean.

    >>> _spans([4, 64, 1024], [("a", None), (None, "a"), (None, "a")])
    (SizeRange(up_to=16, ranking=('a', None)), SizeRange(up_to=inf, ranking=(None, 'a')))
    """
    ends = [*(math.isqrt(a * b) for a, b in pairwise(sizes)), math.inf]
    # The last of equal rankings one after the other ends their range.
    last = [a != b for a, b in pairwise(rankings)] + [True]
    return tuple(SizeRange(*found) for found in compress(zip(ends, rankings, strict=True), last))
