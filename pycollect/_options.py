"""The keywords of the list collectives that `async_op` does not depend on, for type checkers alone.

Every call that takes `async_op` has three overloads: a result for False, a Work for True, and
either of them for a bool that is only known when it runs. These spare them the rest. The functions
themselves state all their keywords.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from .collectives import Streams, TensorLike


class OnStreams(TypedDict, total=False):
    """A call without a choice of algorithms."""

    streams: Streams


class Chosen(OnStreams, total=False):
    """A call in place."""

    algorithm: str | None


class AlongDim(Chosen, total=False):
    """all_gather and reduce_scatter."""

    dim: int
    out: Sequence[TensorLike] | None


class Splits(OnStreams, total=False):
    """all_to_all."""

    dim: int
    split_sizes: Sequence[int] | Sequence[Sequence[int]] | None
    out: Sequence[TensorLike] | None


class Chunks(OnStreams, total=False):
    """scatter."""

    dim: int
    chunk_sizes: Sequence[int] | None
    out: Sequence[TensorLike] | None
