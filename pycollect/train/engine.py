"""The engine of a run: the replicas of this process, and its part in the ranks of all processes.

All ranks are replicas of one process, or each is a process (or thread) of the default group of
torch.distributed. Data order, shares and sums are the same, so the bits are, too, where the group
adds in rank order, as pycollect's does.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .data import Examples
from .generators import generators, mixed_seed, set_generators
from .graph import GraphedStep
from .loader import Batch, Loader, LoaderOptions
from .losses import sgd_factory
from .prepared_run import PreparedRun
from .records import StepSeconds
from .reduce import GRADIENT_REDUCTIONS, gathered
from .replica_trainer import ReplicaTrainer
from .shards import of_ranks, total_loss
from .shares import AutoShares, shares_of


class Engine:
    """Trains the replicas of this process on shares that are even, weighted or measured.

    If the run has a `backend`, each rank is a process of the default group, and all must call the
    same methods in the same order. Measured shares are equal in all processes, because each
    computes them from the times of all ranks.
    """

    def __init__(self, prepared: PreparedRun) -> None:
        options = prepared.options
        self.group = None if prepared.backend is None else dist.group.WORLD
        devices = options.devices
        self.replicas = ReplicaTrainer(
            prepared.module,
            devices if self.group is None else devices[dist.get_rank()],
            optimizer=sgd_factory(options.lr, options.momentum, options.weight_decay),
            reduction=GRADIENT_REDUCTIONS[options.reduce],
            group=self.group,
            seed=options.seed,
            **prepared.step_options(),
        )
        # The loader of a process takes its part of a batch ahead of the steps before.
        delay = 0 if self.group is None else prepared.loading.prefetch
        self.auto = AutoShares(len(devices), delay) if options.weights == "auto" else None
        known = options.weights is not None and options.weights != "auto"
        parts = options.shards or len(devices)
        self._weights: Any = options.weights if known else [1.0] * parts
        self._shards = options.shards
        self._graph = options.graph
        self._graphs: dict[int, Callable[[Tensor, Tensor], Sequence[Tensor]]] = {}
        if self.group is not None:  # a data set may draw: processes draw other numbers
            torch.manual_seed(mixed_seed(options.seed, len(devices) + self.replicas.ranks[0]))
        self.seconds = StepSeconds()
        self.shares: tuple[int, ...] = ()  # the examples of every rank in the last step

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices of this process's ranks."""
        return self.replicas.devices

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The replicas of this process, in rank order."""
        return self.replicas.modules

    @property
    def is_main_process(self) -> bool:
        """Whether this process prints and writes files: true in that of rank 0."""
        return self.replicas.ranks[0] == 0

    def loader(self, examples: Examples, loading: LoaderOptions, *, ahead: bool = True) -> Loader:
        """Return a loader of this process's part of every batch.

        With `ahead`, for training, it copies shards to the GPUs ahead if the shares are known.
        """

        def part(indices: Tensor, steps: int) -> Tensor:
            shares = self._of_ranks(self._shares(len(indices), steps if ahead else 0))
            return torch.split(indices, shares)[self.replicas.ranks[0]]

        if self.group is not None:
            own = (lambda n: [n]) if ahead else None
            return Loader(examples, loading, devices=self.devices, shares=own, part=part)
        unknown = not ahead or self.auto is not None or self._graph
        shares = None if unknown else lambda n: self._of_ranks(self._shares(n))
        return Loader(examples, loading, devices=self.devices, shares=shares)

    def _shares(self, n: int, steps: int = 0) -> list[int]:
        """Return the shares of a batch of n examples that comes `steps` steps after the next.

        They are those of the ranks, or if the run has shards, of the shards.
        """
        return self.auto.shares_ahead(n, steps) if self.auto else shares_of(n, self._weights)

    def _of_ranks(self, shares: Sequence[int]) -> list[int]:
        return of_ranks(shares, self.replicas.world)

    def step(self, batch: Batch) -> Sequence[Tensor]:
        """Train on one batch; return the summed losses of this process's ranks.

        With shards it is one sum of all, in the order of the gradients.
        """
        n = batch.examples
        shares = self.auto.shares(n) if self.auto else self._shares(n)
        self.shares = tuple(self._of_ranks(shares))
        if self._graph:
            return self._replay(batch)
        if batch.shards is None:
            losses = self.replicas.step(batch.X, batch.y, shares=shares)
        else:
            losses = self.replicas.step_on_shards(*batch.shards, shares=shares)
        if self._shards:
            losses = [total_loss(losses, self.devices[0])]
        self.seconds = self.replicas.seconds
        if self.auto:
            seconds = [0.0] * self.auto.world
            for rank, own in zip(self.replicas.ranks, self.replicas.rank_seconds(), strict=True):
                seconds[rank] = own
            self.auto.observe(self.total(seconds))
        return losses

    def _replay(self, batch: Batch) -> list[Tensor]:
        """Replay the CUDA graph of the step; each batch size is captured at its first use."""
        n = len(batch.y)
        begin = time.perf_counter()
        if n not in self._graphs:
            shares = self.shares
            self._graphs[n] = GraphedStep.of(batch.X, batch.y, self.replicas, shares=shares)
        losses = self._graphs[n](batch.X, batch.y)
        # The parts of a graph cannot be timed separately, so all of its time counts as compute.
        self.seconds = StepSeconds(compute=time.perf_counter() - begin)
        return [loss.clone() for loss in losses]  # the next replay overwrites the originals

    def local_examples(self) -> int:
        """Return the number of examples in the losses of this process's last step."""
        return sum(self.shares[rank] for rank in self.replicas.ranks)

    def total(self, sums: list[float]) -> list[float]:
        """Return the numbers summed over all processes; collective."""
        if self.group is None:
            return sums
        whole = torch.tensor(sums, dtype=torch.float64, device=self.devices[0])
        dist.all_reduce(whole, group=self.replicas.group)
        return list(whole.tolist())

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the fraction of examples classified correctly; all ranks take part."""
        return self.replicas.evaluate((batch.X, batch.y) for batch in batches)

    def state_dict(self) -> dict[str, Any]:
        """Return all state on which the next steps depend; collective over processes."""
        return {
            "replicas": self.replicas.state_dict(),
            "auto": self.auto.state_dict() if self.auto else None,
            "generators": gathered([generators(d) for d in self.devices], self.group),
            "processes": self._processes,
        }

    @property
    def _processes(self) -> int:
        return 1 if self.group is None else self.replicas.world

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`, of the same ranks.

        The generators are those of this process if the state has as many processes.
        """
        self.replicas.load_state_dict(state["replicas"])
        if self.auto:
            self.auto.load_state_dict(state["auto"])
        if state["processes"] == self._processes:
            known = state["generators"]  # of another number of ranks, if the run has shards
            for rank, device in zip(self.replicas.ranks, self.devices, strict=True):
                set_generators(known[min(rank, len(known) - 1)], device)
