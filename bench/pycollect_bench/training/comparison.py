"""The candidates of one model and number of ranks, and the time of a training step of each.

A step is complete: split, forward, backward, reduction and update, until the devices are done.
Its reduction is the time that the step waits for it; for DDP, which overlaps the reduction, it is a
separate reduction of the same buckets.

Two ranks of the ResNet-18 take two thirds of one replica's time if malloc maps tensors over 32 MB
anew at every step, as glibc does: the whole batch's tensors exceed this, those of half a batch do
not. With large MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ two ranks take equally long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pycollect._timing import Effort, Sampler, Timing, ratios
from pycollect.train.models import MODELS
from pycollect.train.optimizers import sgd_optimizer
from pycollect.train.reduce import REDUCTIONS
from pycollect.train.replicas import Replicas
from pycollect.train.settings import StepOptions

from .ddp import BACKENDS, DDPJob, DDPWorkers
from .turns import in_turns

ONE = "one replica, whole batch"
NAIVE, PYCOLLECT, OVERLAPPED = "naive loop", "pycollect", "pycollect, overlapped"
# Learning rate, so small that any number of steps on one batch leaves all numbers finite.
LR = 1e-4


@dataclass(frozen=True)
class TrainingCase:
    """A model, the ranks' devices, and the number of examples in a batch over all ranks."""

    model: str
    batch: int
    devices: tuple[torch.device, ...]
    size: int = 28  # height and width of the images

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def one_kind(self) -> bool:
        """Whether all ranks are on CPUs, or all on GPUs."""
        return len({device.type for device in self.devices}) == 1

    def examples(self) -> tuple[Tensor, Tensor]:
        """Return a batch on the CPU, the same in every run; its values do not affect times."""
        generator = torch.Generator().manual_seed(0)
        X = torch.rand((self.batch, 1, self.size, self.size), generator=generator)
        return X, torch.randint(10, (self.batch,), generator=generator)


@dataclass
class Measured:
    """Times of a candidate's steps, and of the reductions in them."""

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
    """The entries of one case by name; `not_run` has the reasons of other candidates."""

    case: TrainingCase
    entries: dict[str, Measured]
    not_run: dict[str, str]

    def slowdowns(self, name: str) -> list[float]:
        """Return the step time divided by one replica's, by round; nothing if it did not run."""
        if name not in self.entries:
            return []
        return ratios(self.entries[name].timing.rounds, self.entries[ONE].timing.rounds)

    def slowdown(self, name: str) -> float | None:
        """Return the median over rounds of the step time divided by one replica's."""
        found = self.slowdowns(name)
        return statistics.median(found) if found else None

    def times_faster(self, name: str, than: str) -> float | None:
        """Return the steps per second of `name` over those of `than`: the median over rounds."""
        if not {name, than} <= self.entries.keys():
            return None
        found = ratios(self.entries[than].timing.rounds, self.entries[name].timing.rounds)
        return statistics.median(found)

    def share(self, name: str) -> float | None:
        """Return the fraction of a step that is its reduction, 0..1."""
        entry = self.entries.get(name)
        return None if entry is None else entry.reduction / entry.step


Reductions = dict[str, list[float]]


def _in_process(
    case: TrainingCase, devices: Sequence[torch.device], reduction: str, overlap: bool
) -> Callable[[list[float]], Sampler]:
    """Return a maker of samplers of steps on replicas, which record the reduction times."""
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


def _candidates(
    case: TrainingCase, ddp: bool, stack: ExitStack
) -> Iterator[tuple[str, Callable[[list[float]], Sampler]]]:
    """Yield the name of every candidate and the maker of its sampler."""
    yield ONE, _in_process(case, case.devices[:1], "pycollect", overlap=False)
    if case.world > 1:  # one rank has nothing to reduce, so these would equal ONE
        yield NAIVE, _in_process(case, case.devices, "naive", overlap=False)
        yield PYCOLLECT, _in_process(case, case.devices, "pycollect", overlap=False)
        yield OVERLAPPED, _in_process(case, case.devices, "pycollect", overlap=True)
    if ddp and case.one_kind:
        for name, backend in BACKENDS.items():
            job = DDPJob(case.model, case.examples(), LR, case.devices, backend)
            yield name, stack.enter_context(DDPWorkers(job)).sampler


def measure(case: TrainingCase, effort: Effort, ddp: bool = True) -> Result:
    """Time a step of all candidates in turns.

    `ddp` starts a process per rank and backend. Raises RuntimeError if a process fails.
    """
    reductions: Reductions = {}
    samplers: dict[str, Sampler] = {}
    with ExitStack() as stack:
        for name, make in _candidates(case, ddp, stack):
            reductions[name] = []
            samplers[name] = make(reductions[name])
        timings = in_turns(samplers, effort)
    entries = {name: Measured(t, reductions[name][-t.count :]) for name, t in timings.items()}
    why = "needs all ranks on CPUs or all on GPUs"
    not_run = {name: why for name in BACKENDS if ddp and not case.one_kind}
    return Result(case, entries, not_run)
