"""The candidates of one model and number of ranks, and the time of a training step of each.

A step is complete: split, forward, backward, reduction and update, until the devices are done. The
time of its reduction is the time in which the step waits for it. DDP overlaps the reduction, so its
reduction is timed separately, with the same buckets.

Two ranks of the ResNet-18 take two thirds of one replica's time if malloc maps tensors over 32 MB
anew at every step, as glibc does: tensors of the whole batch exceed this, tensors of half a batch
do not. With large MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ two ranks take as long as one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pycollect._timing import Effort, Sampler, Timing, interleave, median_ratio, ratios
from pycollect.train.models import MODELS
from pycollect.train.optimizers import sgd_factory
from pycollect.train.reduce import GRADIENT_REDUCTIONS
from pycollect.train.replica_trainer import ReplicaTrainer
from pycollect.train.settings import StepOptions

from .ddp import BACKENDS, DDPJob, DDPWorkers

ONE = "one replica, whole batch"
NAIVE, PYCOLLECT, OVERLAPPED = "naive loop", "pycollect", "pycollect, overlapped"
COMPILED = "pycollect, compiled"
# Learning rate: so small that all numbers stay finite after any number of steps on one batch.
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
        """Return a batch on the CPU, equal in all runs; its values do not affect the times."""
        generator = torch.Generator().manual_seed(0)
        X = torch.rand((self.batch, 1, self.size, self.size), generator=generator)
        return X, torch.randint(10, (self.batch,), generator=generator)


@dataclass
class Measured:
    """Times of a candidate's steps, and of their reductions."""

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
    """The entries of one case by name. `not_run` has the reasons of other candidates.

    `failed`: a process of DDP failed; in a case without DDP, none did.
    """

    case: TrainingCase
    entries: dict[str, Measured]
    not_run: dict[str, str]
    failed: bool = False

    def slowdowns(self, name: str) -> list[float]:
        """Return the step time divided by one replica's, by round; empty if `name` did not run."""
        if name not in self.entries:
            return []
        return ratios(self.entries[name].timing.rounds, self.entries[ONE].timing.rounds)

    def slowdown(self, name: str) -> float | None:
        """Return the median over rounds of the step time divided by one replica's."""
        return self.times_faster(ONE, than=name)

    def times_faster(self, name: str, than: str) -> float | None:
        """Return the steps per second of `name` over those of `than`: the median over rounds."""
        if not {name, than} <= self.entries.keys():
            return None
        return median_ratio(self.entries[than].timing.rounds, self.entries[name].timing.rounds)

    def share(self, name: str) -> float | None:
        """Return the fraction of a step that is its reduction, 0..1."""
        entry = self.entries.get(name)
        return None if entry is None else entry.reduction / entry.step


Reductions = dict[str, list[float]]


def _in_process(
    case: TrainingCase,
    devices: Sequence[torch.device],
    reduction: str = "pycollect",
    **options: bool,
) -> Callable[[list[float]], Sampler]:
    """Return a function that makes a sampler of steps, which records times of reductions.

    `options` are StepOptions, without overlap unless they have it.
    """
    replicas = ReplicaTrainer(
        MODELS[case.model](),
        devices,
        optimizer=sgd_factory(LR),
        reduction=GRADIENT_REDUCTIONS[reduction],
        options=StepOptions(**{"overlap": False, "exact_times": True, **options}),
    )
    X, y = case.examples()
    for _ in range(2 * options.get("compile", False)):
        replicas.step(X, y)  # the second step compiles

    # The step's own clock is read, not `host_time`: it has the reduction's part of the same step.
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
    case: TrainingCase, ddp: bool, compiled: bool, stack: ExitStack
) -> Iterator[tuple[str, Callable[[list[float]], Sampler]]]:
    """Yield the name of every candidate, and the function that makes its sampler."""
    yield ONE, _in_process(case, case.devices[:1])
    if case.world > 1:  # with one rank there is no reduction, and these would equal ONE
        yield NAIVE, _in_process(case, case.devices, "naive")
        yield PYCOLLECT, _in_process(case, case.devices)
        yield OVERLAPPED, _in_process(case, case.devices, overlap=True)
    if compiled:
        yield COMPILED, _in_process(case, case.devices, compile=True)
    if ddp and case.one_kind:
        for name, backend in BACKENDS.items():
            job = DDPJob(case.model, case.examples(), LR, case.devices, backend)
            yield name, stack.enter_context(DDPWorkers(job)).sampler


def _entries(
    case: TrainingCase, effort: Effort, *, ddp: bool, compiled: bool
) -> dict[str, Measured]:
    reductions: Reductions = {}
    samplers: dict[str, Sampler] = {}
    with ExitStack() as stack:
        for name, make in _candidates(case, ddp, compiled, stack):
            reductions[name] = []
            samplers[name] = make(reductions[name])
        timings = interleave(samplers, effort)
    return {name: Measured(t, reductions[name][-t.count :]) for name, t in timings.items()}


def measure(case: TrainingCase, effort: Effort, ddp: bool = True, compiled: bool = False) -> Result:
    """Time a step of all candidates in turns.

    With `ddp` there is a process per rank and backend. If one fails, the candidates of this process
    are measured without them. `compiled` adds the step as one graph of torch.compile.
    """
    failed, why = False, "" if case.one_kind else "needs all ranks on CPUs or all on GPUs"
    if ddp and not why:
        try:
            return Result(case, _entries(case, effort, ddp=True, compiled=compiled), {})
        except RuntimeError as error:
            failed, why = True, str(error).strip().splitlines()[-1]
    entries = _entries(case, effort, ddp=False, compiled=compiled)
    return Result(case, entries, dict.fromkeys(BACKENDS, why) if ddp else {}, failed)
