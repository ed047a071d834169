"""Speed targets of training on the CPU and on one GPU, and their check against a run."""

from __future__ import annotations

from collections.abc import Iterable

from ..targets import Outcome
from .comparison import ONE, OVERLAPPED, PYCOLLECT, Result
from .ddp import DDP_GLOO, DDP_OURS

# Largest step time of two ranks, relative to one replica on the whole batch, for batches of at
# least _BATCH examples.
_MOST, _BATCH = 1.05, 256
# Least ratio of DDP's steps per second with pycollect to those with gloo, for _PROCESSES processes
# on one GPU.
_FASTER, _PROCESSES = 3.0, 4
# Largest percentage of a step that its reduction may take, by model.
_SHARES = {"lenet": 10.0, "resnet18": 2.0}


def judge(results: Iterable[Result]) -> list[Outcome]:
    """Return an outcome for every target: its worst point of the run.

    The slowdown is that of steps with overlap, the default. The reduction's share is that of steps
    without overlap.
    """
    results = list(results)
    if any(r.case.devices[0].type == "cuda" for r in results):
        return [_ddp(results)]
    return [
        *(_slowdown(results, model) for model in _SHARES),
        *(_share(results, model) for model in _SHARES),
    ]


def _ddp(results: list[Result]) -> Outcome:
    points = [
        (ratio, f"batch {r.case.batch}")
        for r in results
        if (r.case.model, r.case.world, len(set(r.case.devices))) == ("lenet", _PROCESSES, 1)
        if (ratio := r.times_faster(DDP_OURS, DDP_GLOO)) is not None
    ]
    worst, where = min(points, default=(None, ""))
    return Outcome(
        f"lenet: DDP of {_PROCESSES} processes on a GPU, of gloo", _FASTER, worst, where=where
    )


def _slowdown(results: list[Result], model: str) -> Outcome:
    points = [
        (slowdown, f"batch {r.case.batch}")
        for r in results
        if (r.case.model, r.case.world) == (model, 2) and r.case.batch >= _BATCH
        if (slowdown := r.slowdown(OVERLAPPED)) is not None
    ]
    worst, where = max(points, default=(None, ""))
    return Outcome(f"{model}: two ranks' step, of {ONE}", _MOST, worst, "<=", "x", where)


def _share(results: list[Result], model: str) -> Outcome:
    points = [
        (100 * share, f"{r.case.world} ranks")
        for r in results
        if r.case.model == model and (share := r.share(PYCOLLECT)) is not None
    ]
    worst, where = max(points, default=(None, ""))
    what = f"{model}: reduction's share of the step"
    return Outcome(what, _SHARES[model], worst, "<", "%", where)
