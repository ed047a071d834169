"""What a run does besides its result: how it reduces, what it reads ahead, writes and shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._files import check_picture, check_place
from . import checkpoint
from .data import Data
from .reduce import REDUCTIONS

# Batches prepared ahead where that takes work off the step; one more evens out slow ones.
PREFETCH = 2


@dataclass(frozen=True)
class Running:
    """What leaves the result as it is; ValueError for a value out of range.

    `deterministic` makes torch take only algorithms that give the same bits every time, which on a
    GPU costs time and on the CPU nothing. `graph` replays the step as a CUDA graph, on one GPU.
    `overlap` reduces gradients while the backward pass runs; a comparison, which measures the
    reduction, does so only if it is asked to. `prefetch` is the number of batches prepared ahead;
    by default 2 where files are decoded or a GPU takes part, and otherwise 0. `checkpoint` is
    written after every epoch, and at Ctrl-C or SIGTERM after the step that is under way; `resume`
    names one to continue, and `replay_shares` one whose measured shares are used again, step for
    step.

    >>> Running(prefetch=-1)
    Traceback (most recent call last):
    ValueError: prefetch must be at least 0 batches, not -1
    """

    reduce: str = "pycollect"
    overlap: bool | None = None
    prefetch: int | None = None
    exact_times: bool = False
    graph: bool = False
    deterministic: bool = False
    checkpoint: Path | str | None = None
    resume: Path | str | None = None
    replay_shares: Path | str | None = None
    log: Path | str | None = None
    plot: Path | str | None = None

    def __post_init__(self) -> None:
        if self.reduce not in REDUCTIONS:
            known = ", ".join(REDUCTIONS)
            raise ValueError(f"unknown reduction {self.reduce!r}; there are {known}")
        if self.prefetch is not None and self.prefetch < 0:
            raise ValueError(f"prefetch must be at least 0 batches, not {self.prefetch}")
        if self.checkpoint is not None:
            check_place("checkpoint", self.checkpoint, moved=True)
        if self.log is not None:
            check_place("log", self.log, streamed=True)
        if self.plot is not None:
            check_picture(self.plot)

    def batches_ahead(self, data: Data, devices: tuple[torch.device, ...]) -> int:
        """Give the number of batches to prepare ahead."""
        if self.prefetch is not None:
            return self.prefetch
        lazy = not isinstance(data.train, tuple)
        return PREFETCH if lazy or any(d.type == "cuda" for d in devices) else 0

    def load_shares(self) -> Mapping[str, Any] | None:
        """Read the measured shares that are to be used again, if there are."""
        if self.replay_shares is None:
            return None
        found = checkpoint.load(self.replay_shares)["contestant"]["trainee"].get("auto")
        if found is None:
            raise checkpoint.CheckpointError(f"{self.replay_shares} holds no measured shares")
        return dict(found)

    def load(self) -> Mapping[str, Any] | None:
        """Read the checkpoint that is to be continued, if there is one."""
        return None if self.resume is None else checkpoint.load(self.resume)
