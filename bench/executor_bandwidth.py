"""Measure the executor alone against MPI's own calls, all without Python and torch.

The script builds native/allreduce.cpp with the C++ of csrc, and native/allreduce_mpi.cpp with every
MPI implementation that it finds in PATH (Open MPI, Intel MPI). The programs warm up by themselves
and run in turns, all sizes in each run; -n is the number of turns, and ratios are medians over
them. Try `python bench/executor_bandwidth.py -e 16M`. Without MPI only the executor is timed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pycollect._sizes import binary_size, size_argument
from pycollect._timing import Timing, shuffled, turns
from pycollect_bench import mpi, report
from pycollect_bench.options import list_of, whole
from pycollect_bench.ranks import RanksFailed
from pycollect_bench.runner import OURS, PEER, Item, Result, Row, Script

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "bench" / "native"
COPY, ZERO_COPY = "copy", "zero-copy"
PEERS = [implementation.name for implementation in mpi.IMPLEMENTATIONS]
# Timeout in seconds of one run of a program: ten times the time of eight ranks on two cores.
TURN_LIMIT = 600
TURNS = 5
LEVEL = "-O3"  # optimisation; tests override it, to compile three times as fast
# The times of a barrier are stored under this size in bytes.
BARRIER = 0
MIB = 1 << 20

Commands = dict[str, Callable[[int], list[str]]]  # candidate: the command for a number of ranks


def size(about: dict[str, Any]) -> str:
    return binary_size(about["bytes"]) if about["bytes"] else "barrier"


TABLE = report.Table(
    "# Median time per call on the slowest rank (barrier: rank 0); then the peers' time by ours.",
    [
        report.of_about("world", "world"),
        report.Column("size", "", 8, lambda about, row: size(about)),
        report.name("program", 10),
        report.times()[0],
        *(report.faster(peer, f"x {peer}") for peer in PEERS),
    ],
)


def run(command: Sequence[str | Path]) -> str:
    words = [str(word) for word in command]
    how = {"capture_output": True, "text": True, "timeout": TURN_LIMIT, "check": False}
    try:
        done = subprocess.run(words, **how)
    except subprocess.TimeoutExpired as error:
        raise RanksFailed(str(error)) from None
    if done.returncode:
        raise RanksFailed(f"{shlex.join(words)}\nended with {done.returncode}\n{done.stderr}")
    return done.stdout


def build(folder: Path) -> str:
    """Build our program and return its path."""
    return run([ROOT / "tests/native/build.sh", folder, NATIVE / "allreduce.cpp", LEVEL]).strip()


def build_peer(peer: mpi.InstalledMpi, folder: Path) -> str:
    """Build the program of an MPI implementation and return its path."""
    source, program = NATIVE / "allreduce_mpi.cpp", folder / peer.name
    run(peer.compile_command(["-std=c++20", LEVEL, "-Wall", "-Wextra"], source, program))
    return str(program)


def medians(text: str) -> dict[int, float]:
    """Parse the table that measure.h prints; return the median seconds by size in bytes.

    >>> medians("bytes us best\\n 4 0.5 0.4\\n barrier 0.25 0.2")
    {4: 5e-07, 0: 2.5e-07}
    """
    found = {}
    for size, time, *_ in map(str.split, text.splitlines()):
        if size.isdigit() or size == "barrier":
            found[int(size) if size.isdigit() else BARRIER] = float(time) / 1e6
    return found


def commands(args: argparse.Namespace) -> Commands:
    """Build all programs; return the command of each candidate for a number of ranks."""

    def launched(peer: mpi.InstalledMpi, program: str, world: int) -> list[str]:
        return [*peer.launch_command(world), program, most]

    folder, most = args.build.resolve(), str(max(1, args.maxbytes // MIB))
    ours = build(folder)
    found: Commands = {
        COPY: lambda world: [ours, str(world), most],
        ZERO_COPY: lambda world: [ours, str(world), most, ZERO_COPY],
    }
    for peer in mpi.find_all():
        found[peer.name] = partial(launched, peer, build_peer(peer, folder))
    return found


def measure(args: argparse.Namespace) -> Iterator[Item]:
    """Run all programs in turns, world by world; a wrong element ends a program, and the run."""
    found = ", ".join(map(str, mpi.find_all())) or "no MPI was found, see bench/README.md"
    yield f"# peers: {found}"
    programs = commands(args)
    yield TABLE
    for world in args.world:
        # A run measures all sizes and warms up by itself, so it is not a sampler of `interleave`.
        runs: dict[str, list[dict[int, float]]] = {name: [] for name in programs}
        for _, name in turns(list(programs), args.iterations or TURNS, shuffled(world)):
            runs[name].append(medians(run(programs[name](world))))
        for nbytes in sorted(runs[COPY][0]):
            times = {n: Timing(tuple((t[nbytes],) for t in of)) for n, of in runs.items()}
            peers = {name: times.pop(name) for name in PEERS if name in times}
            rows = [Row(name, timing, OURS).compared(peers) for name, timing in times.items()]
            rows += [Row(name, timing, PEER) for name, timing in peers.items()]
            yield Result({"world": world, "bytes": nbytes}, rows)


def targets(args: argparse.Namespace) -> Sequence[report.Target]:
    """Return the outcomes of the targets: each peer is beaten at every size and in the barrier."""
    large = report.where(bytes=report.at_least(MIB))
    targets = []
    for peer in mpi.IMPLEMENTATIONS:
        what, faster = f"{peer.title}, every size and the barrier", report.over(peer.name)
        targets.append(report.Target(what, 1, COPY, faster))
        what = f"{peer.title}, zero-copy, from 1 MiB"
        targets.append(report.Target(what, 2.5, ZERO_COPY, faster, large))
    return targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world", type=list_of(whole), default="2,4", help="numbers of ranks (2,4)")
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
