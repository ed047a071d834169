"""The contestants of one model and number of ranks, and what a step of each takes.

A step is a whole one: split, forward, backward, reduction and update, until the devices are done.
Its reduction is what the step waits for; of DDP, which reduces meanwhile, it is a reduction of the
same buckets by itself.

Two ranks of the ResNet-18 take two thirds of one replica's time where malloc maps tensors over
32 MB anew at every step, as glibc does: the whole batch's are larger, and half a batch's are not.
With MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ out of the way they take as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...train.models import MODELS
from ...train.optimizers import sgd_optimizer
from ...train.reduce import REDUCTIONS
from ...train.replicas import Replicas
from ...train.settings import StepOptions
from ..measure import Effort, Sampler, Timing, ratios
from .ddp import BACKENDS, Crew, Job
from .turns import in_turns

ONE = "one replica, whole batch"
NAIVE, PYCOLLECT, OVERLAPPED = "naive loop", "pycollect", "pycollect, overlapped"
# So small that any number of steps on one batch leaves all numbers finite.
LR = 1e-4


@dataclass(frozen=True)
class Case:
    """A model on so many ranks, with batches of so many examples over all ranks."""

    model: str
    batch: int
    devices: tuple[torch.device, ...]
    size: int = 28  # of the images, both ways

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def one_kind(self) -> bool:
        """Whether all ranks are on CPUs, or all on GPUs."""
        return len({device.type for device in self.devices}) == 1

    def examples(self) -> tuple[Tensor, Tensor]:
        """Return a batch on the CPU, the same in every run; its numbers decide no time."""
        generator = torch.Generator().manual_seed(0)
        X = torch.rand((self.batch, 1, self.size, self.size), generator=generator)
        return X, torch.randint(10, (self.batch,), generator=generator)


@dataclass
class Entry:
    """What a contestant's steps took, and the reductions within."""

    timing: Timing
    reductions: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        """The median seconds of a step."""
        return self.timing.percentile(50)

    @property
    def reduction(self) -> float:
        """The median seconds of a reduction."""
        return statistics.median(self.reductions)


@dataclass(frozen=True)
class Result:
    """The entries of one case by name, and who did not run and why."""

    case: Case
    entries: dict[str, Entry]
    not_run: dict[str, str]

    def slowdown(self, name: str) -> float | None:
        """Return how many times as long as one replica a step takes: the median over rounds."""
        if name not in self.entries:
            return None
        found = ratios(self.entries[name].timing.rounds, self.entries[ONE].timing.rounds)
        return statistics.median(found)

    def times_faster(self, name: str, than: str) -> float | None:
        """Return the steps a second of one over another's: the median over rounds."""
        if not {name, than} <= self.entries.keys():
            return None
        found = ratios(self.entries[than].timing.rounds, self.entries[name].timing.rounds)
        return statistics.median(found)

    def share(self, name: str) -> float | None:
        """Return what part of a step is its reduction, 0..1."""
        entry = self.entries.get(name)
        return None if entry is None else entry.reduction / entry.step


Reductions = dict[str, list[float]]


def _in_process(
    case: Case, devices: Sequence[torch.device], reduction: str, overlap: bool
) -> Callable[[list[float]], Sampler]:
    """Return what makes a sampler of steps on replicas, which notes the reductions."""
    options = StepOptions(overlap=overlap, exact_seconds=True)
    replicas = Replicas(
        MODELS[case.model](),
        devices,
        optimizer=sgd_optimizer(LR),
        reduction=REDUCTIONS[reduction],
        options=options,
    )
    X, y = case.examples()

    def make(reductions: list[float]) -> Sampler:
        def sample(calls: int) -> list[float]:
            seconds = []
            for _ in range(calls):
                replicas.step(X, y)
                seconds.append(replicas.seconds.total)
                reductions.append(replicas.seconds.reduction)
            return seconds

        return sample

    return make


def _contestants(
    case: Case, ddp: bool, stack: ExitStack
) -> Iterator[tuple[str, Callable[[list[float]], Sampler]]]:
    """Yield the name and the maker of a sampler of every contestant."""
    yield ONE, _in_process(case, case.devices[:1], "pycollect", overlap=False)
    if case.world > 1:  # or there is nothing to reduce, and all of these are one replica
        yield NAIVE, _in_process(case, case.devices, "naive", overlap=False)
        yield PYCOLLECT, _in_process(case, case.devices, "pycollect", overlap=False)
        yield OVERLAPPED, _in_process(case, case.devices, "pycollect", overlap=True)
    if ddp and case.one_kind:
        for name, backend in BACKENDS.items():
            job = Job(case.model, case.examples(), LR, case.devices, backend)
            yield name, stack.enter_context(Crew(job)).sampler


def measure(case: Case, effort: Effort, ddp: bool = True) -> Result:
    """Time a step of all contestants in turns.

    `ddp` starts a process per rank and backend. Raises RuntimeError if one of them fails.
    """
    reductions: Reductions = {}
    samplers: dict[str, Sampler] = {}
    with ExitStack() as stack:
        for name, make in _contestants(case, ddp, stack):
            reductions[name] = []
            samplers[name] = make(reductions[name])
        timings = in_turns(samplers, effort)
    entries = {name: Entry(t, reductions[name][-t.count :]) for name, t in timings.items()}
    why = "needs all ranks on CPUs or all on GPUs"
    not_run = {name: why for name in BACKENDS if ddp and not case.one_kind}
    return Result(case, entries, not_run)
