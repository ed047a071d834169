"""The training engine with one rank per process: DistributedDataParallel in the training loop.

Data order and shares are the same as for ranks in one process. Gradients of summed losses are
summed over the ranks and divided by the batch size, so a process group that adds in rank order, as
pycollect's does, gives the same bits as one process. Measured shares are equal in all processes,
because each computes them from the times of all ranks.
"""

import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .accuracy import right_labels
from .checkpoint import generators, set_generators
from .data import Examples
from .engine import optimizer_of
from .loader import Batch, Loader, LoaderOptions
from .losses import summed_cross_entropy
from .module_check import SingleValueCheck
from .module_replication import replicate_module
from .options import Options
from .shares import AutoShares, check_strict, microbatches, shares_of
from .step_clock import StepClock, StepSeconds, mark, seconds_between
from .sync_batchnorm import convert_sync_batchnorm

# Difference of the seeds of two neighbouring ranks; odd, so that the seeds of all ranks and of
# neighbouring runs differ.
_SEED_STRIDE = 0x9E3779B97F4A7C15


class _SummedLoss(nn.Module):
    """A module with its loss summed over a shard; an empty shard gives 0, with gradients of 0.

    With `sync_batchnorm` the module also runs on an empty shard: other ranks wait for its
    statistics.
    """

    def __init__(self, module: nn.Module, sync_batchnorm: bool) -> None:
        super().__init__()
        self.module, self.sync_batchnorm = module, sync_batchnorm

    def forward(self, X: Tensor, y: Tensor) -> Tensor:
        if len(X) or self.sync_batchnorm:
            return summed_cross_entropy(self.module(X), y)
        # An empty sum over every parameter: 0 even if a parameter is not finite.
        empty = [p.flatten()[:0].sum() for p in self.module.parameters() if p.requires_grad]
        return torch.stack(empty).sum()


