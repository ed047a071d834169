"""All ranks in this process: what the training loop needs of `Replicas`, shares included."""

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

# What captures the step of replicas for batches of one shape, see `GraphedStep.of`.
Capture: TypeAlias = Callable[..., Callable[[Tensor, Tensor], Sequence[Tensor]]]


class Trainee(Protocol):
    """What is trained: the ranks of this process, and through them those of all processes."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices of this process's ranks."""

    @property
    def speaks(self) -> bool:
        """Whether this process prints and writes."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The replicas of this process, its first rank's first."""

    @property
    def auto(self) -> AutoShares | None:
        """The measured shares, if they are."""

    @property
    def seconds(self) -> StepSeconds:
        """What the parts of the last step took."""

    @property
    def shares(self) -> tuple[int, ...]:
        """The examples of every rank of all processes in the last step."""

    def loader(self, examples: Examples, loading: Loading, *, ahead: bool = True) -> Loader:
        """Give the loader of what this process's ranks need of every batch.

        Where that can be, it sends the shards ahead to the GPUs, for training.
        """

    def step(self, batch: Batch) -> Sequence[Tensor]:
        """Train on one batch; give the summed losses of this process's ranks."""

    def covered(self) -> int:
        """Give the number of examples that those losses cover."""

    def total(self, sums: list[float]) -> list[float]:
        """Add up numbers over all processes."""

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Give the share of examples that are classified right."""

    def state_dict(self) -> dict[str, Any]:
        """Give everything that decides the next steps."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""


def optimizer_of(settings: Settings) -> MakeOptimizer:
    """Give what makes the optimizer of a list of parameters."""
    return sgd_optimizer(settings.lr, settings.momentum, settings.weight_decay)


class OneProcess:
    """Every rank is a replica in this process; the shares are even, weighted or measured."""

    speaks = True

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
        """Give the loader of whole batches; shards go ahead to GPUs if they can."""
        unknown = not ahead or self.auto is not None or self._capture is not None
        shares = None if unknown else partial(shares_of, weights=self._weights)
        return Loader(examples, loading, devices=self.devices, shares=shares)

    def step(self, batch: Batch) -> Sequence[Tensor]:
        """Train on one batch; give each rank's summed loss."""
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
        """Do the step by its CUDA graph, one for every size of batch, which is captured first."""
        assert self._capture is not None
        n = len(batch.y)
        begin = time.perf_counter()
        if n not in self._captured:
            self._captured[n] = self._capture(batch.X, batch.y, self.replicas, shares=self.shares)
        losses = self._captured[n](batch.X, batch.y)
        # A graph is one thing: what its parts take cannot be told.
        self.seconds = StepSeconds(compute=time.perf_counter() - begin)
        return [loss.clone() for loss in losses]  # the next step overwrites them

    def covered(self) -> int:
        """Give the number of examples of the last step."""
        return sum(self.shares)

    def total(self, sums: list[float]) -> list[float]:
        """Give back the numbers: there is no other process."""
        return sums

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Give the share of examples that are classified right; all ranks take part."""
        return self.replicas.evaluate((batch.X, batch.y) for batch in batches)

    def state_dict(self) -> dict[str, Any]:
        """Give parameters, buffers, optimizer, measured shares, and torch's generators."""
        return {
            "replicas": self.replicas.state_dict(),
            "auto": self.auto.state_dict() if self.auto else None,
            "generators": generators(self.devices),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self.replicas.load_state_dict(state["replicas"])
        if self.auto:
            self.auto.load_state_dict(state["auto"])
        set_generators(state["generators"])
