"""What preparing batches ahead brings: LeNet on examples in memory, and on image files.

A sample is one epoch of a few batches, loading included, per step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from ...train.data.examples import Examples
from ...train.data.folder import scan
from ...train.loader import Loader, Loading
from ...train.models import LeNet
from ...train.optimizers import sgd_optimizer
from ...train.replicas import Replicas
from ...train.settings import StepOptions
from ..measure import Effort, Sampler, Timing
from .contest import LR
from .turns import in_turns

# Batches of an epoch: the first has nobody who could have prepared it, so a few more follow.
_BATCHES = 4
# Batches prepared ahead: one that is taken next, and one in the making.
AHEAD = 2
# Width and height of the files' images, of which LeNet gets 28 x 28: small photographs.
_PHOTOGRAPH = (160, 120)
MEMORY, FILES = "examples in memory", "image files"


@dataclass(frozen=True)
class Loaded:
    """What a step took with loading, and for how long of it the step waited for its batch."""

    timing: Timing
    waited: float


@dataclass(frozen=True)
class LoadingResult:
    """What was measured by contestant, and who did not run and why."""

    entries: dict[str, Loaded]
    not_run: dict[str, str]


def name(kind: str, prefetch: int) -> str:
    """Name a contestant.

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
    """Give image files that last as long as the context."""
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
    examples: Examples, loading: Loading, devices: Sequence[torch.device], waits: list[float]
) -> Sampler:
    """Return what times epochs of ranks on these devices, and notes how long a step waited."""
    replicas = Replicas(
        LeNet(in_channels=3),
        devices,
        optimizer=sgd_optimizer(LR),
        options=StepOptions(exact_seconds=True),
    )
    loader = Loader(examples, loading, devices=devices)

    def sample(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            begin, waited = time.perf_counter(), []
            for batch in loader.epoch():
                waited.append(batch.waited)
                replicas.step(batch.X, batch.y)
            seconds.append((time.perf_counter() - begin) / len(waited))
            waits.append(statistics.mean(waited))
        return seconds

    return sample


def measure_loading(devices: Sequence[torch.device], batch: int, effort: Effort) -> LoadingResult:
    """Time epochs of LeNet on these ranks in turns, with batches prepared ahead and without."""
    waits: dict[str, list[float]] = {}
    samplers: dict[str, Sampler] = {}

    def enter(kind: str, examples: Examples) -> None:
        for prefetch in (0, AHEAD):
            loading, label = Loading(batch, prefetch=prefetch), name(kind, prefetch)
            waits[label] = []
            samplers[label] = _sampler(examples, loading, devices, waits[label])

    enter(MEMORY, _in_memory(batch * _BATCHES))
    if find_spec("PIL") is None:
        timings, not_run = in_turns(samplers, effort), {FILES: "Pillow is not installed"}
    else:
        with _files(batch * _BATCHES) as examples:
            enter(FILES, examples)
            timings, not_run = in_turns(samplers, effort), {}
    entries = {
        label: Loaded(t, statistics.median(waits[label][-t.count :]))
        for label, t in timings.items()
    }
    return LoadingResult(entries, not_run)
