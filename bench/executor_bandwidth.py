"""Measure the executor alone against MPI's own calls, all without Python and torch.

The script builds native/allreduce.cpp with the C++ of csrc, and native/allreduce_mpi.cpp with every
MPI implementation that it finds in PATH (Open MPI, Intel MPI). The programs run in turns, all sizes
in each run; ratios are medians over the turns. Try `python bench/executor_bandwidth.py -e 16M`.
Without MPI only the executor is timed.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pycollect._command import Interruption
from pycollect._sizes import binary_size, size_argument
from pycollect._timing import ratios, shuffled, turns
from pycollect_bench import environment, mpi, scripts, table
from pycollect_bench.options import list_of
from pycollect_bench.output import write_json
from pycollect_bench.record import rounds_record, target_record
from pycollect_bench.targets import MIB, Outcome, status

ROOT = Path(__file__).resolve().parents[1]
COPY, ZERO_COPY = OURS = ("copy", "zero-copy")
PEERS = tuple(implementation.name for implementation in mpi.IMPLEMENTATIONS)
# Timeout in seconds of one run of a program: ten times the time of eight ranks on two cores.
TURN_LIMIT = 600
LEVEL = "-O3"  # optimisation; tests override it, to compile three times as fast
# The times of a barrier are stored under this size in bytes.
BARRIER = 0

Times = dict[str, dict[int, list[float]]]  # candidate, bytes: seconds, by turn
Commands = dict[str, Callable[[int], list[str]]]  # candidate: the command for a number of ranks


def run(command: Sequence[str | Path]) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TURN_LIMIT, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}\nended with {done.returncode}\n{done.stderr}")
    return done.stdout


def build(folder: Path) -> Path:
    """Build our program and return its path."""
    source = ROOT / "bench" / "native" / "allreduce.cpp"
    return Path(run([ROOT / "tests/native/build.sh", folder, source, LEVEL]).strip())


def build_peer(peer: mpi.InstalledMpi, folder: Path) -> Path:
    """Build the program of an MPI implementation and return its path."""
    source, program = ROOT / "bench" / "native" / "allreduce_mpi.cpp", folder / peer.name
    run(peer.compile_command(["-std=c++20", LEVEL, "-Wall", "-Wextra"], source, program))
    return program


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


def commands(args: argparse.Namespace, peers: Sequence[mpi.InstalledMpi]) -> Commands:
    """Build all programs; return the command of each candidate for a number of ranks."""
    folder, most = args.build.resolve(), str(args.maxbytes >> 20)
    ours = str(build(folder))
    found: Commands = {
        COPY: lambda world: [ours, str(world), most],
        ZERO_COPY: lambda world: [ours, str(world), most, "zero-copy"],
    }
    for peer in peers:
        program = str(build_peer(peer, folder))
        found[peer.name] = partial(_launch, peer, program, most)
    return found


def _launch(peer: mpi.InstalledMpi, program: str, most: str, world: int) -> list[str]:
    return [*peer.launch_command(world), program, most]


def measure(world: int, programs: Commands, turns_of_each: int, times: Times) -> None:
    """Run all programs in turns and add their times; a wrong element ends the benchmark."""
    times.update({name: {} for name in programs})
    # A run measures all sizes and warms up by itself, so it is not a sampler of `interleave`.
    for _, name in turns(list(programs), turns_of_each, shuffled(world)):
        for nbytes, seconds in medians(run(programs[name](world))).items():
            times[name].setdefault(nbytes, []).append(seconds)


def speedups(times: Times, name: str, peer: str, nbytes: int) -> list[float]:
    """Return the peer's time divided by that of `name`, by turn; empty if one is missing."""
    if nbytes not in times.get(peer, {}) or nbytes not in times.get(name, {}):
        return []
    return ratios(times[peer][nbytes], times[name][nbytes])


def faster(times: Times, name: str, peer: str, nbytes: int) -> float | None:
    """Return the peer's time divided by that of `name`: the median over the turns, or None."""
    found = speedups(times, name, peer, nbytes)
    return statistics.median(found) if found else None


# A column of ratios: a candidate of ours, and the peer whose time is divided by its time.
RATIOS = tuple((name, peer) for peer in PEERS for name in OURS)


def heads() -> list[str]:
    return [*OURS, *PEERS, *(f"{peer}/{name}" for name, peer in RATIOS)]


def print_table(world: int, times: Times) -> None:
    def cell(value: float | None, head: str) -> str:
        return ("-" if value is None else f"{value:.2f}").rjust(max(10, len(head)))

    for nbytes in sorted(times[COPY]):
        found = [times.get(name, {}).get(nbytes) for name in (*OURS, *PEERS)]
        values = [statistics.median(t) * 1e6 if t else None for t in found]
        values += [faster(times, name, peer, nbytes) for name, peer in RATIOS]
        size = binary_size(nbytes) if nbytes else "barrier"
        print(f"{world:6} {size:>8}", *map(cell, values, heads()), flush=True)


def judge(found: dict[int, Times]) -> list[Outcome]:
    """Return the outcome of the targets: each peer is beaten at every size and in the barrier."""

    def worst(what: str, wanted: float, peer: str, name: str, least: int) -> Outcome:
        points = [
            (ratio, f"{world} ranks, {binary_size(nbytes) if nbytes else 'barrier'}")
            for world, times in found.items()
            for nbytes in times.get(name, {})
            if nbytes >= least and (ratio := faster(times, name, peer, nbytes)) is not None
        ]
        value, where = min(points, default=(None, ""))
        return Outcome(what, wanted, value, where=where)

    return [
        outcome
        for peer in mpi.IMPLEMENTATIONS
        for outcome in (
            worst(f"{peer.title}, every size and the barrier", 1, peer.name, COPY, BARRIER),
            worst(f"{peer.title}, zero-copy, from 1 MiB", 2.5, peer.name, ZERO_COPY, MIB),
        )
    ]


def rows(found: dict[int, Times]) -> list[dict[str, Any]]:
    """Return a row for the JSON file per world, candidate and size, in seconds."""
    return [
        {
            "world": world,
            "bytes": nbytes,
            "candidate": name,
            "time": rounds_record(seconds),
            "speedup": {
                peer: rounds_record(won)
                for peer in PEERS
                if name in OURS and (won := speedups(times, name, peer, nbytes))
            },
        }
        for world, times in found.items()
        for name, by_size in times.items()
        for nbytes, seconds in by_size.items()
    ]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--world", type=list_of(int), default="2,4", help="numbers of ranks (2,4)")
    add("-e", "--maxbytes", type=size_argument, default="128M", help="largest size (128M)")
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
    peers = mpi.find_all()
    programs = commands(args, peers)
    about = environment.describe(shlex.join(sys.orig_argv))
    about["mpi"] = {peer.name: str(peer) for peer in peers}
    before = environment.Load.now()
    print(*environment.header(about), sep="\n")
    print(f"# peers: {', '.join(map(str, peers)) or 'no MPI was found, see bench/README.md'}")
    print("# Median us per call on the slowest rank (barrier: rank 0); then ratios of times")
    print(f"#world {'size':>8}", *(head.rjust(10) for head in heads()), flush=True)
    found: dict[int, Times] = {}
    with Interruption() as interruption:
        for world in args.world:
            found[world] = {}
            measure(world, programs, args.turns, found[world])
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
