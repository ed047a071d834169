"""`dist.all_reduce` on ranks as threads, beside processes, the list API, and torch's own share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

import pycollect
from pycollect import threads
from pycollect._timing import Effort, Sampler, Timing, interleave, ratios, shuffled

from ..gpu import synchronizer
from .process_pool import GLOO, OURS, ProcessPool
from .timed_calls import BatchSampler, Interval, RunBatches, seconds_of, timed_batches

THREADS, PARALLEL = "threads", "threads, parallel"
PROCESSES, GLOO_PROCESSES, LIST = "processes, pycollect", "processes, gloo", "list"
# One call of one rank, without other ranks: what torch, Python and this library take for it.
FAKE, FAKE_RANK = "fake backend", "fake backend, in a rank"
ONE, ONE_RANK = "world of one", "world of one, in a rank"
FLOORS = (FAKE, FAKE_RANK, ONE, ONE_RANK)
# The backend of each way through processes.
_BACKENDS = MappingProxyType({PROCESSES: OURS, GLOO_PROCESSES: GLOO})
_ELEMENT_BYTES = 4  # of float32


@dataclass(frozen=True)
class WayResult:
    """The time of a collective in one way; `speedup[peer]` is the peer's time divided by it."""

    way: str
    nbytes: int
    world: int
    timing: Timing
    speedup: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks that call; 0 if one call serves all."""
        return {LIST: 0, **dict.fromkeys(FLOORS, 1)}.get(self.way, self.world)

    @property
    def call(self) -> float | None:
        """The seconds of a collective divided by the number of calls that make it."""
        return self.timing.percentile(50) / self.ranks if self.ranks else None


@dataclass(frozen=True)
class SizeResult:
    """All ways at one size; `not_run` has the reason of each that does not run."""

    nbytes: int
    rows: list[WayResult]
    not_run: dict[str, str]

    def row(self, way: str) -> WayResult | None:
        """Return the row of the way, if it was measured."""
        return next((row for row in self.rows if row.way == way), None)


def _of_ranks(
    device: torch.device,
    world: int,
    elements: int,
    parallel: bool,
    fake: bool,
    batches: int,
    calls: int,
) -> list[float]:
    """Run the batches in a launch of its own."""

    def run(rank: int, world: int) -> list[Interval]:
        if fake:
            dist.init_process_group("fake", rank=rank, world_size=world)
        return timed_batches(elements, device, batches, calls, reduces=not fake)

    of_ranks = device if device.type == "cuda" else None
    return seconds_of(threads.launch(run, world, device=of_ranks, parallel=parallel))


def _alone(
    device: torch.device, elements: int, backend: str, batches: int, calls: int
) -> list[float]:
    """Run the batches in this thread, as the only rank of a group, or the first of a fake one."""
    fake = backend == "fake"
    store: Any = vars(dist)["HashStore"]()  # torch has no type annotations for its stores
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        return seconds_of([timed_batches(elements, device, batches, calls, reduces=not fake)])
    finally:
        dist.destroy_process_group()


def _of_list(
    tensors: Sequence[torch.Tensor], synchronize: Callable[[], None], batches: int, calls: int
) -> list[float]:
    seconds = []
    for _ in range(batches):
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            pycollect.all_reduce(tensors)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _ways(
    pool: ProcessPool, world: int, device: torch.device, elements: int
) -> dict[str, RunBatches]:
    tensors = [torch.zeros(elements, device=device) for _ in range(world)]
    in_launch = partial(_of_ranks, device)
    ways: dict[str, RunBatches] = {
        THREADS: partial(in_launch, world, elements, False, False),
        PARALLEL: partial(in_launch, world, elements, True, False),
    }
    for way, backend in _BACKENDS.items():
        ways[way] = partial(pool.run, backend, elements)
    ways[LIST] = partial(_of_list, tensors, synchronizer([device]))
    return ways


def _floors(device: torch.device, elements: int) -> dict[str, RunBatches]:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers "fake"

    return {
        FAKE: partial(_alone, device, elements, "fake"),
        FAKE_RANK: partial(_of_ranks, device, 1, elements, False, True),
        ONE: partial(_alone, device, elements, OURS),
        ONE_RANK: partial(_of_ranks, device, 1, elements, False, False),
    }


def measure(
    pool: ProcessPool,
    world: int,
    device: torch.device,
    nbytes: int,
    effort: Effort,
    floors: bool,
) -> SizeResult:
    """Measure all ways at this size, interleaved; with `floors` also torch's own share of a call.

    Ways that fail are listed in `not_run`.

    Raises:
        ValueError: if the size is no positive multiple of an element's.
    """
    elements, rest = divmod(nbytes, _ELEMENT_BYTES)
    if rest or not elements:
        raise ValueError(f"a size of {nbytes} bytes is no multiple of {_ELEMENT_BYTES}")
    ways = _ways(pool, world, device, elements)
    if floors:
        ways |= _floors(device, elements)
    samplers: dict[str, Sampler] = {}
    not_run: dict[str, str] = {}
    for way, run in ways.items():
        sampler = BatchSampler(run)
        try:
            sampler(1)
        except Exception as error:  # any error is the reason why the way has no time
            not_run[way] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            samplers[way] = sampler
    timings = interleave(samplers, effort, shuffled(nbytes))
    rows = [_row(way, nbytes, world, timings) for way in timings]
    return SizeResult(nbytes, rows, not_run)


def _row(way: str, nbytes: int, world: int, timings: dict[str, Timing]) -> WayResult:
    peers = [peer for peer in (GLOO_PROCESSES, LIST) if peer in timings and way not in FLOORS]
    speedup = {peer: ratios(timings[peer].rounds, timings[way].rounds) for peer in peers}
    return WayResult(way, nbytes, world, timings[way], speedup)
