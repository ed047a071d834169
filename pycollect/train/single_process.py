"""The training engine with all ranks in one process: `Replicas`, shares and CUDA graphs."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from .checkpoint import generators, set_generators
from .data import Examples
from .loader import Batch, Loader, Loading
from .optimizers import MakeOptimizer, sgd_optimizer
from .reduce import Reduction
from .replicas import Replicas
from .settings import Settings, StepOptions
from .shares import AutoShares, shares_of
from .step_clock import StepSeconds

# A function that captures the step of `Replicas` for batches of one shape, as `GraphedStep.of`.
Capture: TypeAlias = Callable[..., Callable[[Tensor, Tensor], Sequence[Tensor]]]


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

    def loader(self, examples: Examples, loading: Loading, *, ahead: bool = True) -> Loader:
        """Return a loader of the part of every batch that this process's ranks need.

        With `ahead`, for training, it copies the shards to the GPUs ahead if the shares are known.
        """

    def step(self, batch: Batch) -> Sequence[Tensor]:
        """Train on one batch; return the summed losses of this process's ranks."""

    def covered(self) -> int:
        """Return the number of examples in the losses of this process's last step."""

    def total(self, sums: list[float]) -> list[float]:
        """Return the numbers summed over all processes; collective."""

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the fraction of examples that are classified correctly."""

    def state_dict(self) -> dict[str, Any]:
        """Return all state on which the next steps depend."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`."""


def optimizer_of(settings: Settings) -> MakeOptimizer:
    """Return the function that makes an optimizer for a list of parameters."""
    return sgd_optimizer(settings.lr, settings.momentum, settings.weight_decay)


class SingleProcessEngine:
    """Every rank is a replica in this process; the shares are even, weighted or measured."""

    is_main_process = True

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        *,
        reduction: Reduction,
        options: StepOptions,
        capture: Capture | None = None,
    ) -> None:
        self.devices = settings.devices
        self.replicas = Replicas(
            module,
            settings.devices,
            optimizer=optimizer_of(settings),
            reduction=reduction,
            options=options,
        )
        self.seconds = StepSeconds()
        self.shares: tuple[int, ...] = ()
        world, weights = len(settings.devices), settings.weights
        self.auto = AutoShares(world) if weights == "auto" else None
        self._weights = [1.0] * world if weights is None or weights == "auto" else weights
        self._capture = capture
        self._captured: dict[int, Callable[[Tensor, Tensor], Sequence[Tensor]]] = {}

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The replicas, in rank order."""
        return self.replicas.modules

    def loader(self, examples: Examples, loading: Loading, *, ahead: bool = True) -> Loader:
        """Return a loader of whole batches, which copies shards ahead if the shares are known."""
        unknown = not ahead or self.auto is not None or self._capture is not None
        shares = None if unknown else partial(shares_of, weights=self._weights)
        return Loader(examples, loading, devices=self.devices, shares=shares)

    def step(self, batch: Batch) -> Sequence[Tensor]:
        """Train on one batch; return each rank's summed loss."""
        if batch.shards is not None:
            self.shares = tuple(map(len, batch.shards[1]))
            losses: Sequence[Tensor] = self.replicas.step_on_shards(*batch.shards)
        else:
            n = len(batch.y)
            self.shares = tuple(self.auto.shares(n) if self.auto else shares_of(n, self._weights))
            if self._capture is not None:
                return self._replay(batch)
            losses = self.replicas.step(batch.X, batch.y, shares=self.shares)
            if self.auto:
                self.auto.observe(self.replicas.rank_seconds())
        self.seconds = self.replicas.seconds
        return losses

    def _replay(self, batch: Batch) -> list[Tensor]:
        """Replay the CUDA graph of the step; each batch size is captured at its first use."""
        assert self._capture is not None
        n = len(batch.y)
        begin = time.perf_counter()
        if n not in self._captured:
            self._captured[n] = self._capture(batch.X, batch.y, self.replicas, shares=self.shares)
        losses = self._captured[n](batch.X, batch.y)
        # The parts of a graph cannot be timed separately, so all of its time counts as compute.
        self.seconds = StepSeconds(compute=time.perf_counter() - begin)
        return [loss.clone() for loss in losses]  # the next replay overwrites the originals

    def covered(self) -> int:
        """Return the number of examples of the last step."""
        return sum(self.shares)

    def total(self, sums: list[float]) -> list[float]:
        """Return the numbers unchanged: there is only one process."""
        return sums

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the fraction of examples classified correctly; all ranks take part."""
        return self.replicas.evaluate((batch.X, batch.y) for batch in batches)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, buffers, optimizer state, measured shares and torch's generators."""
        return {
            "replicas": self.replicas.state_dict(),
            "auto": self.auto.state_dict() if self.auto else None,
            "generators": generators(self.devices),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        self.replicas.load_state_dict(state["replicas"])
        if self.auto:
            self.auto.load_state_dict(state["auto"])
        set_generators(state["generators"])
