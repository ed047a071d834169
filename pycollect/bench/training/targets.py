"""What is promised of training on the CPU and on one GPU, and whether a run keeps it."""

from __future__ import annotations

from collections.abc import Iterable

from ..targets import Outcome
from .contest import ONE, OVERLAPPED, PYCOLLECT, Result
from .ddp import DDP_GLOO, DDP_OURS

# Of one replica's step on the whole batch, for two ranks and batches from this size on.
_MOST, _BATCH = 1.05, 256
# Steps a second of DDP over gloo's, with so many processes on one GPU.
_FASTER, _PROCESSES = 3.0, 4
# Per cent of a step that its reduction may take.
_SHARES = {"lenet": 10.0, "resnet18": 2.0}


def judge(results: Iterable[Result]) -> list[Outcome]:
    """Return an outcome for every promise, `measured` being the worst point of the run.

    The slowdown is that of the replicas' default, which overlaps; the share of the reduction is
    that of a step that does not.
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
