"""Measure the executor alone against Open MPI's own calls, both without Python and torch.

The script builds native/allreduce.cpp with the C++ of csrc, and native/allreduce_mpi.cpp with
mpicxx. The programs run in turns, all sizes in each run; ratios are medians over the turns. Try
`python bench/executor_bandwidth.py -e 16M`. Without Open MPI only the executor is timed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycollect._command import Interruption
from pycollect._sizes import binary_size, parse_size
from pycollect._timing import ratios, shuffled, turns
from pycollect_bench import environment, scripts, table
from pycollect_bench.options import list_of
from pycollect_bench.output import write_json
from pycollect_bench.processes.worker_pool import mpirun
from pycollect_bench.record import rounds_record, target_record
from pycollect_bench.targets import MIB, Outcome, status

ROOT = Path(__file__).resolve().parents[1]
# OMPI_SKIP_MPICXX leaves out Open MPI's C++ interface, which is not needed and causes warnings.
MPI_FLAGS = ("-std=c++20", "-O3", "-Wall", "-Wextra", "-DOMPI_SKIP_MPICXX=1")
COPY, ZERO_COPY, MPI = "copy", "zero-copy", "mpi"
# Timeout in seconds of one run of a program: ten times the time of eight ranks on two cores.
TURN_LIMIT = 600
LEVEL = "-O3"  # optimisation of our program; tests override it, to compile three times as fast
# The times of a barrier are stored under this size in bytes.
BARRIER = 0

Times = dict[str, dict[int, list[float]]]  # candidate, bytes: seconds, by turn


def run(command: Sequence[str | Path]) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TURN_LIMIT, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}\nended with {done.returncode}\n{done.stderr}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Build our program and Open MPI's, and return their paths; without mpicxx only ours exists."""
    here = ROOT / "bench" / "native"
    ours = run([ROOT / "tests/native/build.sh", folder, here / "allreduce.cpp", LEVEL])
    theirs = folder / "allreduce_mpi"
    if shutil.which("mpicxx"):
        run(["mpicxx", *MPI_FLAGS, here / "allreduce_mpi.cpp", "-o", theirs])
    return Path(ours.strip()), theirs


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


def measure(world: int, ours: Path, theirs: Path, args: argparse.Namespace, times: Times) -> None:
    """Run all programs in turns and add their times; a wrong element ends the benchmark."""
    most = str(args.maxbytes >> 20)
    commands = {
        COPY: [str(ours), str(world), most],
        ZERO_COPY: [str(ours), str(world), most, "zero-copy"],
    }
    if theirs.exists():
        commands[MPI] = [*mpirun(world), str(theirs), most]
    times.update({name: {} for name in commands})
    # A run measures all sizes and warms up by itself, so it is not a sampler of `interleave`.
    for _, name in turns(list(commands), args.turns, shuffled(world)):
        for nbytes, seconds in medians(run(commands[name])).items():
            times[name].setdefault(nbytes, []).append(seconds)


def speedups(times: Times, name: str, nbytes: int) -> list[float]:
    """Return Open MPI's time divided by that of `name`, by turn; empty without Open MPI."""
    if MPI not in times or nbytes not in times.get(name, {}):
        return []
    return ratios(times[MPI][nbytes], times[name][nbytes])


def faster(times: Times, name: str, nbytes: int) -> float | None:
    """Return Open MPI's time divided by that of `name`: the median over the turns, or None."""
    found = speedups(times, name, nbytes)
    return statistics.median(found) if found else None


def print_table(world: int, times: Times) -> None:
    def cell(value: float | None, digits: int = 2) -> str:
        return ("-" if value is None else f"{value:.{digits}f}").rjust(10)

    for nbytes in sorted(times[COPY]):
        found = [times.get(name, {}).get(nbytes) for name in (COPY, ZERO_COPY, MPI)]
        middle = [cell(statistics.median(t) * 1e6 if t else None) for t in found]
        won = [cell(faster(times, name, nbytes)) for name in (COPY, ZERO_COPY)]
        size = binary_size(nbytes) if nbytes else "barrier"
        print(f"{world:6} {size:>8}", *middle, *won, flush=True)


def judge(found: dict[int, Times]) -> list[Outcome]:
    def worst(what: str, wanted: float, name: str, least: int) -> Outcome:
        points = [
            (ratio, f"{world} ranks, {binary_size(nbytes)}")
            for world, times in found.items()
            for nbytes in times.get(name, {})
            if nbytes >= least and (ratio := faster(times, name, nbytes)) is not None
        ]
        value, where = min(points, default=(None, ""))
        return Outcome(what, wanted, value, where=where)

    return [
        worst("Open MPI, the executor itself, every size", 1, COPY, 1),
        worst("Open MPI, zero-copy, from 1 MiB", 2.5, ZERO_COPY, MIB),
    ]


def rows(found: dict[int, Times]) -> list[dict[str, Any]]:
    """Return a row for the JSON file per world, candidate and size, in seconds."""
    return [
        {
            "world": world,
            "bytes": nbytes,
            "candidate": name,
            "time": rounds_record(seconds),
            "speedup": {MPI: rounds_record(won)} if won else {},
        }
        for world, times in found.items()
        for name, by_size in times.items()
        for nbytes, seconds in by_size.items()
        for won in [speedups(times, name, nbytes)]
    ]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--world", type=list_of(int), default="2,4", help="numbers of ranks (2,4)")
    add("-e", "--maxbytes", type=parse_size, default="128M", help="largest size (128M)")
    add("--turns", type=int, default=5, help="runs of each program (5)")
    add(
        "--build",
        type=Path,
        default=ROOT / "build" / "native",
        help="folder of objects and programs",
    )
    add("--json", metavar="FILE", help="all results, in medians and their spread")
    return scripts.parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("executor_bandwidth", lambda: compare(argv))


def compare(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    ours, theirs = build(args.build.resolve())
    about = environment.describe(shlex.join(sys.orig_argv))
    before = environment.Load.now()
    print(*environment.header(about), sep="\n")
    print(
        "# Median us per call on the slowest rank (barrier: rank 0); x: Open MPI's divided by this"
    )
    heads = (COPY, ZERO_COPY, MPI, f"x {COPY}", f"x {ZERO_COPY}")
    print(f"#world {'size':>8}", *(head.rjust(10) for head in heads), flush=True)
    found: dict[int, Times] = {}
    with Interruption() as interruption:
        for world in args.world:
            found[world] = {}
            measure(world, ours, theirs, args, found[world])
            print_table(world, found[world])
    outcomes = judge(found)
    noise = environment.noise(before, environment.Load.now(), [])
    print(*table.target_lines(outcomes), sep="\n")
    print(*environment.footer(noise), sep="\n")
    content = {
        "environment": about,
        "noise": noise,
        "rows": rows(found),
        "targets": [target_record(outcome) for outcome in outcomes],
    }
    write_json(args.json, content, interruption)
    interruption.reraise(args.json)
    return status(outcomes)


if __name__ == "__main__":
    sys.exit(main())
