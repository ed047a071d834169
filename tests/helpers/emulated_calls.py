"""Emulated calls on devices: cases from every algorithm, device placement and stream layout."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from plan_cases import Case, cases

from pycollect import _C, _testing

Devices = list[int]


def all_reduce(name: str, world: int, pieces: int = 4) -> _C.Plan:
    return _C.find_algorithm("all_reduce", name).plan(world, 0, pieces)


def stream_layouts() -> Iterator[dict[str, Any]]:
    """Cycle endlessly through all stream layouts of a call, in a fixed shuffled order, so that the
    cycle is not correlated with the caller's loops."""
    booleans = (False, True)
    found = [
        {"callers_apart": a, "copy_streams": copy_streams, "level_policy": level_policy}
        for a, copy_streams, level_policy in itertools.product(
            booleans, booleans, ("any", "one_task")
        )
    ]
    random.Random(0).shuffle(found)
    return itertools.cycle(found)


def placements(world: int) -> Iterator[Devices]:
    """Device of each rank, for 1 .. world devices: ranks in blocks, and ranks in turns."""
    for devices in range(1, world + 1):
        blocks = [rank * devices // world for rank in range(world)]
        yield blocks
        turns = [rank % devices for rank in range(world)]
        if turns != blocks:
            yield turns


def calls(
    algorithm: _C.Algorithm, worlds: Sequence[int]
) -> Iterator[tuple[Case, Devices, dict[str, Any]]]:
    """Each case on each placement, with peer access and, on several devices, also staged."""
    layout = stream_layouts()
    for case in cases(algorithm, worlds):
        for devices in placements(case.world):
            yield case, devices, next(layout) | {"peers": True}
            if len(set(devices)) > 1:
                yield case, devices, next(layout) | {"peers": False}


def emulate_calls(
    plan: _C.Plan, in_place: bool, devices: Devices, runs: int = 1, **layout: Any
) -> _testing.EmulatedRun:
    """Issue an emulated call `runs` times and assert that no accesses race."""
    emulated_run = _testing.EmulatedRun(plan, in_place, devices, **layout)
    emulated_run.run(runs)
    assert emulated_run.race is None, f"{devices} {layout}: {emulated_run.race}"
    return emulated_run
