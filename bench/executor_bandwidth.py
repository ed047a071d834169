"""Measure the executor alone against MPI's own calls, all without Python and torch.

The script builds native/allreduce.cpp with the C++ of csrc, and native/allreduce_mpi.cpp with every
MPI implementation that it finds in PATH (Open MPI, Intel MPI). The programs warm up by themselves
and run in turns, all sizes in each run; -n is the number of turns, and ratios are medians over
them. Try `python bench/executor_bandwidth.py -e 16M`. Without MPI only the executor is timed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pycollect._sizes import bytes_text, size_argument
from pycollect._timing import Timing, shuffled, turns
from pycollect_bench import mpi, report
from pycollect_bench.lists import MIB
from pycollect_bench.options import list_of, positive
from pycollect_bench.ranks import output
from pycollect_bench.report import Column
from pycollect_bench.runner import OURS, PEER, Item, Result, Row, Script, compared

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "bench" / "native"
COPY, ZERO_COPY = "copy", "zero-copy"
PEERS = [implementation.name for implementation in mpi.IMPLEMENTATIONS]
# Timeout in seconds of one run of a program: ten times the time of eight ranks on two cores.
TURN_LIMIT = 600
TURNS = 5
LEVEL = "-O3"  # optimisation; tests override it, to compile three times as fast


TABLE = report.Table(
    "# Median time per call on the slowest rank (barrier: rank 0); then the peers' time by ours.",
    [
        Column("world"),
        Column("size", lambda a, row: bytes_text(a["bytes"]) if a["bytes"] else "barrier", width=8),
        Column("program", "name", width=-10),
        report.times()[0],
        *(Column(f"x {peer}", f"x{peer}") for peer in PEERS),
    ],
)


def build(folder: Path, installed: Sequence[mpi.Mpi]) -> tuple[str, list[Path]]:
    """Build our program and those of the MPI implementations; return their paths."""
    ours = output(
        ROOT / "tests/native/build.sh", folder, NATIVE / "allreduce.cpp", LEVEL, seconds=TURN_LIMIT
    ).strip()
    programs = [folder / peer.name for peer in installed]
    flags = ["-std=c++20", LEVEL, "-Wall", "-Wextra", NATIVE / "allreduce_mpi.cpp", "-o"]
    for peer, program in zip(installed, programs, strict=True):
        output(*peer.command(mpi.COMPILER, *flags, program), seconds=TURN_LIMIT)
    return ours, programs


def medians(text: str) -> dict[int, float]:
    """Parse what measure.h prints; return the median seconds by size in bytes, 0 for a barrier.

    >>> medians("4 0.5\\n0 0.25\\n")
    {4: 5e-07, 0: 2.5e-07}
    """
    found = re.findall(r"^(\d+) ([\d.]+)$", text, re.MULTILINE)
    return {int(nbytes): float(time) / 1e6 for nbytes, time in found}


def measure(args: argparse.Namespace) -> Iterator[Item]:
    """Run all programs in turns, world by world; a wrong element ends a program, and the run."""
    installed = mpi.find_all()
    found = ", ".join(map(str, installed)) or "no MPI was found, see bench/README.md"
    yield f"# peers: {found}"
    ours, theirs = build(args.build.resolve(), installed)
    most = max(1, args.maxbytes // MIB)
    yield TABLE
    for world in args.world:
        commands = {COPY: [ours, world, most], ZERO_COPY: [ours, world, most, ZERO_COPY]}
        for peer, program in zip(installed, theirs, strict=True):
            commands[peer.name] = [*peer.launch_command(world), program, most]
        # A run measures all sizes and warms up by itself, so it is not a sampler of `interleave`.
        runs: dict[str, list[dict[int, float]]] = {name: [] for name in commands}
        for _, name in turns(list(commands), args.iterations or TURNS, shuffled(world)):
            runs[name].append(medians(output(*commands[name], seconds=TURN_LIMIT)))
        for nbytes in sorted(runs[COPY][0]):
            times = {n: Timing(tuple((t[nbytes],) for t in of)) for n, of in runs.items()}
            rows = [Row(n, times[n], PEER if n in PEERS else OURS) for n in times]
            yield Result({"world": world, "bytes": nbytes}, compared(rows))


def targets(args: argparse.Namespace) -> Iterator[report.Target]:
    """Yield the targets: each peer is beaten at every size and in the barrier."""
    large = report.where(bytes=report.at_least(MIB))
    for peer in mpi.IMPLEMENTATIONS:
        faster = report.over(peer.name)
        yield report.Target(f"{peer.title}, every size and the barrier", 1, COPY, faster)
        what = f"{peer.title}, zero-copy, from 1 MiB"
        yield report.Target(what, 2.5, ZERO_COPY, faster, large)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world", type=list_of(positive), default="2,4", help="numbers of ranks (2,4)")
    add("-e", "--maxbytes", type=size_argument, default="128M", help="largest size (128M)")
    folder = ROOT / "build" / "native"
    add("--build", type=Path, default=folder, help="folder of objects and programs")


SCRIPT = Script(
    "executor_bandwidth",
    __doc__,
    add_arguments,
    measure,
    seconds=None,
    targets=targets,
    about=lambda args: {"mpi": {peer.name: str(peer) for peer in mpi.find_all()}},
)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
