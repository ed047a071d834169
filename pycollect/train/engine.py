"""The interface of the training engines: all ranks in one process, or one rank per process."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .data import Examples
from .loader import Batch, Loader, LoaderOptions
from .optimizers import MakeOptimizer, sgd_factory
from .options import Options
from .shares import AutoShares
from .step_clock import StepSeconds


class Engine(Protocol):
    """A training engine: the ranks of this process, and its part in those of all processes."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices of this process's ranks."""

    @property
    def is_main_process(self) -> bool:
        """Whether this process prints and writes files: true in the process of rank 0."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The replicas of this process, in rank order."""

    @property
    def auto(self) -> AutoShares | None:
        """The measured shares, or None if shares are even or weighted."""

    @property
    def seconds(self) -> StepSeconds:
        """The seconds of the parts of the last step."""

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of examples of every rank, over all processes, in the last step."""

    def loader(self, examples: Examples, loading: LoaderOptions, *, ahead: bool = True) -> Loader:
        """Return a loader of the part of every batch that this process's ranks need.

        With `ahead`, for training, it copies the shards to the GPUs ahead if the shares are known.
        """

    def step(self, batch: Batch) -> Sequence[Tensor]:
        """Train on one batch; return the summed losses of this process's ranks."""

    def local_examples(self) -> int:
        """Return the number of examples in the losses of this process's last step."""

    def total(self, sums: list[float]) -> list[float]:
        """Return the numbers summed over all processes; collective."""

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the fraction of examples that are classified correctly."""

    def state_dict(self) -> dict[str, Any]:
        """Return all state on which the next steps depend."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`."""


def optimizer_of(settings: Options) -> MakeOptimizer:
    """Return the function that makes an optimizer for a list of parameters."""
    return sgd_factory(settings.lr, settings.momentum, settings.weight_decay)
