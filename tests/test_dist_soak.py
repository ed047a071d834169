"""Random calls over random groups, from several threads, while ranks die or are stopped.

dist_soak.py derives all steps from a seed, which failures report. PYCOLLECT_TEST_SOAK_SEED=n runs
that scenario first, and PYCOLLECT_TEST_SOAK_SECONDS is the duration of each slow test.
"""

from __future__ import annotations

import os
import time

import pytest
from dist_pool import BACKEND, OURS, fresh
from dist_soak import phases_of, run_scenario

pytestmark = pytest.mark.skipif(not OURS, reason=f"{BACKEND} has no types for these exceptions")
SECONDS = float(os.environ.get("PYCOLLECT_TEST_SOAK_SECONDS", "10"))
FIRST_SEED = os.environ.get("PYCOLLECT_TEST_SOAK_SEED")
LIMIT = 240.0  # time limit of a scenario in seconds; usual ones take about 10


def run_one_scenario(seed: int, placement: str) -> float:
    """Run a scenario; return the longest time in seconds from a death to a survivor's error.

    `placement`: the host of each rank, by letter; empty: all ranks are on one host.
    """
    world = 4 + seed % 3
    dead = {c.faulty_rank for c in phases_of(seed, world) if c.fault == "death"}
    with fresh(world, group=False, placement=placement[:world]) as pool:
        outcomes = pool.outcomes(run_scenario, seed, pool.pids(), seconds=LIMIT)
        wrong = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.died != (r in dead)]
        wrong += [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error and not o.died]
        logs = pool._logs()
    assert not wrong, "\n".join([f"PYCOLLECT_TEST_SOAK_SEED={seed} {placement}", *wrong, *logs])
    return max((o.value for o in outcomes if not o.died), default=0.0)


SEEDS = (0, 3)  # seeds that together have every fault
IN_ORDER, MIXED = "aabbcc", "abacba"


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["", IN_ORDER])
@pytest.mark.parametrize("seed", [int(FIRST_SEED)] if FIRST_SEED else SEEDS)
def test_random_calls_with_faults(seed, placement):
    run_one_scenario(seed, placement)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["", IN_ORDER, MIXED])
def test_more_random_calls_with_faults(placement):
    start, seed = time.monotonic(), int(FIRST_SEED or 1000)
    while time.monotonic() - start < SECONDS:
        latest = run_one_scenario(seed, placement)
        took = time.monotonic() - start
        print(f"seed {seed}: {took:.0f} s, errors at most {latest:.2f} s after a death")
        seed += 1
