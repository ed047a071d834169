"""Groups over several hosts, in placements of the ranks that `ranks_as` does not have.

PYCOLLECT_HOST makes processes of this machine count as those of several hosts. The results have the
bits of the one-process API, as on one host, whatever the placement.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dist_pool import OURS, Pools, pools_of_a_module
from reference import DTYPES, MOVED, short
from test_dist_matrix import QUICK_DTYPES, report, sweep

pytestmark = pytest.mark.skipif(not OURS, reason="PYCOLLECT_HOST is pycollect's")

# Hosts of equal and of unequal sizes, one rank per host, and ranks that are not consecutive.
PLACEMENTS = ("ab", "abb", "aba", "aabb", "abab", "abbc", "abca", "abcd", "aaaaaabb", "abcdabcd")
QUICK = {"aabb": QUICK_DTYPES, "abca": (torch.float16, torch.uint8), "abb": (torch.float64,)}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    yield from pools_of_a_module()


@pytest.mark.parametrize(
    ("placement", "dtype"),
    [
        pytest.param(
            place,
            dtype,
            marks=[] if dtype in QUICK.get(place, ()) else [pytest.mark.slow],
            id=f"{place}-{short(dtype)}",
        )
        for place in PLACEMENTS
        for dtype in ((*DTYPES, *MOVED) if len(place) < 8 else QUICK_DTYPES)
    ],
)
def test_results_have_the_bits_of_the_one_process_api(pools, placement, dtype):
    found = pools(len(placement), placement=placement).run(sweep, dtype, seconds=90)
    assert {run for run, _ in found} != {0}
    report([wrong for _, wrong in found])
