"""Random calls over random groups, from several threads, while ranks die or are stopped.

dist_soak.py derives all steps from a seed, which failures report. PYCOLLECT_TEST_SOAK_SEED=n runs
that story first, PYCOLLECT_TEST_SOAK_WITHOUT leaves out kinds of steps (comma-separated names), and
PYCOLLECT_TEST_SOAK_SECONDS is the duration of the slow test.
"""

from __future__ import annotations

import os
import time

import pytest
from dist_pool import BACKEND, OURS, fresh
from dist_soak import phases_of, tell

pytestmark = pytest.mark.skipif(not OURS, reason=f"{BACKEND} has no types for these exceptions")
SECONDS = float(os.environ.get("PYCOLLECT_TEST_SOAK_SECONDS", "20"))
WITHOUT = frozenset(filter(None, os.environ.get("PYCOLLECT_TEST_SOAK_WITHOUT", "").split(",")))
ONE = os.environ.get("PYCOLLECT_TEST_SOAK_SEED")
LIMIT = 240.0  # time limit of a story in seconds; usual ones take about 10


def one_story(seed: int) -> float:
    """Run a story; return the longest time, in seconds, between a death and a survivor's error."""
    world = 4 + seed % 3
    dead = {c.victim for c in phases_of(seed, world) if c.fault == "death"}
    with fresh(world, group=False) as pool:
        outcomes = pool.outcomes(tell, seed, pool.pids(), WITHOUT, seconds=LIMIT)
        wrong = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.died != (r in dead)]
        wrong += [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error and not o.died]
        logs = pool._logs()
    assert not wrong, "\n".join([f"PYCOLLECT_TEST_SOAK_SEED={seed}", *wrong, *logs])
    return max((o.value for o in outcomes if not o.died), default=0.0)


SHORT = (0, 3)  # seeds that together have every fault


@pytest.mark.parametrize("seed", [int(ONE)] if ONE else SHORT)
def test_a_story(seed):
    one_story(seed)


@pytest.mark.slow
def test_stories():
    start, seed = time.monotonic(), int(ONE or 1000)
    while time.monotonic() - start < SECONDS:
        late = one_story(seed)
        print(
            f"seed {seed}: {time.monotonic() - start:.0f} s, told after {late:.2f} s at the latest"
        )
        seed += 1
