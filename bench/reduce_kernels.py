"""Measure the reduction kernel with other constants against the rate of a copy, L2 hot and cold.

The constants are bytes per access, loads in flight, blocks per multiprocessor and waves of a grid.
For each size the table has the best variant and the library's. A third table has the cost of a
launch by the bytes of its arguments. The script builds native/reduce_kernels with nvcc. Without
nvcc or a GPU it prints one sentence and exits with status 77.
`python bench/reduce_kernels.py --all` prints every variant.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from pycollect._sizes import binary_size
from pycollect_bench.nvcc import ROOT, Finding, Probe, run_probe

SOURCES = [ROOT / "bench" / "native" / "reduce_kernels" / "main.cu"]


def case_of(found: Finding) -> tuple[str, int, int]:
    return found["dtype"], found["world"], found["bytes"]


def rate(found: Finding, us: float) -> float:
    """Return GB/s, counting a read and a write of every rank's tensor."""
    return float(2 * found["world"] * found["bytes"] / us / 1e3)


def variant_line(found: Finding, best: Finding) -> str:
    share = 100 * found["memcpy_us"] / found["us"]
    constants = "".join(
        f"{found[key]:>8}" for key in ("width", "in_flight", "blocks_per_sm", "waves")
    )
    return (
        f" {found['dtype']:<9}{found['world']:>5} {binary_size(found['bytes']):>8}{constants}"
        f" {found['us']:>9.2f} {rate(found, found['us']):>8.0f} {share:>8.0f}"
        f" {best['us'] / found['us']:>8.2f} {found['wrong']:>6}{'  library' * found['library']}"
    )


def variant_lines(all_found: Sequence[Finding], every: bool) -> Iterator[str]:
    """Yield lines, fastest first: for each case the best and the library's, or `every` variant."""
    for _, group in groupby(all_found, case_of):
        ordered = sorted(group, key=lambda found: float(found["us"]))
        for found in ordered:
            if every or found is ordered[0] or found["library"] or found["wrong"]:
                yield variant_line(found, ordered[0])


def cache_line(found: Finding) -> str:
    hot, cold = (rate(found, found[key]) for key in ("hot_us", "cold_us"))
    slower = found["cold_us"] / found["hot_us"]
    return (
        f" {found['dtype']:<9}{found['world']:>5} {binary_size(found['bytes']):>8}"
        f" {binary_size(found['world'] * found['bytes']):>9} {found['hot_us']:>9.2f}"
        f" {found['cold_us']:>9.2f} {hot:>8.0f} {cold:>8.0f} {slower:>6.2f}"
        f" {100 * found['memcpy_hot_us'] / found['hot_us']:>8.0f}"
        f" {100 * found['memcpy_cold_us'] / found['cold_us']:>8.0f}"
    )


def args_line(found: Finding) -> str:
    return f" {found['bytes']:>9} {found['issue_us']:>9.2f} {found['us']:>9.2f}"


def print_tables(all_found: Sequence[Finding], every: bool) -> None:
    variants, cached, args = (
        [found for found in all_found if found["question"] == question]
        for question in ("variant", "l2", "args")
    )
    print("# Repeated all-reduces in place on one memory; %memcpy: relative to the rate of a copy")
    print(
        f"#{'dtype':<9}{'world':>5} {'a rank':>8}{'width':>8}{'loads':>8}{'blocks':>8}{'waves':>8}"
        f" {'us':>9} {'GB/s':>8} {'%memcpy':>8} {'of best':>8} {'#wrong':>6}"
    )
    print(*variant_lines(variants, every), sep="\n")
    print(
        "# The library's constants; hot: after the same fold, cold: after a memset that flushes L2"
    )
    print(
        f"#{'dtype':<9}{'world':>5} {'a rank':>8} {'together':>9} {'hot us':>9} {'cold us':>9}"
        f" {'hot GB/s':>8} {'GB/s':>8} {'ratio':>6} {'%mc hot':>8} {'%mc cold':>8}"
    )
    print(*map(cache_line, cached), sep="\n")
    print("# A launch by the bytes of its arguments: until the call returns, and on the GPU")
    print(f"#{'bytes':>9} {'issue us':>9} {'GPU us':>9}")
    print(*map(args_line, args), sep="\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    return run_probe(Probe("reduce_kernels", __doc__ or "", SOURCES, print_tables), argv)


if __name__ == "__main__":
    sys.exit(main())
