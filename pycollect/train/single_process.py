"""The training engine with all ranks in one process: `ReplicaTrainer`, shares and CUDA graphs."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from .checkpoint import generators, set_generators
from .data import Examples
from .engine import optimizer_of
from .loader import Batch, Loader, LoaderOptions
from .options import Options, StepOptions
from .reduce import Reduction
from .replica_trainer import ReplicaTrainer
from .shares import AutoShares, shares_of
from .step_clock import StepSeconds

# A function that captures the step of `ReplicaTrainer` for batches of one shape, as
# `GraphedStep.of`.
Capture: TypeAlias = Callable[..., Callable[[Tensor, Tensor], Sequence[Tensor]]]


class SingleProcessEngine:
    """Every rank is a replica in this process; the shares are even, weighted or measured."""

    is_main_process = True

    def __init__(
        self,
        module: nn.Module,
        settings: Options,
        *,
        reduction: Reduction,
        options: StepOptions,
        capture: Capture | None = None,
    ) -> None:
        self.devices = settings.devices
        self.replicas = ReplicaTrainer(
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

    def loader(self, examples: Examples, loading: LoaderOptions, *, ahead: bool = True) -> Loader:
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

    def local_examples(self) -> int:
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
