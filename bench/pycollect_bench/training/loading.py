"""Benefit of preparing batches ahead: LeNet on examples in memory, and on image files.

A sample is the time of one epoch of a few batches, with loading, divided by the number of steps.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from pycollect._timing import Effort, Sampler, Timing, host_time, interleave
from pycollect.train.data.dataset import Examples
from pycollect.train.data.folder import scan
from pycollect.train.loader import Loader, LoaderOptions
from pycollect.train.models import LeNet
from pycollect.train.optimizers import sgd_factory
from pycollect.train.replica_trainer import ReplicaTrainer
from pycollect.train.settings import StepOptions

from .comparison import LR

# Batches in an epoch. The first cannot be prepared ahead, so there are a few more.
_BATCHES = 4
# Batches prepared ahead: the next one, and one in preparation.
AHEAD = 2
# Width and height of the image files: those of small photographs, scaled to 28 x 28 for LeNet.
_PHOTOGRAPH = (160, 120)
MEMORY, FILES = "examples in memory", "image files"


@dataclass(frozen=True)
class Loaded:
    """Times of a step with loading, and the seconds in which it waits for its batch."""

    timing: Timing
    waited: float


@dataclass(frozen=True)
class LoadingResult:
    """Measurements by candidate. `not_run` has the reason for each candidate that did not run."""

    entries: dict[str, Loaded]
    not_run: dict[str, str]


def name(kind: str, prefetch: int) -> str:
    """Return the name of a candidate.

    >>> name(MEMORY, 2)
    'examples in memory, 2 ahead'
    """
    return f"{kind}, {prefetch} ahead" if prefetch else f"{kind}, none ahead"


def _in_memory(examples: int) -> Examples:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand((examples, 3, 28, 28), generator=generator)
    return X, torch.randint(10, (examples,), generator=generator)


@contextmanager
def _files(examples: int) -> Iterator[Examples]:
    """Yield a data set of image files that exist during the context."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    width, height = _PHOTOGRAPH
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder, "all", "one class")
        parent.mkdir(parents=True)
        for i in range(examples):
            coarse = torch.randint(256, (height // 8, width // 8, 3), generator=generator)
            small = Image.fromarray(coarse.to(torch.uint8).numpy())
            small.resize(_PHOTOGRAPH).save(parent / f"{i}.jpg")
        yield scan(parent.parent, (parent.name,), 28)


def _sampler(
    examples: Examples, loading: LoaderOptions, devices: Sequence[torch.device], waits: list[float]
) -> Sampler:
    """Return a sampler of epochs on these devices, which appends waiting times to `waits`."""
    replicas = ReplicaTrainer(
        LeNet(in_channels=3),
        devices,
        optimizer=sgd_factory(LR),
        options=StepOptions(exact_times=True),
    )
    loader = Loader(examples, loading, devices=devices)

    def epoch() -> None:
        waited = []
        for batch in loader.epoch():
            waited.append(batch.waited)
            replicas.step(batch.X, batch.y)
        waits.append(statistics.mean(waited))

    return host_time(epoch, calls_in_run=_BATCHES)


def measure_loading(devices: Sequence[torch.device], batch: int, effort: Effort) -> LoadingResult:
    """Time epochs of LeNet on these devices, in turns with and without batches ahead."""
    waits: dict[str, list[float]] = {}
    samplers: dict[str, Sampler] = {}

    def enter(kind: str, examples: Examples) -> None:
        for prefetch in (0, AHEAD):
            loading, label = LoaderOptions(batch, prefetch=prefetch), name(kind, prefetch)
            waits[label] = []
            samplers[label] = _sampler(examples, loading, devices, waits[label])

    enter(MEMORY, _in_memory(batch * _BATCHES))
    if find_spec("PIL") is None:
        timings, not_run = interleave(samplers, effort), {FILES: "Pillow is not installed"}
    else:
        with _files(batch * _BATCHES) as examples:
            enter(FILES, examples)
            timings, not_run = interleave(samplers, effort), {}
    entries = {
        label: Loaded(t, statistics.median(waits[label][-t.count :]))
        for label, t in timings.items()
    }
    return LoadingResult(entries, not_run)
