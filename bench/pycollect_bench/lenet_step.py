"""Cost of a LeNet training step on ranks that share a device: naive loop against pycollect.

Eager steps differ only in the reduction. The graph is pycollect's step, captured once and replayed.
The reductions alone are measured in the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pycollect._timing import Effort, Timing, host_time, interleave, median_ratio
from pycollect.train.from_scratch import gradients, replicate_params, train_batch
from pycollect.train.graph import GraphedStep
from pycollect.train.models import init_lenet, lenet
from pycollect.train.reduce import GRADIENT_REDUCTIONS

from .gpu import synchronizer
from .targets import Outcome

NAIVE, EAGER, GRAPH = "step, naive loop", "step, pycollect", "step, pycollect in a graph"
NAIVE_REDUCTION, REDUCTION = "reduction, naive loop", "reduction, pycollect"
# Learning rate: so small that all numbers stay finite after any number of steps on one batch.
_LR = 1e-3
# Number of steps after which the parameters of all candidates are compared.
_CHECKED = 3

Step = Callable[[], object]
Parameters = list[list[Tensor]]


@dataclass(frozen=True)
class StepResult:
    """Times by candidate, and the number of parameters whose bits differ from the naive loop's."""

    timings: dict[str, Timing]
    wrong: int

    def ratio(self, slow: str, fast: str) -> float | None:
        """Return the time of `slow` divided by that of `fast`: the median over the rounds."""
        if slow not in self.timings or fast not in self.timings:
            return None
        return median_ratio(self.timings[slow].rounds, self.timings[fast].rounds)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of the targets for a step of four ranks on one GPU."""
        share = self.ratio(REDUCTION, EAGER)
        percent = None if share is None else 100 * share
        return [
            Outcome("LeNet's step: share of the reduction, eager", 3.0, percent, "<=", "%"),
            Outcome("LeNet's step in a graph, naive eager step", 5.0, self.ratio(NAIVE, GRAPH)),
        ]


class Bench:
    """The replicas and the batch of every candidate, on one device."""

    def __init__(self, devices: list[torch.device], batch: int) -> None:
        self.devices, self.synchronize = devices, synchronizer(devices)
        generator = torch.Generator().manual_seed(0)
        self.X = torch.rand((batch, 1, 28, 28), generator=generator).to(devices[0])
        self.y = torch.randint(10, (batch,), generator=generator).to(devices[0])

    def replicas(self) -> Parameters:
        """Return new replicas of LeNet's parameters, all equal."""
        return replicate_params(init_lenet(), self.devices)

    def eager(self, replicas: Parameters, reduction: str) -> Step:
        """Return an eager step on the batch with this reduction."""
        how = GRADIENT_REDUCTIONS[reduction]
        return partial(train_batch, self.X, self.y, replicas, _LR, model=lenet, reduction=how)

    def graphed(self, replicas: Parameters) -> Step:
        """Return the replay of a captured step, including the copy of the batch into its input."""
        step = GraphedStep.from_scratch(self.X, self.y, replicas, _LR, model=lenet)
        return partial(step, self.X, self.y)

    def ways(self) -> dict[str, Callable[[Parameters], Step]]:
        """Return, by candidate, the function that makes a step for given replicas."""
        found: dict[str, Callable[[Parameters], Step]] = {
            NAIVE: partial(self.eager, reduction="naive"),
            EAGER: partial(self.eager, reduction="pycollect"),
        }
        if self.devices[0].type == "cuda":
            found[GRAPH] = self.graphed
        return found

    def reduction(self, name: str) -> Step:
        """Return a call of the reduction on zero gradients, which stay zero."""
        return partial(GRADIENT_REDUCTIONS[name], [gradients(params) for params in self.replicas()])

    def wrong(self) -> int:
        """Return the number of parameters of all ranks whose bits differ from the naive loop's."""
        with _deterministic():
            return self._wrong()

    def _wrong(self) -> int:
        trained = {}
        for name, way in self.ways().items():
            replicas = self.replicas()
            step = way(replicas)
            for _ in range(_CHECKED):
                step()
            self.synchronize()
            trained[name] = [p.detach().view(torch.int32) for mine in replicas for p in mine]
        naive = trained.pop(NAIVE)
        return sum(
            not torch.equal(a, b)
            for ours in trained.values()
            for a, b in zip(naive, ours, strict=True)
        )


@contextmanager
def _deterministic() -> Iterator[None]:
    """Select deterministic cuDNN convolutions; the bits of others differ from run to run."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def measure_steps(devices: list[torch.device], batch: int, effort: Effort) -> StepResult:
    """Time all candidates in turns, on one batch of `batch` examples over all ranks.

    Raises ValueError for ranks on several devices.
    """
    if len(set(devices)) != 1:
        raise ValueError("the training step is measured on ranks that share one device")
    bench = Bench(devices, batch)
    runs = {name: way(bench.replicas()) for name, way in bench.ways().items()}
    runs[NAIVE_REDUCTION] = bench.reduction("naive")
    runs[REDUCTION] = bench.reduction("pycollect")
    samplers = {n: host_time(run, synchronize=bench.synchronize) for n, run in runs.items()}
    return StepResult(interleave(samplers, effort), bench.wrong())