class DDPEngine:
    """The engine of this process's one rank; all processes must call the same methods in order.

    `prefetch` is the number of batches that its training loader prepares ahead.
    """

    def __init__(
        self, module: nn.Module, settings: Options, *, exact_times: bool, prefetch: int = 0
    ) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = settings.devices[self.rank]
        self.settings = settings
        given = settings.weights
        self.auto = AutoShares(self.world, prefetch) if given == "auto" else None
        self._weights = [1.0] * self.world if given is None or given == "auto" else given
        self.modules = replicate_module(module, [self.device])
        if settings.sync_batchnorm:
            self.modules = convert_sync_batchnorm(self.modules, dist.group.WORLD)
        self._single_values = SingleValueCheck(self._own)
        self.optimizer = optimizer_of(settings)(list(self._own.parameters()))
        self._ddp = DistributedDataParallel(
            _SummedLoss(self._own, sync_batchnorm=settings.sync_batchnorm),
            device_ids=[self.device] if self.device.type == "cuda" else None,
            **_own_buffers(),
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(None, lambda _, bucket: self._reduce(bucket.buffer()))
        # Each rank has its own seed, because equal dropout masks would correlate the ranks.
        torch.manual_seed((settings.seed + _SEED_STRIDE * self.rank) % 2**63)
        self._clock = StepClock([self.device], exact_times)
        self._launched = 0.0
        self._marks: list[Any] = [0.0, 0.0]  # start and end of this rank's own work, see `mark`
        self.shares: tuple[int, ...] = ()
        self.seconds = StepSeconds()

    @property
    def devices(self) -> Sequence[torch.device]:
        """The device of this rank."""
        return [self.device]

    @property
    def is_main_process(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    @property
    def _own(self) -> nn.Module:
        return self.modules[0]

    def _reduce(self, bucket: Tensor) -> Any:
        """Sum a bucket over the ranks; DDP's default hook would also divide by the world size."""
        self._launched, self._marks[1] = time.perf_counter(), mark(self.device)
        future: Any = dist.all_reduce(bucket, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def loader(self, examples: Examples, loading: LoaderOptions, *, ahead: bool = True) -> Loader:
        """Return a loader of this rank's part of every batch."""

        def part(indices: Tensor, steps: int) -> Tensor:
            shares = self._shares(len(indices), steps if ahead else 0)
            return torch.split(indices, shares)[self.rank]

        shares = (lambda n: [n]) if ahead else None
        return Loader(examples, loading, devices=[self.device], shares=shares, part=part)

    def _shares(self, n: int, steps: int = 0) -> list[int]:
        """Return the shares of a batch of n examples that comes `steps` steps after the next."""
        return self.auto.shares_ahead(n, steps) if self.auto else shares_of(n, self._weights)

    def step(self, batch: Batch) -> list[Tensor]:
        """Train on this rank's part of one batch; return its summed loss."""
        self._clock.begin()
        n = batch.examples
        if self.settings.strict:
            check_strict(n, self.world, self.settings.microbatch)
        self.shares = tuple(self.auto.shares(n) if self.auto else self._shares(n))
        X, y = (batch.X, batch.y) if batch.shards is None else (part[0] for part in batch.shards)
        parts = microbatches(self.shares, self.settings.microbatch or n)
        self._single_values.check(parts, X)  # raises on all ranks alike, before any collective
        X, y = X.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        self._clock.end_of("split")
        losses = self._passes(X, y, [part[self.rank] for part in parts])
        # All time after the launch of the last bucket is waiting for the reduction.
        waited = time.perf_counter() - self._launched
        self._clock.end_of("compute")
        gradients = [p.grad for p in self._own.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, n)
        self.optimizer.step()
        self._clock.end_of("update")
        parts_of = self._clock.seconds
        self.seconds = StepSeconds(
            parts_of.split, parts_of.compute - waited, waited, parts_of.update
        )
        if self.auto:
            self.auto.observe(self._seconds_of_all(seconds_between(*self._marks)))
        return [torch.stack(losses).sum()]

    def _passes(self, X: Tensor, y: Tensor, sizes: list[int]) -> list[Tensor]:
        """Run forward and backward on microbatches of these sizes; return their summed losses."""
        self.optimizer.zero_grad()
        self._marks[0] = mark(self.device)
        losses = []
        for i, parts in enumerate(
            zip(*(torch.split(part, sizes) for part in (X, y)), strict=True), 1
        ):
            with nullcontext() if i == len(sizes) else self._ddp.no_sync():
                loss = self._ddp(*parts)
                loss.backward()
            losses.append(loss.detach())
        return losses

    def _seconds_of_all(self, own: float) -> list[float]:
        """Return the seconds of every rank, the same list in all processes; collective."""
        mine = torch.tensor([own], dtype=torch.float64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine)
        return [float(seconds) for seconds in found]

    def local_examples(self) -> int:
        """Return the number of this rank's examples in the last step."""
        return self.shares[self.rank]

    def total(self, sums: list[float]) -> list[float]:
        """Return the numbers summed over all processes; collective."""
        whole = torch.tensor(sums, dtype=torch.float64, device=self.device)
        dist.all_reduce(whole)
        return list(whole.tolist())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the fraction of labels that have the highest score, with rank 0's statistics."""
        kept = [buffer.clone() for buffer in self._own.buffers()]
        training = [(part, part.training) for part in self._own.modules()]
        for buffer in self._own.buffers():
            dist.broadcast(buffer, src=0)
        self._own.eval()
        right = labels = 0
        for batch in batches:
            labels += batch.y.numel()
            if len(batch.y):
                y = batch.y.to(self.device)
                right += int(right_labels(self._own(batch.X.to(self.device)), y))
        for part, mode in training:
            part.training = mode
        for buffer, before in zip(self._own.buffers(), kept, strict=True):
            buffer.copy_(before)
        correct, known = self.total([float(right), float(labels)])
        return correct / known

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's model and optimizer, and the buffers and generators of all ranks."""
        mine = {name: buffer.cpu() for name, buffer in self._own.named_buffers()}
        buffers, states = self._gathered(mine), self._gathered(generators(self.devices))
        return {
            "replicas": {
                "model": self._own.state_dict(),
                "buffers": buffers,
                "optimizer": self.optimizer.state_dict(),
            },
            "auto": self.auto.state_dict() if self.auto else None,
            "generators": states,
        }

    def _gathered(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        replicas = state["replicas"]
        self._own.load_state_dict(replicas["model"])
        self.optimizer.load_state_dict(replicas["optimizer"])
        with torch.no_grad():
            for name, buffer in self._own.named_buffers():
                buffer.copy_(replicas["buffers"][self.rank][name])
        if self.auto:
            self.auto.load_state_dict(state["auto"])
        set_generators(state["generators"][self.rank])


def _own_buffers() -> dict[str, Any]:
    """Return the DDP option that keeps buffers, such as batch statistics, local to each rank.

    Newer torch has another name for it. Broadcasting is not needed at the start, because the
    initial buffers are equal.
    """
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    new = "forward_sync_buffers"
    return {new if new in names else "broadcast_buffers": False}
