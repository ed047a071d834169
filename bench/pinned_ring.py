"""Measure other sizes of the pinned staging ring between pageable host memory and a GPU.

The sizes are bytes per piece and number of pieces. For each copy the table has the best and the
library's, relative to pinned memory and to CUDA's own pageable copies. The script builds
native/pinned_ring with nvcc. Without nvcc or a GPU it prints one sentence and exits with status 77.
`python bench/pinned_ring.py --all` prints every size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby

from pycollect._sizes import binary_size
from pycollect_bench.nvcc import ROOT, Finding, Probe, run_probe

SOURCES = [
    ROOT / "bench" / "native" / "pinned_ring" / "main.cu",
    ROOT / "csrc" / "cuda" / "pinned_ring.cpp",
]


def case_of(found: Finding) -> tuple[bool, int]:
    return found["enters"], found["bytes"]


def line(found: Finding, best: Finding) -> str:
    way = "to the GPU" if found["enters"] else "to the host"
    return (
        f" {way:<12}{binary_size(found['bytes']):>8} {binary_size(found['piece']):>8}"
        f" {found['pieces']:>6} {found['us']:>10.2f} {found['bytes'] / found['us'] / 1e3:>7.2f}"
        f" {100 * found['pinned_us'] / found['us']:>8.0f}"
        f" {found['pageable_us'] / found['us']:>10.2f} {best['us'] / found['us']:>8.2f}"
        f"{'  library' * found['library']}"
    )


def print_table(all_found: Sequence[Finding], every: bool) -> None:
    print(
        "# %pinned: of the rate of pinned memory; x pageable: time of CUDA's pageable copy "
        "divided by this one"
    )
    print(
        f"#{'way':<12}{'bytes':>8} {'a piece':>8} {'pieces':>6} {'us':>10} {'GB/s':>7}"
        f" {'%pinned':>8} {'x pageable':>10} {'of best':>8}"
    )
    for _, group in groupby(all_found, case_of):
        ordered = sorted(group, key=lambda found: float(found["us"]))
        for found in ordered:
            if every or found is ordered[0] or found["library"]:
                print(line(found, ordered[0]), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    return run_probe(Probe("pinned_ring", __doc__ or "", SOURCES, print_table), argv)


if __name__ == "__main__":
    sys.exit(main())
