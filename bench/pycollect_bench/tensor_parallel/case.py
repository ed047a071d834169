"""The cases and results of a run, and the job of the ranks of one world."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycollect._timing import Timing, ratios

from ..processes.worker_pool import PoolJob
from .llama import Shape

# Largest error of a divided model's logits: other orders of sums, rounded in the model's dtype, and
# with experts tokens of which two experts are nearly equal. Without one sum it is about 1.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


@dataclass(frozen=True)
class Case:
    """A model that decodes a batch of sequences."""

    hidden: int
    dtype: torch.dtype
    batch: int
    vocab: int
    moe: bool

    def shape(self, job: Job) -> Shape:
        """Return the model's shape."""
        positions = job.prompt + job.tokens + 1
        return Shape(self.hidden, job.layers, self.vocab, positions, self.moe)

    @property
    def name(self) -> str:
        """The name of the model and its dtype."""
        model = "moe" if self.moe else "llama"
        return f"{model} {self.hidden}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Job(PoolJob):
    """The job of the ranks of one world: the names of the variants, which take turns in each case.

    `alone_threads` is the number of threads of one rank alone, `threads` that of the others.
    """

    variants: tuple[str, ...] = ()
    layers: int = 8
    prompt: int = 32
    tokens: int = 6
    alone_threads: int = 1


@dataclass(frozen=True)
class Row:
    """The times of a variant in seconds, by turn: `first` of the prompt, the others of a token.

    `waiting` and `moving` are parts of `token`, in the mean of the ranks; `token` and `first` are
    those of the slowest rank. `calls` is the number of collectives of a token.
    """

    name: str
    against: str
    first: Timing
    token: Timing
    waiting: Timing
    moving: Timing
    calls: int
    error: float

    @property
    def computing(self) -> float:
        """The median seconds of a token outside of collectives."""
        parts = zip(self.token.rounds, self.waiting.rounds, self.moving.rounds, strict=True)
        return statistics.median(token - waiting - moving for token, waiting, moving in parts)

    def share(self, of: Timing) -> float:
        """Return the median share of a part in the token."""
        return statistics.median(ratios(of.rounds, self.token.rounds))


@dataclass(frozen=True)
class CaseResult:
    """The rows of a case."""

    case: Case
    world: int
    rows: Sequence[Row]

    def row(self, name: str) -> Row | None:
        """Return the row of that name, if it was measured."""
        return next((row for row in self.rows if row.name == name), None)

    def speedup(self, row: Row) -> list[float] | None:
        """Return, by round, how much faster the row's variant is than gloo's."""
        gloo = self.row(row.against)
        return ratios(gloo.token.rounds, row.token.rounds) if gloo else None

    @property
    def wrong(self) -> list[str]:
        """The names of variants whose logits are not those of one rank alone."""
        return [row.name for row in self.rows if not row.error <= TOLERANCE[self.case.dtype]]
