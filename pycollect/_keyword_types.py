"""Keywords of the list collectives other than `async_op`, only for type checkers.

Every call with `async_op` has three overloads: a result for False, a Work for True, and either of
them for a bool known only at run time. With these types the overloads need not repeat the other
keywords. The functions themselves list all their keywords.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from .collectives import Streams, TensorLike


class OnStreams(TypedDict, total=False):
    """Keywords of all collectives."""

    streams: Streams
    peer_access: bool


class Tunable(OnStreams, total=False):
    """Keywords of collectives with an argument `algorithm`."""

    algorithm: str | None


class AlongDim(Tunable, total=False):
    """Keywords of all_gather and reduce_scatter."""

    dim: int
    out: Sequence[TensorLike] | None


class Splits(OnStreams, total=False):
    """Keywords of all_to_all."""

    dim: int
    split_sizes: Sequence[int] | Sequence[Sequence[int]] | None
    out: Sequence[TensorLike] | None


class Chunks(OnStreams, total=False):
    """Keywords of scatter."""

    dim: int
    chunk_sizes: Sequence[int] | None
    out: Sequence[TensorLike] | None
